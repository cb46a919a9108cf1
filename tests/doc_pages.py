"""README and docs/ as data: their blocks, the commands in them and the output that is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>$', re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"\s+# .*$")
_LOOP = re.compile(r"^for .*?^done", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./]+\.(?:yaml|py))\b")


@dataclass(frozen=True)
class Command:
    """A command as a reader types it, on one line, and the lines that the page shows below it."""

    text: str
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text, without the indentation of a list."""

    language: str
    text: str

    @property
    def file(self) -> str:
        """The file that the block shows, which its first line names: `# my.yaml`; or ''."""
        named = _FILE.match(self.text)
        return named[1] if named and self.language in ("yaml", "python") else ""

    def commands(self) -> Iterator[Command]:
        """Of a bash block every line, of a console block what follows `$ `."""
        if self.language == "bash":
            for line in _joined(self.text).splitlines():
                if line.strip() and not line.startswith("#"):
                    yield Command(_COMMENT.sub("", line))
        elif self.language == "console":
            for entry in re.split(r"^\$ ", _joined(self.text), flags=re.MULTILINE)[1:]:
                first, *output = entry.splitlines()
                yield Command(_COMMENT.sub("", first), tuple(output))


def _joined(text: str) -> str:
    """Every command on a line of its own: continued lines and loops too."""
    text = re.sub(r" *\\\n\s*", " ", text)
    return _LOOP.sub(lambda loop: re.sub(r"(do|&|;)?\s*\n\s*", _next, loop[0]), text)


def _next(end: re.Match[str]) -> str:
    """The separator of two lines of a loop when they are joined."""
    return f"{end[1]} " if end[1] else "; "


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
        for indent, language, text in _BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """The targets of a page's links."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown viewers make them, and those that it names."""
    text = prose(page)
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {*(heading.replace(" ", "-") for heading in headings), *_ANCHOR.findall(text)}
