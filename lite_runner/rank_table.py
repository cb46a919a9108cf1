"""Rank tables: the JSON that tells Ascend which device of which machine is which rank.

The format is that of MindFormers' hccl_tools.py, in which every value is a text. Ranks count
through the file from 0, so here a rank is a place in the list and nothing that is stored.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault

MAX_FILE_BYTES = 1 << 20
BOARD = 4  # devices 0..3 share a board, and so do the ones from 4 on
WHOLE = (8, 16)  # sizes of a machine; only all of its devices may span the boards
_WRITE_ONE = "write one with scripts/hccl_tools.py"


@dataclass(frozen=True)
class Device:
    """A device by its number in the machine, and the address of its network card."""

    device_id: int
    device_ip: str


@dataclass(frozen=True)
class Server:
    """A machine; its ranks are consecutive, in the order of `devices`."""

    server_id: str  # its address, as hccl_tools.py writes it
    devices: tuple[Device, ...]
    host_nic_ip: str = "reserve"

    @property
    def device_ids(self) -> list[int]:
        return [device.device_id for device in self.devices]


@dataclass(frozen=True)
class Node:
    """What one machine of a job is told about all of them."""

    worker_num: int  # ranks on all machines
    local_worker_num: int  # ranks on this machine
    master_addr: str
    node_rank: int


@dataclass(frozen=True)
class RankTable:
    """Machines in the order of their ranks."""

    servers: tuple[Server, ...]

    @property
    def ranks(self) -> int:
        """Ranks on all machines."""
        return sum(len(server.devices) for server in self.servers)

    def clash(self) -> str:
        """What two machines of the table share but may not, as a sentence; "" if nothing.

        Reading does not ask for this: samples of the format write the same machine twice.
        """
        machines: set[str] = set()
        owners: dict[str, str] = {}
        for server in self.servers:
            if server.server_id in machines:
                return f"the server {server.server_id} is in it twice"
            machines.add(server.server_id)
            for device in server.devices:
                owner = owners.setdefault(device.device_ip, server.server_id)
                if owner != server.server_id:
                    return (
                        f"the device ip {device.device_ip} is both of server {owner} and of"
                        f" server {server.server_id}"
                    )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in the file."""
        ranks = iter(range(self.ranks))
        return {
            "version": "1.0",
            "server_count": str(len(self.servers)),
            "server_list": [
                {
                    "server_id": server.server_id,
                    "device": [
                        {
                            "device_id": str(device.device_id),
                            "device_ip": device.device_ip,
                            "rank_id": str(next(ranks)),
                        }
                        for device in server.devices
                    ],
                    "host_nic_ip": server.host_nic_ip,
                }
                for server in self.servers
            ],
            "status": "completed",
        }

    def write(self, path: Path) -> None:
        """Write the file whole or not at all. Raises EnvironmentFault."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(json.dumps(self.to_dict(), indent=4) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise EnvironmentFault(
                f"{path}: cannot be written: {error.strerror or error}",
                "run it in a writable folder",
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def node(self, first: int, last: int, rank_size: int | None) -> Node:
        """The machine that a range of run_distribute.sh names, `last` not included.

        The range counts ranks, all of one machine; where there is one machine, it may count
        device ids too. `rank_size` are the ranks of all machines; None: as many as the range has.
        Raises ConfigError where the table says something else.
        """
        size = last - first if rank_size is None else rank_size
        if size != self.ranks:
            raise ConfigError(
                f"the rank size is {size}, but the rank table has {self.ranks} ranks",
                "give the rank table of this job, and the ranks of all machines",
            )
        counts = [len(server.devices) for server in self.servers]
        if len(set(counts)) > 1:  # msrun numbers ranks by node_rank * local_worker_num
            raise ConfigError(
                f"the machines of the rank table have {', '.join(map(str, counts))} ranks,"
                " expected as many on each",
                "use as many devices of each machine: scripts/hccl_tools.py --device_num",
            )
        begin, blocks = 0, []
        for i, server in enumerate(self.servers):
            end = begin + len(server.devices)
            alone = len(self.servers) == 1 and server.device_ids == list(range(first, last))
            if (begin, end) == (first, last) or alone:
                return Node(self.ranks, end - begin, self.servers[0].server_id, i)
            blocks.append(f"[{begin},{end})")
            begin = end
        raise ConfigError(
            f"the range [{first},{last}) is no machine of the rank table, which has"
            f" {', '.join(blocks)}",
            "give the ranks of this machine",
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


def board_fault(device_ids: Sequence[int]) -> str:
    """What is wrong with using these devices of a machine together; "" if nothing."""
    if len({device_id < BOARD for device_id in device_ids}) < 2:
        return ""
    if any(set(device_ids) == set(range(whole)) for whole in WHOLE):
        return ""
    listed = ",".join(map(str, device_ids))
    return f"the devices {listed} straddle two boards, of which 0-3 are one and 4-7 the other"


def merge(tables: Mapping[str, RankTable]) -> RankTable:
    """One table of several, by name; ranks count on from one to the next.

    Raises ConfigError where they do not go together.
    """
    merged = RankTable(tuple(server for table in tables.values() for server in table.servers))
    if clash := merged.clash():
        raise ConfigError(
            f"{', '.join(tables)} cannot be merged: {clash}",
            "give one rank table for each machine, written with its own --server_ip",
        )
    return merged


def read_rank_table(path: Path) -> RankTable:
    """The rank table in a file of at most 1 MiB.

    Raises ArtifactError where the file is missing, broken or not a rank table: the file is at
    fault, whoever named it. What does not fit a job or a command line is a ConfigError, elsewhere.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"rank table {path}: {error.strerror or error}", _WRITE_ONE) from None
    except ValueError as error:  # a NUL in the path
        raise ArtifactError(f"rank table {path!r}: {error}", _WRITE_ONE) from None
    if len(data) > MAX_FILE_BYTES:
        raise ArtifactError(
            f"rank table {path}: more than {MAX_FILE_BYTES} bytes; not a rank table", _WRITE_ONE
        )
    try:
        return _table(json.loads(data, object_pairs_hook=_object))
    except (ValueError, RecursionError) as error:  # ValueError: of json, of UTF-8 and of ours
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ArtifactError(f"rank table {path}: {reason}", _WRITE_ONE) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; python's json would silently keep the last of two equal keys."""
    read = dict(pairs)
    if len(read) != len(pairs):
        raise ValueError(f"a key is given twice among {_listed([key for key, _ in pairs])}")
    return read


def _table(raw: Any) -> RankTable:
    whole = _fields(raw, "the file", ("version", "server_count", "server_list", "status"))
    _expect(whole["version"], "version", "1.0")
    _expect(whole["status"], "status", "completed")
    listed = _list(whole["server_list"], "server_list")
    _expect(whole["server_count"], "server_count", str(len(listed)))
    servers: list[Server] = []
    first = 0
    for i, entry in enumerate(listed):
        servers.append(_server(entry, f"server_list[{i}]", first))
        first += len(servers[-1].devices)
    return RankTable(tuple(servers))


def _server(raw: Any, where: str, first: int) -> Server:
    entry = _fields(raw, where, ("server_id", "device", "host_nic_ip"))
    listed = _list(entry["device"], f"{where}.device")
    server_id = _text(entry["server_id"], f"{where}.server_id")
    if not re.fullmatch(r"\S{1,64}", server_id):
        raise ValueError(
            f"{where}.server_id: got {_short(server_id)}, expected an address: no spaces, and at"
            " most 64 characters"
        )
    server = Server(
        server_id,
        tuple(
            _device(device, f"{where}.device[{i}]", first + i) for i, device in enumerate(listed)
        ),
        _text(entry["host_nic_ip"], f"{where}.host_nic_ip"),
    )
    for name in ("device_id", "device_ip"):
        counts = Counter(getattr(device, name) for device in server.devices)
        value, count = counts.most_common(1)[0]
        if count > 1:
            raise ValueError(f"{where}: the {name} {value} is given twice")
    if fault := board_fault(server.device_ids):
        raise ValueError(f"{where}: {fault}")
    return server


def _device(raw: Any, where: str, rank: int) -> Device:
    entry = _fields(raw, where, ("device_id", "device_ip", "rank_id"))
    _expect(entry["rank_id"], f"{where}.rank_id", str(rank))
    device_id = _text(entry["device_id"], f"{where}.device_id")
    if not re.fullmatch(r"0|[1-9]\d{0,2}", device_id, re.ASCII):
        raise ValueError(f"{where}.device_id: got {_short(device_id)}, expected a number")
    device_ip = _text(entry["device_ip"], f"{where}.device_ip")
    if not is_ip(device_ip):
        raise ValueError(f"{where}.device_ip: got {_short(device_ip)}, expected an ip address")
    return Device(int(device_id), device_ip)


def is_ip(text: str) -> bool:
    """Whether `text` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _fields(raw: Any, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {_short(raw)}, expected an object with {_listed(names)}")
    if set(raw) != set(names):
        raise ValueError(f"{where}: got the keys {_listed(list(raw))}, expected {_listed(names)}")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{where}: got {_short(raw)}, expected a list that is not empty")
    return raw


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"{where}: got {_short(raw)}, expected a text that is not empty")
    return raw


def _expect(raw: Any, where: str, expected: str) -> None:
    if raw != expected:
        raise ValueError(f'{where}: got {_short(raw)}, expected "{expected}"')


def _listed(names: Sequence[str]) -> str:
    return _short(", ".join(names)).strip('"') if names else "none"


def _short(raw: Any) -> str:
    """A value as JSON, cut where it is long: what is shown may be anybody's file."""
    text = json.dumps(raw)
    return text if len(text) <= 80 else f"{text[:80]}..."
