"""Command lines that are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lite_runner.app import main
from tests import left_behind

# The run's folder with its config and log, but no result.
RUN_FOLDER = re.compile(
    r"(.*/)?\d{4}-\d\d-\d\d(/[^/]+(/(config\.yaml|run\.log))?)?|(.*/)?(latest|out(puts)?)"
    r"|cache/values(/[0-9a-f]+\.json)?"  # what composing conf/ gave
)


def refused(words: Sequence[str], code: int) -> None:
    """The command line ends in `code`, and writes to the working folder nothing but the run's own:
    no result, no artifact or a part of one, and no change to what is there."""
    before = left_behind.files(Path(), contents=True)
    assert main(list(words)) == code
    written = left_behind.changes(before, left_behind.files(Path(), contents=True))
    assert [one for one in written if not RUN_FOLDER.fullmatch(one.partition(": ")[2])] == []
