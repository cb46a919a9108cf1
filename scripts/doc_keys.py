"""Write the tables of keys at the end of the pages in docs/ anew, from the comments in conf/.

    python scripts/doc_keys.py

A table stands below a line such as `<!-- keys: conf/run_mode/shard.yaml conf/config.yaml#parallel
-->`, but on one line, which names its files, and behind a # one section or key of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner.config.help import Key, keys_in

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(?<=<!-- keys: )(.*?)( -->\n)(?:\n\|.*\n(?:\|.*\n)*)?")


def keys_of(page: str) -> list[Key]:
    """The keys that a page lists."""
    return [
        key for files, _ in TABLE.findall(page) for name in files.split() for key in _keys(name)
    ]


def with_tables(page: str) -> str:
    """The text of a page with its tables made anew."""
    return TABLE.sub(lambda found: f"{found[1]}{found[2]}\n{_table(found[1].split())}", page)


def _table(names: list[str]) -> str:
    rows = ["| key | default | |", "|---|---|---|"]
    for name in names:
        for key in _keys(name):
            default = key.default.replace("|", "\\|")
            rows.append(f"| `{key.name}` | `{default}` | {_escaped(key.meaning)} |")
    return "\n".join([*rows, ""])


def _keys(name: str) -> Iterator[Key]:
    file, _, section = name.partition("#")
    for key in keys_in(ROOT / file):
        if key.name != "run_mode" and (not section or f"{key.name}.".startswith(f"{section}.")):
            yield key


def _escaped(text: str) -> str:
    """A comment as Markdown that shows its characters."""
    return re.sub(r"([|*<\[])", r"\\\1", text)


def main() -> int:
    """Write every page whose tables have changed."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        before = path.read_text(encoding="utf-8")
        if (after := with_tables(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
