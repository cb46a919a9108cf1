"""A hook of mkdocs (mkdocs.yml): pages from outside docs/, and links that hold on GitHub and here.

README and its Chinese form are the first pages. A link to a file that is no page leads to the
repository where `repo_url` is set; else its text stays without a link. The site of a version stands
in a folder of its own, build/site/VERSION; versions.json names them, for the theme to choose from.
"""

from __future__ import annotations

import json
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Pages of the root -> their names in the site.
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh.md",
    **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
}
API = "api.md"
PICTURES = "pictures.md"  # of what scripts/pictures.py has made in build/pictures
SITE = ROOT / "build/site"
SCHEMA = "schema.json"
REFERENCE = ("LLM", "Output", "pipeline", "AutoModel", "AutoTokenizer", "register")
_command: list[str] = []
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]+)\)")
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_startup(command: str, dirty: bool) -> None:
    """Remembers whether a site is built, or shown while it is written."""
    _command.append(command)


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them; a folder for the version."""
    from pymdownx.slugs import slugify

    if _command == ["build"]:
        config.site_dir = str(SITE / version())
    config.extra["version"] = {"provider": "mike"}  # which reads ../versions.json
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside docs/."""
    from mkdocs.structure.files import File

    for name, target in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    files.append(File.generated(config, API, content=api_page()))
    files.append(File.generated(config, SCHEMA, content=schema()))
    pictures = sorted((ROOT / "build/pictures").glob("*"))
    files.append(File.generated(config, PICTURES, content=pictures_page(pictures)))
    for path in pictures:
        files.append(File.generated(config, path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Translates the links of a page."""
    return with_links(markdown, page.file.src_uri, config.repo_url or "")


def on_post_build(config: Any) -> None:
    """The versions that are there, newest first, and a first page that leads to this one."""
    if _command != ["build"]:
        return
    found = [path for path in SITE.iterdir() if (path / "index.html").is_file()]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    told = [{"version": path.name, "title": path.name, "aliases": []} for path in found]
    (SITE / "versions.json").write_text(json.dumps(told), encoding="utf-8")
    lead = f'<meta http-equiv="refresh" content="0; url={version()}/index.html">'
    (SITE / "index.html").write_text(f"<!doctype html><title>lite-runner</title>{lead}\n")


def version() -> str:
    """Version of the package."""
    text = (ROOT / "lite_runner/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
    assert found is not None
    return found[1]


def pictures_page(pictures: list[Path]) -> str:
    """The terminal, the server's page and the charts, as they were when the site was built."""
    shown = {"terminal.svg": "The terminal", "page.png": "The page of `run_mode=serve`"}
    there = [path.name for path in pictures]
    parts = [
        f"## {title}\n\n![{title}]({name})\n" for name, title in shown.items() if name in there
    ]
    parts += [
        f"## {path.stem.replace('_', ' ').capitalize()}\n\n![{path.stem}]({path.name})\n"
        for path in sorted((ROOT / "docs").glob("*.svg"))
    ]
    return "\n".join(["# Pictures\n", *parts])


def api_page() -> str:
    """The reference of the Python API, which mkdocstrings fills from docstrings."""
    parts = (f"## {name}\n\n::: lite_runner.api.{_module(name)}.{name}\n" for name in REFERENCE)
    return "\n".join(["# Python API: reference\n", *parts])


def schema() -> str:
    """The JSON schema of a yaml, as the project's own environment prints it."""
    command = [ROOT / ".venv/bin/python", ROOT / "run_lite.py", "schema"]
    return subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout


def _module(name: str) -> str:
    """The module of lite_runner.api that defines a name."""
    for path in sorted((ROOT / "lite_runner/api").glob("*.py")):
        if re.search(rf"^(class|def) {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            return path.stem
    raise LookupError(f"no module of lite_runner.api defines {name}")


def with_links(markdown: str, page: str, repository: str) -> str:
    """A page's text with each relative link as it is in the site; code stays as it is."""
    names = {target: name for name, target in PAGES.items()}
    folder = posixpath.dirname(names.get(page, f"docs/{page}"))

    def translated(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path, hash_, anchor = link.partition("#")
        if not path or "://" in link:
            return match[0]
        meant = posixpath.normpath(posixpath.join(folder, path))
        there = PAGES.get(meant) or meant.removeprefix("docs/")
        if meant in PAGES or posixpath.dirname(meant) in ("docs", "docs/zh"):
            there = posixpath.relpath(there, posixpath.dirname(page) or ".")
            return f"{image}[{text}]({there}{hash_}{anchor})"
        if repository and not image:
            return f"[{text}]({repository.rstrip('/')}/blob/main/{meant}{hash_}{anchor})"
        return text

    # Odd parts are code; a link's text may hold some, so that it is set aside and put back.
    codes: list[str] = []

    def aside(match: re.Match[str]) -> str:
        codes.append(match[0])
        return f"\x00{len(codes) - 1}\x00"

    plain = _LINK.sub(translated, _CODE.sub(aside, markdown))
    return re.sub(r"\x00(\d+)\x00", lambda match: codes[int(match[1])], plain)
