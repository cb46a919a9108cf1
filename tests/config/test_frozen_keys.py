"""The keys that users type mean what they meant, in each run mode: see tests/frozen_keys.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import frozen_keys as frozen

RUN_MODES = frozen.run_modes()
# What is meant to be otherwise than in accepted.json, until that is written anew:
# (run mode, key) -> why. `dict.fromkeys(frozen.meaningless(), "changes nothing")` is all that may
# be refused; which is written by python -m tests.frozen_keys --overwrite.
EXPECTED_CHANGES: Mapping[tuple[str, str], str] = {}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """The current folder, with the files that the samples name."""
    with frozen.beside(tmp_path):
        yield tmp_path


def test_every_key_is_known() -> None:
    typed = {frozen.key_of(sample) for sample in frozen.typed()["samples"]}
    free = ("context.ascend_config.", "infer.ge_options.")  # any name is one of theirs
    assert sorted(key for key in typed - frozen.known_keys() if not key.startswith(free)) == [
        "mindformers"
    ]  # a section, which may be given whole


@pytest.mark.parametrize("run_mode", RUN_MODES)
def test_takes_the_keys_that_it_took(run_mode: str, here: Path) -> None:
    differences, changed = [], set[tuple[str, str]]()
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


@pytest.mark.parametrize("run_mode", RUN_MODES)
def test_a_run_of_before_is_repeated(run_mode: str, here: Path) -> None:
    """Every value that meant something is there, of the config.yaml that a run mode has left."""
    path = frozen.former(run_mode, here)
    before = flat(yaml.safe_load(path.read_text(encoding="utf-8")))
    again = flat(frozen.resolved(["--config", str(path)]))
    differences = [
        f"{key}: was {value!r}, is {again.get(key, 'gone')!r}"
        for key, value in before.items()
        if (key in again or frozen.took(run_mode, key)) and again.get(key, "gone") != value
    ]
    assert not differences, "\n".join(["", *differences])


def test_a_run_of_before_is_repeated_with_another_run_mode(here: Path) -> None:
    found, expected = frozen.changed_run_modes(here), frozen.stored("changed_run_mode.json")
    differences = [
        f"--config {before}.yaml run_mode={after}: was {verdict}, is {found[before][after]}"
        for before, verdicts in expected.items()
        for after, verdict in verdicts.items()
        if found[before][after] != verdict
    ]
    assert not differences, "\n".join(["", *differences])


def flat(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Plain data by its dotted keys."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found
