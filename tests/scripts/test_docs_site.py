"""The documentation site: every page is in its navigation once, and every link holds in it."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from collections.abc import Iterator
from posixpath import dirname, join, normpath
from typing import Any

import pytest
import yaml

from tests.doc_pages import anchors
from tests.paths import ROOT

SITE = runpy.run_path(str(ROOT / "scripts/docs_site.py"))
# Pages of the site -> their files.
DOCS = ROOT / "docs"
SOURCES = {str(path.relative_to(DOCS)): path for path in DOCS.rglob("*.md")} | {
    target: ROOT / name for name, target in SITE["PAGES"].items()
}


def translated(name: str, repository: str = "") -> str:
    text: str = SITE["with_links"](SOURCES[name].read_text(encoding="utf-8"), name, repository)
    return text


def named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from named(entry)


def test_the_navigation_names_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert Counter(named(config["nav"])) == Counter([*SOURCES, SITE["API"], SITE["PICTURES"]])


def test_links_between_pages_hold(subtests: pytest.Subtests) -> None:
    for name in SOURCES:
        with subtests.test(page=name):
            text = re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "", translated(name), flags=re.M | re.S)
            for target, anchor in re.findall(r"\]\((?!https?:)([^()#\s]*)#?([^()\s]*)\)", text):
                there = normpath(join(dirname(name), target)) if target else name
                if target.endswith(".svg"):
                    assert (DOCS / there).is_file()
                    continue
                assert there in SOURCES, target
                assert not anchor or anchor in anchors(SOURCES[there]), f"{target}#{anchor}"


def test_a_file_of_the_repository_is_a_link_where_its_address_is_known() -> None:
    link = "[app.py](../lite_runner/app.py)"
    assert link in SOURCES["architecture.md"].read_text(encoding="utf-8")
    assert "in app.py |" in translated("architecture.md")
    there = "in [app.py](https://example.org/x/blob/main/lite_runner/app.py) |"
    assert there in translated("architecture.md", "https://example.org/x/")


def test_code_is_unchanged() -> None:
    page = "```\n[a](../b.py)\n```\n`[a](../b.py)` [`x`](../b.py)\n"
    assert SITE["with_links"](page, "models.md", "") == page.replace("[`x`](../b.py)", "`x`")


def test_the_schema_is_published() -> None:
    assert json.loads(SITE["schema"]())["title"] == "lite-runner"


def test_the_reference_names_what_the_package_exports() -> None:
    import lite_runner

    assert set(SITE["REFERENCE"]) <= {*dir(lite_runner)}
    assert SITE["api_page"]().count(":::") == len(SITE["REFERENCE"])
