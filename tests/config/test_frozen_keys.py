"""The keys that users type mean what they meant, in each run mode: see tests/frozen_keys.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests import frozen_keys as frozen

# What is meant to be otherwise than in accepted.json, until that is written anew:
# (run mode, key) -> why. `frozen.meaningless()` gives pairs that may be refused.
EXPECTED_CHANGES: Mapping[tuple[str, str], str] = {}
RUN_MODES = frozen.run_modes()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """The current folder, with the files that the samples name."""
    with frozen.beside(tmp_path):
        yield tmp_path


def test_every_key_is_known() -> None:
    typed = {frozen.key_of(sample) for sample in frozen.typed()["samples"]}
    free = ("context.ascend_config.", "infer.ge_options.")  # any name is one of theirs
    assert sorted(key for key in typed - frozen.known_keys() if not key.startswith(free)) == []


@pytest.mark.parametrize("run_mode", RUN_MODES)
def test_takes_the_keys_that_it_took(run_mode: str, here: Path) -> None:
    differences, changed = [], set()
    for sample, verdicts in frozen.stored("accepted.json").items():
        key, expected = frozen.key_of(sample), verdicts[run_mode]
        found = frozen.verdict(frozen.command_line(run_mode, sample), key)
        if found == expected:
            continue
        changed.add((run_mode, key))
        if (run_mode, key) not in EXPECTED_CHANGES:
            differences.append(f"run_mode={run_mode} {sample}: was {expected}, is {found}")
    assert not differences, "\n".join(["", *differences])
    expected_here = {pair for pair in EXPECTED_CHANGES if pair[0] == run_mode}
    assert expected_here <= changed, f"as before: {sorted(expected_here - changed)}"
