"""Rank tables; the two in tests/fixtures/rank_tables are MindFormers' documents, to the letter."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.rank_table import (
    Device,
    Node,
    RankTable,
    TableServer,
    board_error,
    device_range,
    merge,
    read_rank_table,
)
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.run_modes import errors as run_errors
from lite_runner.run_modes import heads, resolve
from lite_runner.system.files import MAX_FILE_BYTES
from tests.each import each
from tests.paths import FIXTURES

SAMPLES = FIXTURES / "rank_tables"
ONE, TWO = SAMPLES / "one_machine.json", SAMPLES / "two_machines.json"


def table(*machines: tuple[str, int]) -> RankTable:
    """Machines of so many devices, with addresses of their own."""
    return RankTable(
        tuple(
            TableServer(name, tuple(Device(k, f"192.168.{i}.{k}") for k in range(count)))
            for i, (name, count) in enumerate(machines)
        )
    )


@pytest.mark.parametrize("sample", [ONE, TWO], ids=lambda path: path.stem)
def test_a_documented_table_is_read_and_written_to_the_letter(sample: Path, tmp_path: Path) -> None:
    read_rank_table(sample).write(tmp_path / "again.json")
    documented = json.loads(sample.read_text())
    again = json.loads((tmp_path / "again.json").read_text())
    assert again == documented
    # the order of keys too, as far as a reader may care
    assert json.dumps(again) == json.dumps(documented)
    assert [path.name for path in tmp_path.iterdir()] == ["again.json"]


def test_a_documented_table() -> None:
    one = read_rank_table(ONE)
    assert (one.ranks, one.servers[0].device_ids) == (8, list(range(8)))
    assert one.servers[0].devices[4] == Device(4, "192.1.27.7")
    assert one.clash() == ""
    two = read_rank_table(TWO)
    assert (two.ranks, len(two.servers)) == (16, 2)
    # The document hides the machines' addresses and repeats device ips: read, but not for a job.
    assert two.clash() == "the server xx.xx.xx.xx is in it twice"


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(raw: Any) -> None:
        for step in path[:-1]:
            raw = raw[step]
        raw[path[-1]] = to

    return change


def _device(i: int, key: str, value: Any) -> Callable[[Any], None]:
    return _set("server_list", 0, "device", i, key, to=value)


@each(
    ("change", "expected"),
    [
        (_set("version", to="2.0"), 'version: got "2.0", expected "1.0" or "1.2"'),
        (_set("version", to="1.2"), "super_pod_list: got null, expected a list"),
        (_set("status", to="initializing"), "status: initializing, so its operator is still"),
        (_set("status", to="done"), 'status: got "done", expected "completed"'),
        (_set("server_count", to=1), 'server_count: got 1, expected "1"'),
        (_set("server_count", to="2"), 'server_count: got "2", expected "1"'),
        (_set("server_list", to=[]), "server_list: got [], expected a list"),
        (_set("server_list", to={}), "server_list: got {}, expected a list"),
        (_set("server_list", 0, to=None), "server_list[0]: got null, expected an object"),
        (_set("server_list", 0, "device", to=[]), "server_list[0].device: got [], expected a list"),
        (_set("server_list", 0, "server_id", to=""), 'server_id: got "", expected a string'),
        (_set("server_list", 0, "server_id", to="a b"), 'server_id: got "a b", expected an'),
        (lambda raw: raw.pop("status"), "got the keys version, server_count, server_list, exp"),
        (lambda raw: raw["server_list"][0]["device"][3].pop("device_id"), "device[3]: got the"),
        (lambda raw: raw["server_list"][0].pop("server_id"), "got the keys device, host_nic_ip"),
        (_device(3, "rank_id", "4"), 'server_list[0].device[3].rank_id: got "4", expected "3"'),
        (_device(3, "rank_id", 3), 'rank_id: got 3, expected "3"'),
        (_device(7, "rank_id", "0"), 'device[7].rank_id: got "0", expected "7"'),
        (_device(1, "device_id", 1), "device_id: got 1, expected a string"),
        (_device(1, "device_id", "-1"), 'device_id: got "-1", expected a number'),
        (_device(1, "device_id", "01"), 'device_id: got "01", expected a number'),
        (_device(1, "device_id", "\u0661"), "expected a number"),  # a digit, but an Arabic one
        (_device(1, "device_id", "9" * 9999), "..., expected a number"),
        (_device(1, "device_id", "2"), "server_list[0]: the device_id 2 is given twice"),
        (_device(1, "device_ip", "192.1.27.6"), "the device_ip 192.1.27.6 is given twice"),
        (_device(1, "device_ip", "192.1.27"), 'device_ip: got "192.1.27", expected an ip'),
        (_device(1, "device_ip", 3), "device_ip: got 3, expected an ip"),
        (_device(1, "device_ip", "8.8.8.8,192.1.27.6"), "device_ip 192.1.27.6 is given twice"),
    ],
)
def test_a_table_that_is_not_right_is_refused(
    tmp_path: Path, change: Callable[[Any], None], expected: str
) -> None:
    raw = json.loads(ONE.read_text())
    change(raw)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ArtifactError) as caught:
        read_rank_table(path)
    assert expected in caught.value.message
    assert str(path) in caught.value.message and len(caught.value.message) < 500
    assert "hccl_tools.py" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe\xfd", "codec can't decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "the file: got [], expected an object"),
        (b'{"version": "1.0", "version": "1.0"}', "the key 'version' occurs twice"),
        (b" " * (MAX_FILE_BYTES + 1), "more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        read_rank_table(path)
    assert expected in caught.value.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, Path("a\0b")):
        with pytest.raises(ArtifactError):
            read_rank_table(path)


def test_the_largest_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    large = RankTable(
        tuple(TableServer(f"n{i}", (Device(0, f"10.{i // 256}.{i % 256}.1"),)) for i in range(2500))
    )
    large.write(path)
    assert MAX_FILE_BYTES // 2 < path.stat().st_size < MAX_FILE_BYTES
    assert read_rank_table(path) == large


@given(st.data())
def test_mutated_tables_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = json.loads(ONE.read_text())
    spot: Any = raw
    value = st.sampled_from([None, 0, "", "0", "1", [], {}, [{}], True, 1e999, "\ud800", "x" * 99])
    while True:
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(spot[key], (dict, list)) or data.draw(st.booleans()):
            break
        spot = spot[key]
    spot[key] = data.draw(value)
    path = tmp_path_factory.getbasetemp() / "changed.json"
    path.write_text(json.dumps(raw))
    try:
        again = read_rank_table(path).to_dict()
    except ArtifactError:
        return
    assert again == raw


def test_a_table_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    for path, named in (("file/table.json", "file"), ("taken", "taken")):
        with pytest.raises(EnvironmentFault) as caught:
            table(("a", 1)).write(tmp_path / path)
        assert str(tmp_path / named) in caught.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    table(("a", 1)).write(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        table(("b", 2)).write(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[0,8)", range(8)), ("[0,8]", range(8)), ("[4,8)", range(4, 8)), ("[ 0, 1 )", range(1))],
)
def test_ranges(text: str, expected: range) -> None:
    assert device_range(text) == expected


@each("text", ["", "8", "0,8", "(0,8)", "[0,0)", "[5,4)", "[0,8", "[-1,2)"])
def test_no_ranges(text: str) -> None:
    with pytest.raises(ConfigError, match="expected one like"):
        device_range(text)


@pytest.mark.parametrize("ids", [[0], [0, 1, 2, 3], [4, 7], [3, 1], [5, 9], range(8), range(16)])
def test_devices_of_one_board_or_all(ids: list[int]) -> None:
    assert board_error(ids) == ""


@pytest.mark.parametrize("ids", [[3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], range(12)])
def test_devices_of_two_boards(ids: list[int]) -> None:
    assert "straddle two boards" in board_error(ids)


def test_ranks_of_merged_tables_count_on_in_the_order_given() -> None:
    a, b = table(("10.0.0.1", 2)), RankTable((TableServer("10.0.0.2", (Device(5, "9.9.9.9"),)),))
    ranks = [
        [(device["device_ip"], device["rank_id"]) for device in server["device"]]
        for server in merge({"b": b, "a": a}).to_dict()["server_list"]
    ]
    assert ranks == [[("9.9.9.9", "0")], [("192.168.0.0", "1"), ("192.168.0.1", "2")]]


def test_tables_with_the_same_machine_or_address_are_not_merged() -> None:
    a, b = table(("10.0.0.1", 2)), table(("10.0.0.2", 2))
    with pytest.raises(ConfigError, match=r"a, b cannot .* 192\.168\.0\.0 is both of server 10"):
        merge({"a": a, "b": b})
    with pytest.raises(ConfigError, match=r"the server 10\.0\.0\.1 is in it twice"):
        merge({"a": a, "b": a})


NODES = table(("10.0.0.1", 8), ("10.0.0.2", 8), ("10.0.0.3", 8))
HIGH = RankTable((TableServer("10.0.0.1", tuple(Device(i, f"9.9.9.{i}") for i in range(4, 8))),))


@pytest.mark.parametrize(
    ("given", "first", "last", "rank_size", "expected"),
    [
        (NODES, 0, 8, 24, Node(24, 8, "10.0.0.1", 0, tuple(range(8)))),
        (NODES, 8, 16, 24, Node(24, 8, "10.0.0.1", 1, tuple(range(8)))),
        (NODES, 16, 24, 24, Node(24, 8, "10.0.0.1", 2, tuple(range(8)))),
        (HIGH, 0, 4, 4, Node(4, 4, "10.0.0.1", 0, (4, 5, 6, 7))),  # by rank
        (HIGH, 4, 8, None, Node(4, 4, "10.0.0.1", 0, (4, 5, 6, 7))),  # by device
    ],
)
def test_the_machine_that_a_range_names(
    given: RankTable, first: int, last: int, rank_size: int | None, expected: Node
) -> None:
    assert given.node(first, last, rank_size) == expected


@pytest.mark.parametrize(
    ("given", "first", "last", "rank_size", "expected"),
    [
        (NODES, 0, 8, 16, "the rank size is 16, but the rank table has 24 ranks"),
        (NODES, 0, 8, None, "the rank size is 8, but the rank table has 24 ranks"),
        (NODES, 4, 12, 24, r"\[4,12\) is not a machine .* has \[0,8\), \[8,16\), \[16,24\)"),
        (NODES, 0, 4, 24, r"\[0,4\) is not a machine"),
        (table(("a", 8), ("b", 4)), 8, 12, 12, "have 8, 4 ranks, expected as many on each"),
        (
            table(("a", 4)),
            4,
            8,
            None,
            r"\[4,8\) is not a machine of the rank table, which has \[0,4",
        ),
    ],
)
def test_a_range_that_is_no_machine(
    given: RankTable, first: int, last: int, rank_size: int | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        given.node(first, last, rank_size)


def faults_of(path: Path | str, *, data: int = 1, tensor: int = 1, parallel: bool = True) -> str:
    """The errors of run_faults for a rank table in a config for so many ranks."""
    config, _ = resolve(parse(["model=tiny_llama", "predict_data=hi"], heads()))
    changed: RunConfig = dataclasses.replace(
        config,
        use_parallel=parallel,
        parallel=dataclasses.replace(config.parallel, rank_table_file=str(path)),
        parallel_config=dataclasses.replace(
            config.parallel_config, data_parallel=data, model_parallel=tensor
        ),
    )
    found = (fault.text for fault in run_errors(changed))
    return "\n".join(text for text in found if "rank_table_file" in text)


def test_a_config_may_name_a_table_of_its_ranks(tmp_path: Path) -> None:
    assert faults_of(ONE, tensor=8) == faults_of(ONE, data=2, tensor=4) == faults_of("") == ""
    expected = "has 8 ranks, expected 4: data_parallel=2 times model_parallel=2"
    assert expected in faults_of(ONE, data=2, tensor=2)
    assert "the server xx.xx.xx.xx is in it twice" in faults_of(TWO, tensor=16)
    assert "only with use_parallel=true" in faults_of(ONE, parallel=False)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for path in (broken, tmp_path / "none.json"):
        with pytest.raises(ArtifactError):
            faults_of(path, tensor=8)
