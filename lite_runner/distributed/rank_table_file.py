"""Reading and validating rank tables.

Version 1.0 is that of MindFormers' hccl_tools.py, of CANN's documents and of MindCluster's
ascend-operator; 1.2 adds the super pods of A3. What is required is what HCCL requires; other keys
(ports, addresses of hosts, ...) are kept as they are.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lite_runner.distributed.rank_table import Device, RankTable, Server, is_ip
from lite_runner.errors import ArtifactError
from lite_runner.system.json_file import parse_json
from lite_runner.system.small_file import read_small

VERSIONS = ("1.0", "1.2")
_SUPER_PODS = "1.2"
_WRITE_ONE = "scripts/hccl_tools.py writes one"


def read_rank_table(path: Path) -> RankTable:
    """The rank table in a file of at most 1 MiB.

    Raises ArtifactError where the file is missing, broken or not a rank table: the file is at
    fault, whoever named it. What does not fit a job or a command line is a ConfigError, elsewhere.
    """
    try:
        data = read_small(path, "a rank table")
    except OSError as error:
        raise ArtifactError(f"rank table {path}: {error.strerror or error}", _WRITE_ONE) from None
    except ValueError as error:  # a NUL in the path
        raise ArtifactError(f"rank table {path!r}: {error}", _WRITE_ONE) from None
    try:
        return _table(parse_json(data))
    except ValueError as error:  # of JSON, of UTF-8 and of ours
        raise ArtifactError(f"rank table {path}: {error}", _WRITE_ONE) from None


def _table(raw: Any) -> RankTable:
    if isinstance(raw, dict) and raw.get("status") == "initializing":
        raise ValueError("status: initializing, so its operator is still at work; wait for it")
    whole = _fields(raw, "the file", ("version", "server_count", "server_list", "status"))
    version = _expect(whole.pop("version"), "version", *VERSIONS)
    _expect(whole.pop("status"), "status", "completed")
    listed = _list(whole.pop("server_list"), "server_list")
    _expect(whole.pop("server_count"), "server_count", str(len(listed)))
    servers: list[Server] = []
    first = 0
    for i, entry in enumerate(listed):
        servers.append(_server(entry, f"server_list[{i}]", first))
        first += len(servers[-1].devices)
    table = RankTable(tuple(servers), version, whole)
    if version == _SUPER_PODS:
        _check_super_pods(table)
    elif len(servers) > 1:
        _check_addresses(table)
    return table


def _check_super_pods(table: RankTable) -> None:
    """HCCL wants each device's number in its super pod, and each machine in one."""
    inside: list[Any] = []
    for i, raw in enumerate(_list(table.more.get("super_pod_list"), "super_pod_list")):
        where = f"super_pod_list[{i}]"
        pod = _fields(raw, where, ("super_pod_id", "server_list"))
        for k, entry in enumerate(_list(pod["server_list"], f"{where}.server_list")):
            place = f"{where}.server_list[{k}]"
            inside.append(_text(_fields(entry, place, ("server_id",))["server_id"], place))
    if Counter(inside) != Counter(server.server_id for server in table.servers):
        raise ValueError(
            f"super_pod_list: got the machines {_listed(inside)}, expected each of"
            f" {_listed([server.server_id for server in table.servers])} once"
        )
    for i, server in enumerate(table.servers):
        for k, device in enumerate(server.devices):
            where = f"server_list[{i}].device[{k}].super_device_id"
            _text(device.more.get("super_device_id"), where)


def _check_addresses(table: RankTable) -> None:
    """Only the devices of one machine reach each other without addresses."""
    for i, server in enumerate(table.servers):
        for k, device in enumerate(server.devices):
            if not device.device_ip and not server.more.get("host_ip"):
                raise ValueError(
                    f"server_list[{i}].device[{k}]: device_ip is missing, which several machines"
                    " need"
                )


def _server(raw: Any, where: str, first: int) -> Server:
    entry = _fields(raw, where, ("server_id", "device"))
    listed = _list(entry.pop("device"), f"{where}.device")
    server_id = _text(entry.pop("server_id"), f"{where}.server_id")
    if not re.fullmatch(r"\S{1,64}", server_id):
        raise ValueError(
            f"{where}.server_id: got {_short(server_id)}, expected an address: no spaces, and at"
            " most 64 characters"
        )
    devices = [_device(raw, f"{where}.device[{i}]", first + i) for i, raw in enumerate(listed)]
    used: dict[str, list[str | int]] = {
        "device_id": [device.device_id for device in devices],
        "device_ip": [ip for device in devices for ip in device.ips],
    }
    for name, values in used.items():
        for value, count in Counter(values).most_common(1):
            if count > 1:
                raise ValueError(f"{where}: the {name} {value} is given twice")
    return Server(server_id, tuple(devices), entry)


def _device(raw: Any, where: str, rank: int) -> Device:
    entry = _fields(raw, where, ("device_id", "rank_id"))
    _expect(entry.pop("rank_id"), f"{where}.rank_id", str(rank))
    device_id = _text(entry.pop("device_id"), f"{where}.device_id")
    if not re.fullmatch(r"0|[1-9]\d{0,2}", device_id, re.ASCII):
        raise ValueError(f"{where}.device_id: got {_short(device_id)}, expected a number")
    device = Device(int(device_id), entry.pop("device_ip", None), entry)
    text = isinstance(device.device_ip, str | None)
    if not text or not all(map(is_ip, device.ips)):
        raise ValueError(
            f"{where}.device_ip: got {_short(device.device_ip)}, expected an ip address"
        )
    return device


def _fields(raw: Any, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    """A copy of an object that has at least these keys."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {_short(raw)}, expected an object with {_listed(names)}")
    if not set(names) <= set(raw):
        raise ValueError(f"{where}: got the keys {_listed(list(raw))}, expected {_listed(names)}")
    return dict(raw)


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{where}: got {_short(raw)}, expected a list that is not empty")
    return raw


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"{where}: got {_short(raw)}, expected a text that is not empty")
    return raw


def _expect(raw: Any, where: str, *expected: str) -> str:
    if raw not in expected:
        wanted = " or ".join(f'"{text}"' for text in expected)
        raise ValueError(f"{where}: got {_short(raw)}, expected {wanted}")
    return str(raw)


def _listed(names: Sequence[str]) -> str:
    return _short(", ".join(names)).strip('"') if names else "none"


def _short(raw: Any) -> str:
    """A value as JSON, cut where it is long: what is shown may be anybody's file."""
    text = json.dumps(raw)
    return text if len(text) <= 80 else f"{text[:80]}..."
