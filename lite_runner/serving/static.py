"""The page at `/` and its files: ours alone, and under a policy that allows no others."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Path of the URL -> file.
FILES = {
    "/": _FOLDER / "index.html",
    **{
        f"/static/{name}": _FOLDER / name
        for name in ("api.js", "icon.svg", "markdown.js", "messages.js", "page.css", "page.js")
    },
}
# Scripts, styles and images of this server, requests to this server, and nothing else; no text may
# become HTML (`trusted-types 'none'`), and no other page may hold this one in a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    return [Route(path, file) for path in FILES]


def file(request: Request) -> Response:
    found = FILES[request.scope["path"]]
    return Response(found.read_bytes(), headers=HEADERS, media_type=_TYPES[found.suffix])
