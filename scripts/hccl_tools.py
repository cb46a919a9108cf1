"""Write the rank table of this machine: MindFormers' hccl_tools.py, with its flags.

    python scripts/hccl_tools.py --device_num "[0,8)" --server_ip 10.0.0.1

The addresses of the devices come from hccn_tool, or else from /etc/hccn.conf. The file
hccl_8p_01234567_10.0.0.1.json appears in the current folder and its path is printed. Exit codes
are those of run_lite.py: 2 wrong flags, 3 no addresses found or no writable folder.
"""

from __future__ import annotations

import argparse
import itertools
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner.app import guarded
from lite_runner.distributed.rank_table import (
    Device,
    RankTable,
    TableServer,
    board_error,
    device_range,
    is_ip,
)
from lite_runner.errors import ConfigError, EnvironmentFault

HCCN_CONF = Path("/etc/hccn.conf")
MOST_DEVICES = 1000
TOOL_SECONDS = 30  # hccn_tool answers at once, unless the driver hangs


def parser() -> argparse.ArgumentParser:
    """The flags of MindFormers' hccl_tools.py, of release 1.3.2."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = flags.add_argument
    add("--device_num", default="[0,8)", help="devices to use; '[0,8)' is 0 to 7")
    add("--device_num_per_node", type=int, default=8, help="devices that the machine has")
    add(
        "--visible_devices",
        help="ids in the hardware of the devices that --device_num counts, as in a container;"
        " default: 0,1,2,... of --device_num_per_node",
    )
    add("--server_ip", help="address of this machine; default: that of its host name")
    return flags


def visible_ids(text: str | None, count: int) -> list[int]:
    """The numbers of "4,5,6,7"; None: 0 to `count` - 1. Raises ConfigError."""
    if not 0 < count <= MOST_DEVICES:
        raise ConfigError(
            f"--device_num_per_node: got {count}, expected a number from 1 to {MOST_DEVICES}"
        )
    if text is None:
        return list(range(count))
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,3}", word, re.ASCII) for word in words):
        raise ConfigError(f"--visible_devices: got {text!r}, expected numbers like 0,1,2,3")
    ids = [int(word) for word in words]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"--visible_devices: got {text!r}, which names a device twice")
    return ids


def chosen(devices: range, visible: Sequence[int], count: int) -> list[int]:
    """The ids of `devices` in the hardware of a machine of `count`. Raises ConfigError."""
    if devices.stop > count:
        raise ConfigError(
            f"--device_num: got [{devices.start},{devices.stop}), expected a range of the {count}"
            " devices of this machine",
            f"--device_num_per_node={devices.stop} where it has as many",
        )
    if devices.stop > len(visible):
        raise ConfigError(
            f"--device_num: got [{devices.start},{devices.stop}), but there are"
            f" {len(visible)} visible devices",
            f"give at most '[0,{len(visible)})', or more --visible_devices",
        )
    ids = [visible[i] for i in devices]
    fault = board_error(ids)
    if fault:
        raise ConfigError(
            f"--device_num: {fault}", "give devices of one board, or all 8: '[0,4)', '[4,8)'"
        )
    return ids


def own_ip() -> str:
    """The address of this machine's name. Raises EnvironmentFault."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise EnvironmentFault(
            f"the name of this machine has no address: {error.strerror or error}",
            "--server_ip ADDRESS",
        ) from error


def ip_by_tool(device_id: int) -> str:
    """A device's address by hccn_tool; "" if the tool is missing or has no answer."""
    try:
        done = subprocess.run(
            ["hccn_tool", "-i", str(device_id), "-ip", "-g"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TOOL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"^ipaddr:\s*(\S+)\s*$", done.stdout, re.MULTILINE)
    return found[1] if found and done.returncode == 0 else ""


def ips_in_file(path: Path) -> dict[int, str]:
    """Addresses by device, from lines such as `address_0=192.168.100.101`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = re.findall(r"^\s*address_(\d{1,3})\s*=\s*(\S+)\s*$", text, re.MULTILINE | re.ASCII)
    return {int(device_id): ip for device_id, ip in found}


def device_ips(ids: Sequence[int], conf: Path) -> list[str]:
    """The addresses of devices, all from hccn_tool or all from `conf`. Raises EnvironmentFault."""
    ips = list(itertools.takewhile(bool, map(ip_by_tool, ids)))
    if len(ips) < len(ids):
        known = ips_in_file(conf)
        missing = [str(device_id) for device_id in ids if device_id not in known]
        if missing:
            raise EnvironmentFault(
                f"no address of device {', '.join(missing)}: hccn_tool gives none, and {conf}"
                f" has no address_{missing[0]}=...",
                "put the tools of the Ascend driver on PATH, or use fewer devices: --device_num",
            )
        ips = [known[device_id] for device_id in ids]
    for device_id, ip in zip(ids, ips, strict=True):
        if not is_ip(ip):
            raise EnvironmentFault(f"device {device_id}: got {ip!r}, expected an ip address")
        if ips.count(ip) > 1:
            raise EnvironmentFault(
                f"device {device_id}: another device has its address {ip} too",
                "give each device an address of its own: hccn_tool -i ID -ip -s",
            )
    return ips


def write(arguments: argparse.Namespace, conf: Path) -> Path:
    """Write what the flags ask for and give the path. Raises RunnerError."""
    devices = device_range(arguments.device_num)
    count = arguments.device_num_per_node
    ids = chosen(devices, visible_ids(arguments.visible_devices, count), count)
    if arguments.server_ip is not None and not is_ip(arguments.server_ip):
        raise ConfigError(f"--server_ip: got {arguments.server_ip!r}, expected an ip address")
    server_ip = arguments.server_ip or own_ip()
    ips = device_ips(ids, conf)
    server = TableServer(server_ip, tuple(map(Device, ids, ips)))
    name = f"hccl_{len(ids)}p_{''.join(map(str, devices))}_{server_ip}.json"
    path = Path.cwd() / name
    RankTable((server,)).write(path)
    return path


def main(argv: Sequence[str] | None = None, conf: Path = HCCN_CONF) -> int:
    """Write the rank table; gives the exit code."""
    arguments = parser().parse_args(argv)

    def action() -> int:
        print(write(arguments, conf))
        return 0

    return guarded(action)


if __name__ == "__main__":
    sys.exit(main())
