"""Rank tables: HCCL's JSON that maps ranks to Ascend devices of machines.

Written as MindFormers' hccl_tools.py writes them. Every value is a string. Ranks count through the
file from 0, so a rank is an index of the list here and is not stored.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import atomic_write

BOARD = 4  # devices 0..3 share a board, and so do the ones from 4 on
WHOLE = (8, 16)  # sizes of a machine; only all of its devices may span the boards


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
class Server:
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

    servers: tuple[Server, ...]
    version: str = "1.0"
    more: Mapping[str, Any] = field(default_factory=dict)  # super_pod_list, ...

    @property
    def ranks(self) -> int:
        """Ranks on all machines."""
        return sum(len(server.devices) for server in self.servers)

    def device_of(self, rank: int) -> int:
        """The physical device id of a rank."""
        return [device_id for server in self.servers for device_id in server.device_ids][rank]

    def clash(self) -> str:
        """What two machines of the table must not share, as a sentence; "" if nothing.

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
            f"the range [{first},{last}) is no machine of the rank table, which has"
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

    Raises ConfigError where they are incompatible.
    """
    for name, table in tables.items():
        if table.version != "1.0":
            raise ConfigError(
                f"{name}: a rank table of version {table.version} cannot be merged: which machines"
                " share a super pod stands in none of the files",
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
    """Whether `text` is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
