"""The files of the page at `/`: their contents and headers."""

from __future__ import annotations

import http.client
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lite_runner.serving import static
from tests.serving.conftest import Start

FOLDER = static.FILES["/"].parent


def get(url: str, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_every_file_has_a_route_and_needs_no_key(start: Start) -> None:
    assert set(static.FILES.values()) == set(FOLDER.iterdir())
    served = start(key=b"0123")
    for path, file in static.FILES.items():
        answer = get(served.url, path)
        assert (answer.status, answer.read()) == (200, file.read_bytes())
        assert answer.headers["Content-Type"].partition(";")[0] == static._TYPES[file.suffix]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert {name: answer.headers[name] for name in static.HEADERS} == static.HEADERS
    for path in ("/v1/models", "/static/", "/static/../app.py", "/static/nothing", "/index.html"):
        assert get(served.url, path).status == 401


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere() -> None:
    given = dict(part.strip().split(" ", 1) for part in static.POLICY.split(";"))
    assert given["default-src"] == given["frame-ancestors"] == given["form-action"] == "'none'"
    sources = {value for name, value in given.items() if name.endswith("-src")}
    assert sources == {"'none'", "'self'"}


def test_other_names_of_this_machine_and_other_methods_are_refused(start: Start) -> None:
    served = start()
    assert get(served.url, "/", Host="elsewhere.example").status == 400
    assert get(served.url, "/", method="POST").status == 405
    head = get(served.url, "/", method="HEAD")
    assert head.status == 200 and head.headers["Content-Security-Policy"] == static.POLICY


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_a_file_asks_for_nothing_from_elsewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, which nobody fetches
    assert not re.search(r"https?:|[\"'(]//|@import|wss?:|data:[a-z]+/", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=", text)


def test_files_that_the_page_names_exist() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:src|href)="([^"]+)"', html))
    assert {f"/{name}" for name in named} <= set(static.FILES)
    for script in FOLDER.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', script.read_text(encoding="utf-8")):
            assert f"/static/{name}" in static.FILES
    ids = set(re.findall(r'\bid="([^"]+)"', html))
    code = (FOLDER / "page.js").read_text(encoding="utf-8")
    assert set(re.findall(r'\$\("([^"]+)"\)', code)) <= ids
    assert set(re.findall(r'\b(?:for|form|aria-describedby)="([^"]+)"', html)) <= ids


def test_the_page_is_small() -> None:
    """It is loaded over a tunnel, and read by whoever serves it to others."""
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 40_000
