"""Rank tables: HCCL's JSON that maps ranks to Ascend devices of machines, and a run's use of one.

Written as MindFormers' hccl_tools.py writes them. Every value is a string. Ranks count through the
file from 0, so a rank is an index of the list here and is not stored.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.config import Invalid, invalid
from lite_runner.config.parallel import TABLE_VARIABLE
from lite_runner.config.sections import Cluster, Context, Parallel, Ranks, hccl_timeouts
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.records import dataclass
from lite_runner.system import environment
from lite_runner.system.environment import VISIBLE, index_of, visible_devices
from lite_runner.system.files import atomic_write, parse_json, read_small

BOARD = 4  # devices 0..3 share a board, and so do the ones from 4 on
WHOLE = (8, 16)  # sizes of a machine; only all of its devices may span the boards
VERSIONS = ("1.0", "1.2")
_SUPER_PODS = "1.2"
_WRITE_ONE = "scripts/hccl_tools.py writes one"


@dataclass(frozen=True)
class Device:
    """A device by its number in the machine, N of /dev/davinciN, and its network addresses."""

    device_id: int
    device_ip: str | None = None  # several are separated by commas; None: not given
    more: Mapping[str, Any] = field(default_factory=dict)  # the other keys of the file

    @property
    def ips(self) -> list[str]:
        return self.device_ip.split(",") if self.device_ip else []


@dataclass(frozen=True)
class TableServer:
    """A machine; its ranks are consecutive, in the order of `devices`."""

    server_id: str  # its address, as hccl_tools.py writes it
    devices: tuple[Device, ...]
    more: Mapping[str, Any] = field(default_factory=lambda: {"host_nic_ip": "reserve"})

    @property
    def address(self) -> str:
        """The address at which other machines reach it; a container has its own."""
        return str(self.more.get("container_ip") or self.more.get("host_ip") or self.server_id)

    @property
    def device_ids(self) -> list[int]:
        return [device.device_id for device in self.devices]


@dataclass(frozen=True)
class Node:
    """The job from the view of one machine, which starts its ranks."""

    worker_num: int  # ranks on all machines
    local_worker_num: int  # ranks on this machine
    master_addr: str
    node_rank: int
    device_ids: tuple[int, ...]  # of this machine, in the order of its ranks


@dataclass(frozen=True)
class RankTable:
    """Machines in the order of their ranks."""

    servers: tuple[TableServer, ...]
    version: str = "1.0"
    more: Mapping[str, Any] = field(default_factory=dict)  # super_pod_list, ...

    @property
    def ranks(self) -> int:
        return sum(len(server.devices) for server in self.servers)

    def device_of(self, rank: int) -> int:
        return [device_id for server in self.servers for device_id in server.device_ids][rank]

    def clash(self) -> str:
        """A validation error where two machines share an address; "" if none do.

        Not validated on reading: samples of the format list the same machine twice.
        """
        machines: set[str] = set()
        owners: dict[str, str] = {}
        for server in self.servers:
            if server.server_id in machines:
                return f"the server {server.server_id} is in it twice"
            machines.add(server.server_id)
            for ip in (ip for device in server.devices for ip in device.ips):
                owner = owners.setdefault(ip, server.server_id)
                if owner != server.server_id:
                    return (
                        f"the device ip {ip} is both of server {owner} and of"
                        f" server {server.server_id}"
                    )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in the file."""
        ranks = iter(range(self.ranks))
        return {
            "version": self.version,
            "server_count": str(len(self.servers)),
            "server_list": [
                {
                    "server_id": server.server_id,
                    "device": [
                        {
                            "device_id": str(device.device_id),
                            **({} if device.device_ip is None else {"device_ip": device.device_ip}),
                            "rank_id": str(next(ranks)),
                            **device.more,
                        }
                        for device in server.devices
                    ],
                    **server.more,
                }
                for server in self.servers
            ],
            "status": "completed",
            **self.more,
        }

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises EnvironmentFault."""
        with atomic_write(path) as file:
            file.write((json.dumps(self.to_dict(), indent=4) + "\n").encode())

    def node(self, first: int, last: int, rank_size: int | None) -> Node:
        """The machine that a range of run_distribute.sh names, `last` not included.

        The range counts ranks, all of one machine; where there is one machine, it may count
        device ids too. `rank_size` are the ranks of all machines; None: as many as the range has.
        Raises ConfigError where the table does not match.
        """
        size = last - first if rank_size is None else rank_size
        if size != self.ranks:
            raise ConfigError(
                f"the rank size is {size}, but the rank table has {self.ranks} ranks",
                "give the rank table of this job, and the ranks of all machines",
            )
        self.check_even()
        begin, blocks = 0, []
        for i, server in enumerate(self.servers):
            end = begin + len(server.devices)
            alone = len(self.servers) == 1 and server.device_ids == list(range(first, last))
            if (begin, end) == (first, last) or alone:
                master = self.servers[0].address
                return Node(self.ranks, end - begin, master, i, tuple(server.device_ids))
            blocks.append(f"[{begin},{end})")
            begin = end
        raise ConfigError(
            f"the range [{first},{last}) is not a machine of the rank table, which has"
            f" {', '.join(blocks)}",
            "give the ranks of this machine",
        )

    def check_even(self) -> None:
        """msrun numbers ranks by node_rank * local_worker_num. Raises ConfigError."""
        counts = [len(server.devices) for server in self.servers]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"the machines of the rank table have {', '.join(map(str, counts))} ranks,"
                " expected as many on each",
                "use as many devices of each machine: scripts/hccl_tools.py --device_num",
            )


def device_range(text: str) -> range:
    """The numbers of "[0,8)", the last not included; "[0,8]" means the same, as in MindFormers.

    Raises ConfigError.
    """
    match = re.fullmatch(r"\[\s*(\d{1,5})\s*,\s*(\d{1,5})\s*[\])]", text, re.ASCII)
    numbers = range(int(match[1]), int(match[2])) if match else range(0)
    if not numbers:
        raise ConfigError(f"got the range {text!r}, expected one like '[0,8)', which is 0 to 7")
    return numbers


def board_error(device_ids: Sequence[int]) -> str:
    """The validation error of using these devices of a machine together; "" if there is none."""
    if len({device_id < BOARD for device_id in device_ids}) < 2:
        return ""
    if any(set(device_ids) == set(range(whole)) for whole in WHOLE):
        return ""
    listed = ",".join(map(str, device_ids))
    return f"the devices {listed} straddle two boards, of which 0-3 are one and 4-7 the other"


def merge(tables: Mapping[str, RankTable]) -> RankTable:
    """One table of several, by name; ranks count on from one to the next.

    Raises ConfigError where they are incompatible.
    """
    for name, table in tables.items():
        if table.version != "1.0":
            raise ConfigError(
                f"{name}: a rank table of version {table.version} cannot be merged: no file says"
                " which machines share a super pod",
                "give HCCL one table of all machines, from ascend-operator or written by hand",
            )
    merged = RankTable(tuple(server for table in tables.values() for server in table.servers))
    if clash := merged.clash():
        raise ConfigError(
            f"{', '.join(tables)} cannot be merged: {clash}",
            "give one rank table for each machine, written with its own --server_ip",
        )
    return merged


def is_ip(text: str) -> bool:
    """True for an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def read_rank_table(path: Path) -> RankTable:
    """The rank table in a file of at most 1 MiB.

    Raises ArtifactError where the file is missing, broken or not a rank table. One that does not
    fit the job is a ConfigError elsewhere.
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
    servers: list[TableServer] = []
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


def _server(raw: Any, where: str, first: int) -> TableServer:
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
    return TableServer(server_id, tuple(devices), entry)


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
        raise ValueError(f"{where}: got {_short(raw)}, expected a string that is not empty")
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


def rank_table_errors(path: str, ranks: Ranks) -> Iterator[Invalid]:
    """Validation errors of the rank table of a job.

    Raises ArtifactError for a file that is missing or no rank table.
    """
    key = "parallel.rank_table_file"
    table = read_rank_table(Path(path))
    if clash := table.clash():
        yield invalid(key, f"{key}: {path} does not describe a cluster: {clash}")
    if table.ranks != ranks.size:
        yield invalid(
            (key, "parallel", "parallel_config.data_parallel", "parallel_config.model_parallel"),
            f"{key}: {path} has {table.ranks} ranks, expected {ranks.size}:"
            f" data_parallel={ranks.data} times model_parallel={ranks.tensor}",
        )


def with_rank_table(
    parallel: Parallel, context: Context, *, on_ranks: bool, starts: bool
) -> tuple[Parallel, Context]:
    """The sections with the rank table that `used_table` names, and with the device of a table of
    one rank.

    `on_ranks`: the run mode may be done by several ranks; `starts`: this run is. Raises
    ArtifactError for a broken table.
    """
    offered, on_ascend = os.environ.get(TABLE_VARIABLE), on_ranks and _on_ascend(context)
    table = used_table(parallel, context, starts=starts)
    if parallel.rank_table_file is None and offered and on_ranks and not table:
        why = "it is for Ascend" if not on_ascend else "this is one process"
        progress.note(f"{TABLE_VARIABLE}={offered} is not used: {why}")
    if table and on_ascend and not starts:
        device_id = index_of(read_rank_table(Path(table)).device_of(0))
        context = replace(context, device_id=device_id)
    return replace(parallel, rank_table_file=table), context


def used_table(parallel: Parallel, context: Context, *, starts: bool) -> str:
    """The path of the rank table of a run: the config's, else that of the environment (set by
    Kubernetes operators) on Ascend where several ranks do the work; "": none."""
    if parallel.rank_table_file is not None:
        return parallel.rank_table_file
    offered = os.environ.get(TABLE_VARIABLE, "")
    return offered if offered and starts and _on_ascend(context) else ""


def _on_ascend(context: Context) -> bool:
    return context.device_target != "CPU" and environment.ascend_devices() > 0


def rank_variables(
    cluster: Cluster,
    table: RankTable | None,
    hccl_timeout: int,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """HCCL's timeouts, unless the user has set them, and the visible devices.

    The visible devices are those of this machine in the rank table: msrun sets DEVICE_ID to the
    local rank, whatever the table says. Raises ConfigError if the table does not match `cluster`,
    and EnvironmentFault if a device is missing.
    """
    found = hccl_timeouts(hccl_timeout, environ)
    if table is None:
        return found
    table.check_even()
    local = len(table.servers[0].devices)
    if local != cluster.local_worker_num:
        raise ConfigError(
            f"parallel.rank_table_file: has {len(table.servers)} machines of {local} ranks, and"
            f" parallel.local_worker_num={cluster.local_worker_num} are to be started on this one",
            f"parallel.local_worker_num={local}, with parallel.node_rank, master_addr and"
            " master_port; scripts/run_distribute.sh sets them by itself",
        )
    ids = table.servers[cluster.node_rank].device_ids
    return {**found, VISIBLE: visible_devices(ids, environ)}
