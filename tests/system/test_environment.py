"""Device numbers of a machine, of a container, of a process."""

from __future__ import annotations

import pytest
import yaml

from lite_runner.errors import EnvironmentFault
from lite_runner.system import environment
from lite_runner.system.environment import (
    VISIBLE,
    index_of,
    physical_ids,
    seen_ids,
    visible_devices,
)
from tests.paths import ROOT

FACTS = yaml.safe_load((ROOT / "tests/ascend/ranks.yaml").read_text())
MACHINE = list(range(8))
CONTAINER = [4, 5, 6, 7]


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    shown = list(MACHINE)
    monkeypatch.setattr(environment, "physical_ids", lambda: shown)
    return shown


def test_the_driver_shows_devices_and_its_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [f"/dev/davinci{name}" for name in ("10", "2", "_manager", "0")]
    monkeypatch.setattr(environment.glob, "glob", lambda pattern: paths)
    assert physical_ids() == [0, 2, 10]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *FACTS["ASCEND_RT_VISIBLE_DEVICES"]["examples"].items(),
        ("x", []),
        ("", MACHINE),
    ],
)
def test_what_a_process_sees(
    shows: list[int], monkeypatch: pytest.MonkeyPatch, value: str, expected: list[int]
) -> None:
    assert seen_ids({VISIBLE: value}) == expected
    monkeypatch.setenv(VISIBLE, value)
    assert environment.ascend_devices() == len(expected)


@pytest.mark.parametrize(
    ("shown", "ids", "before", "visible", "indices"),
    [
        (MACHINE, [4, 5, 6, 7], "", "4,5,6,7", [0, 1, 2, 3]),
        (MACHINE, [4, 5, 6, 7], "4,5,6,7", "4,5,6,7", [0, 1, 2, 3]),
        (MACHINE, [2, 3], "0,1,2,3", "2,3", [0, 1]),
        # Only ascending numbers are documented, and ranks may lie otherwise.
        (MACHINE, [6, 4, 7], "", "4,6,7", [1, 0, 2]),
        (CONTAINER, [4, 5, 6, 7], "", "0,1,2,3", [0, 1, 2, 3]),
        (CONTAINER, [5, 7], "", "1,3", [0, 1]),
    ],
)
def test_from_a_rank_table_to_set_device(
    shows: list[int],
    shown: list[int],
    ids: list[int],
    before: str,
    visible: str,
    indices: list[int],
) -> None:
    shows[:] = shown
    given = {VISIBLE: before} if before else {}
    assert visible_devices(ids, given) == visible
    assert [index_of(device_id, {VISIBLE: visible}) for device_id in ids] == indices


def test_a_device_that_is_not_there(shows: list[int]) -> None:
    with pytest.raises(EnvironmentFault, match="hides device 5 of the rank table") as caught:
        visible_devices([4, 5], {VISIBLE: "3,4"})
    assert f"unset {VISIBLE}" in caught.value.hint
    shows[:] = CONTAINER
    with pytest.raises(EnvironmentFault, match="device 0,1 for this machine, which shows 4,5,6,7"):
        visible_devices([0, 1, 4], {})
    shows.clear()
    with pytest.raises(EnvironmentFault, match="which shows none"):
        index_of(0, {})
