"""Rank tables of other tools: each form with its source, and its reading.

The files are in tests/fixtures/rank_tables, with other addresses than the sources have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from lite_runner.distributed.rank_table import merge, read_rank_table
from lite_runner.errors import ArtifactError, ConfigError
from tests.paths import FIXTURES

TABLES = FIXTURES / "rank_tables"
MINDFORMERS = "MindFormers 1.3.2, mindformers/tools/hccl_tools.py"
HCCL = "CANN, hcomm: topoinfo_ranktableConcise.cc, GetSingleDeviceIp"
OPERATOR = "MindCluster, component/ascend-operator/pkg/ranktable/common"


@dataclass(frozen=True)
class Form:
    """A file and its contents."""

    file: str
    source: str
    device_ids: tuple[tuple[int, ...], ...]  # of each machine
    version: str = "1.0"


FORMS = (
    Form("one_machine", "MindFormers 1.0, documents", (tuple(range(8)),)),
    Form("two_machines", "MindFormers 1.0, documents", (tuple(range(8)),) * 2),
    Form("visible_devices", f"{MINDFORMERS} --visible_devices 4,5,6,7", ((4, 5, 6, 7),)),
    Form("cann_training", "CANN 8.5, hcclug_000068, first template", ((0, 1),) * 2),
    Form("cann_server_last", "CANN 8.0.RC3, tfmigr2_000032", ((0, 1),)),
    Form("cann_a2", "CANN 9.0, hcclug_000067: device_port", ((0, 1),) * 2),
    Form("cann_a3", "CANN 9.0, hcclug_000066: two super pods", ((0, 1, 2, 3),) * 4, "1.2"),
    Form("hccl_controller", "MindX DL 6.0.RC1, dl_resume_077", ((1, 2, 3),)),
    Form("ascend_operator", f"{OPERATOR}/server.go", ((4, 5, 6, 7), (0, 1, 2, 3))),
    Form("ascend_operator_hardware", "MindCluster 7.0.RC1, mxdlug_appendices_009", ((2, 3, 4, 5),)),
    Form("ascend_operator_a3", f"{OPERATOR}, v1dot2", (tuple(range(16)),), "1.2"),
    Form("two_pods_one_device", "vllm-ascend, a log of llmdatadist_c_mgr", ((3,),) * 2, "1.2"),
    Form("without_addresses", f"{HCCL}: not needed by one machine", ((0, 1),)),
    Form("two_addresses_each", f"{HCCL}: split at commas", ((0, 1),)),
)

# The start of the error for each that is another format.
REFUSED = {
    "refused_initializing": (f"{OPERATOR}/common.go, NewBaseGenerator", "status: initializing, so"),
    "refused_controller_start": ("MindX DL, hccl-controller", "status: initializing, so"),
    "refused_version_2": (
        "MindCluster, ascend-operator/pkg/ranktable/v2dot0 (Ascend 950)",
        "the file: got the keys status, version, rank_count, rank_list, expected version",
    ),
    "refused_global": (
        "MindCluster 7.3, dl_bestpractice_010",
        "the file: got the keys version, status, server_group_list, expected version",
    ),
    "refused_groups": (
        "CANN 8.5, hcclug_000068, second template",
        "the file: got the keys status, group_count, group_list, expected version",
    ),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.file)
def test_a_form_is_read(form: Form) -> None:
    table = read_rank_table(TABLES / f"{form.file}.json")
    assert tuple(tuple(server.device_ids) for server in table.servers) == form.device_ids
    assert table.version == form.version
    # With nothing lost, for a merged file.
    assert table.to_dict() == json.loads((TABLES / f"{form.file}.json").read_text())


def test_every_file_is_a_form() -> None:
    named = {*(form.file for form in FORMS), *REFUSED}
    assert named == {path.stem for path in TABLES.glob("*.json")}
    assert len(FORMS) >= 12


@pytest.mark.parametrize("name", REFUSED)
def test_another_format_is_refused(name: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        read_rank_table(TABLES / f"{name}.json")
    assert f"{name}.json: {REFUSED[name][1]}" in caught.value.message


def _changed(name: str, change: str, tmp_path: Path) -> str:
    """The error for a rank table in which a text is replaced."""
    before, _, after = change.partition(" -> ")
    text = (TABLES / f"{name}.json").read_text()
    assert before in text
    path = tmp_path / "table.json"
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ArtifactError) as caught:
        read_rank_table(path)
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        # HCCL: several machines need addresses, of the devices or of the hosts.
        ("cann_training", '"device_ip": "198.51.101.9", -> ', "device[1]: device_ip is missing"),
        ("cann_a3", '"super_device_id": "3", -> ', "device[3].super_device_id: got null"),
        (
            "cann_a3",
            '{"server_id": "node_3"} -> {"server_id": "node_4"}',
            "got the machines node_0",
        ),
        (
            "cann_a3",
            '{"server_id": "node_3"} -> {"server_id": "node_2"}',
            "expected each of node_0",
        ),
        ("cann_a3", '"super_pod_list" -> "pods"', "super_pod_list: got null"),
    ],
)
def test_tables_that_hccl_refuses(name: str, change: str, expected: str, tmp_path: Path) -> None:
    assert expected in _changed(name, change, tmp_path)


def test_host_addresses_stand_in_for_those_of_devices(tmp_path: Path) -> None:
    raw = json.loads((TABLES / "ascend_operator.json").read_text())
    for server in raw["server_list"]:
        for device in server["device"]:
            device["device_ip"] = ""
    (tmp_path / "table.json").write_text(json.dumps(raw))
    assert read_rank_table(tmp_path / "table.json").ranks == 8


def test_the_address_of_the_first_machine() -> None:
    addresses = {
        "one_machine": "xx.xx.xx.xx",
        "cann_training": "node_0",
        "cann_a3": "192.0.2.100",
        "ascend_operator": "203.0.113.10",
    }
    for name, address in addresses.items():
        table = read_rank_table(TABLES / f"{name}.json")
        last = len(table.servers[0].devices)
        assert table.node(0, last, table.ranks).master_addr == address


def test_merging_keeps_what_cann_writes() -> None:
    tables = {
        name: read_rank_table(TABLES / f"{name}.json")
        for name in ("cann_server_last", "ascend_operator_hardware")
    }
    merged = merge(tables).to_dict()
    assert merged["server_list"][1]["hardware_type"] == "800I-A2-32G"
    assert "host_nic_ip" not in merged["server_list"][0]
    ranks = [d["rank_id"] for server in merged["server_list"] for d in server["device"]]
    assert ranks == list("012345")


def test_tables_of_super_pods_are_not_merged() -> None:
    tables = {
        name: read_rank_table(TABLES / f"{name}.json")
        for name in ("cann_server_last", "ascend_operator_a3")
    }
    with pytest.raises(ConfigError, match=r"ascend_operator_a3: a rank table of version 1\.2"):
        merge(tables)
