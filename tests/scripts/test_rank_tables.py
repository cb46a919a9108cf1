"""hccl_tools.py, merge_hccl.py and the launch scripts over a rank table, run as a user would."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lite_runner.distributed.rank_table import Device, RankTable, TableServer, read_rank_table
from tests.paths import ROOT

SAMPLES = ROOT / "tests/fixtures/rank_tables"
PYTHON = Path(sys.executable).parent


@pytest.fixture
def documented() -> dict[int, str]:
    """Device ips by device of the documented table of one machine."""
    return {
        device.device_id: device.device_ip
        for device in read_rank_table(SAMPLES / "one_machine.json").servers[0].devices
    }


def fake_hccn_tool(folder: Path, answers: dict[int, str]) -> None:
    """A hccn_tool in `folder` that knows the addresses of some devices."""
    cases = "\n".join(
        f'  "-i {device} -ip -g") echo "ipaddr:{ip}"; echo "netmask:255.255.0.0" ;;'
        for device, ip in answers.items()
    )
    tool = folder / "hccn_tool"
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\n  *) echo "no device"; exit 1 ;;\nesac\n')
    tool.chmod(0o755)


def run(
    *command: str | Path, cwd: Path, path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    search = [str(path)] if path else []
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **env, "PATH": os.pathsep.join([*search, str(PYTHON), "/usr/bin:/bin"])},
        capture_output=True,
        encoding="utf-8",
    )


def hccl_tools(
    cwd: Path, *flags: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, ROOT / "scripts/hccl_tools.py", *flags, cwd=cwd, path=path)


def merge_hccl(cwd: Path, *files: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, ROOT / "scripts/merge_hccl.py", *files, cwd=cwd)


@pytest.fixture
def script() -> ModuleType:
    """scripts/hccl_tools.py as a module, to give it another hccn.conf."""
    spec = importlib.util.spec_from_file_location("hccl_tools", ROOT / "scripts/hccl_tools.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documented_table_of_one_machine(tmp_path: Path, documented: dict[int, str]) -> None:
    fake_hccn_tool(tmp_path / "bin", documented)
    flags = ["--device_num", "[0,8)", "--server_ip", "10.0.0.1"]
    done = hccl_tools(tmp_path, *flags, path=tmp_path / "bin")
    assert (done.returncode, done.stderr) == (0, "")
    written = tmp_path / "hccl_8p_01234567_10.0.0.1.json"
    assert done.stdout == f"{written}\n"
    expected = (SAMPLES / "one_machine.json").read_text().replace("xx.xx.xx.xx", "10.0.0.1")
    assert json.loads(written.read_text()) == json.loads(expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", written.name]


def test_the_documented_table_of_two_machines(tmp_path: Path) -> None:
    # In the document both machines are xx.xx.xx.xx and share addresses, which no cluster can.
    raw = json.loads((SAMPLES / "two_machines.json").read_text())
    for i, server in enumerate(raw["server_list"]):
        server["server_id"] = f"10.0.0.{i + 1}"
        for device in server["device"]:
            device["device_ip"] = device["device_ip"].replace("192.168", f"192.{168 + i}")
        fake_hccn_tool(
            tmp_path / f"bin{i}",
            {int(device["device_id"]): device["device_ip"] for device in server["device"]},
        )
    files = [
        hccl_tools(
            tmp_path, "--server_ip", f"10.0.0.{i + 1}", path=tmp_path / f"bin{i}"
        ).stdout.strip()
        for i in range(2)
    ]
    done = merge_hccl(tmp_path, *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'hccl_2s_16p.json'}\n"
    assert json.loads((tmp_path / "hccl_2s_16p.json").read_text()) == raw
    # and the other way around, rank 0 is of the other machine
    assert merge_hccl(tmp_path, *reversed(files)).returncode == 0
    first = json.loads((tmp_path / "hccl_2s_16p.json").read_text())["server_list"][0]
    assert first["server_id"] == "10.0.0.2" and first["device"][0]["rank_id"] == "0"


def test_visible_devices_are_the_ids_in_the_hardware(
    tmp_path: Path, documented: dict[int, str]
) -> None:
    fake_hccn_tool(tmp_path, {i: ip for i, ip in documented.items() if i >= 4})
    flags = ["--device_num", "[1,3)", "--visible_devices", "4,5,6,7", "--server_ip", "10.0.0.1"]
    done = hccl_tools(tmp_path, *flags, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "hccl_2p_12_10.0.0.1.json"
    (server,) = read_rank_table(Path(done.stdout.strip())).servers
    assert server.devices == (Device(5, documented[5]), Device(6, documented[6]))


def test_a_machine_of_sixteen_devices(tmp_path: Path) -> None:
    ips = {device: f"192.1.27.{device}" for device in range(16)}
    fake_hccn_tool(tmp_path, ips)
    common = ["--device_num_per_node", "16", "--server_ip", "10.0.0.1"]
    for numbers, chosen in (("[0,16)", range(16)), ("[8,16]", range(8, 16))):
        done = hccl_tools(tmp_path, "--device_num", numbers, *common, path=tmp_path)
        assert done.returncode == 0, done.stderr
        (server,) = read_rank_table(Path(done.stdout.strip())).servers
        assert server.devices == tuple(Device(device, ips[device]) for device in chosen)


def test_addresses_of_hccn_conf_where_hccn_tool_has_none(
    tmp_path: Path,
    documented: dict[int, str],
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conf = tmp_path / "hccn.conf"
    lines = [
        f"address_{device}={ip}\nnetmask_{device}=255.0.0.0" for device, ip in documented.items()
    ]
    conf.write_text("# cards\n" + "\n".join(lines) + "\n")
    flags = ["--device_num", "[0,4)", "--server_ip", "10.0.0.1"]
    for known in ({}, {0: "1.1.1.1"}):  # a tool that knows only some is not believed either
        fake_hccn_tool(tmp_path / "bin", known)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
        assert script.main(flags, conf) == 0
        path = Path(capsys.readouterr().out.strip())
        (server,) = read_rank_table(path).servers
        assert [device.device_ip for device in server.devices] == list(documented.values())[:4]

    conf.write_text(conf.read_text().replace("address_2=192.3.27.6\n", ""))
    assert script.main(flags, conf) == 3
    assert "no address of device 2: hccn_tool gives none, and" in capsys.readouterr().err
    conf.write_text("address_0=1.1.1.1\naddress_1=1.1.1.1\n")
    assert script.main([*flags, "--device_num", "[0,2)"], conf) == 3
    assert "another device has its address 1.1.1.1 too" in capsys.readouterr().err
    fake_hccn_tool(tmp_path / "bin", {})
    conf.write_text("address_0=nonsense\n")
    assert script.main([*flags, "--device_num", "[0,1)"], conf) == 3
    assert "device 0: got 'nonsense', expected an ip address" in capsys.readouterr().err


def test_a_machine_without_a_name_needs_an_address(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hccn_tool(tmp_path, {0: "1.1.1.1"})
    monkeypatch.setenv("PATH", str(tmp_path))
    flags = ["--device_num", "[0,1)"]
    monkeypatch.setattr(script.socket, "gethostbyname", lambda name: "10.0.0.7")
    assert script.main(flags) == 0
    assert (tmp_path / "hccl_1p_0_10.0.0.7.json").is_file()

    def unknown(name: str) -> str:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(script.socket, "gethostbyname", unknown)
    assert script.main(flags) == 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--device_num", "[3,6)"], "the devices 3,4,5 straddle two boards"),
        (["--device_num", "[0,7)"], "straddle two boards"),
        (["--device_num", "[0,9)"], "got [0,9), expected a range of the 8 devices of this machine"),
        (["--device_num", "[0,16)", "--device_num_per_node", "8"], "a range of the 8 devices"),
        (["--device_num_per_node", "0"], "--device_num_per_node: got 0, expected a number from 1"),
        (["--device_num", "[0,3)", "--visible_devices", "0,1"], "but there are 2 visible"),
        (["--device_num", "[0,2)", "--visible_devices", "3,4"], "the devices 3,4 straddle"),
        (["--device_num", "8"], "got the range '8', expected one like '[0,8)'"),
        (["--device_num", "[4,4)"], "got the range '[4,4)'"),
        (["--visible_devices", "0,x"], "--visible_devices: got '0,x'"),
        (["--visible_devices", "0,0"], "names a device twice"),
        (["--server_ip", "../x"], "--server_ip: got '../x', expected an ip address"),
        (["--server_ip", ""], "--server_ip: got '', expected an ip address"),
        (["--devices", "8"], "unrecognized arguments: --devices 8"),
    ],
)
def test_wrong_flags_write_nothing(tmp_path: Path, flags: list[str], expected: str) -> None:
    done = hccl_tools(tmp_path, *flags)
    assert done.returncode == 2 and expected in done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


def test_nowhere_to_write(tmp_path: Path, documented: dict[int, str]) -> None:
    fake_hccn_tool(tmp_path / "bin", documented)
    (tmp_path / "hccl_8p_01234567_10.0.0.1.json").mkdir()
    done = hccl_tools(tmp_path, "--server_ip", "10.0.0.1", path=tmp_path / "bin")
    assert done.returncode == 3 and done.stderr.startswith("error: ")
    assert len(list(tmp_path.iterdir())) == 2


def machine(path: Path, name: str, ips: list[str]) -> Path:
    RankTable((TableServer(name, tuple(Device(i, ip) for i, ip in enumerate(ips))),)).write(path)
    return path


def test_tables_that_do_not_merge(tmp_path: Path) -> None:
    a = machine(tmp_path / "a.json", "10.0.0.1", ["1.1.1.1"])
    b = machine(tmp_path / "b.json", "10.0.0.2", ["1.1.1.1"])
    c = machine(tmp_path / "c.json", "10.0.0.1", ["2.2.2.2"])
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for files, code, expected in (
        ([a, b], 2, "the device ip 1.1.1.1 is both of server 10.0.0.1 and of server 10.0.0.2"),
        ([a, c], 2, "the server 10.0.0.1 is in it twice"),
        ([a, a], 2, "a.json is given twice"),
        ([a, broken], 4, "broken.json: Expecting property name"),
        ([a, tmp_path / "none.json"], 4, "none.json: No such file"),
        ([], 2, "the following arguments are required: FILE"),
    ):
        done = merge_hccl(tmp_path, *files)
        assert done.returncode == code and expected in done.stderr, done.stderr
        assert done.stdout == "" and not list(tmp_path.glob("hccl_*"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The launch scripts with a stand-in for msrun_launcher.sh, which shows its arguments."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in ("run_distribute.sh", "run_dist_gen.sh", "own_python.sh", "table_node.py"):
        shutil.copy(ROOT / "scripts" / name, copy / "scripts" / name)
    (copy / "lite_runner").symlink_to(ROOT / "lite_runner")
    launcher = copy / "scripts/msrun_launcher.sh"
    launcher.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\nexit 7\n")
    launcher.chmod(0o755)
    machine(copy / "a table.json", "10.0.0.1", ["1.1.1.1", "1.1.1.2"])
    RankTable(
        (
            TableServer("10.0.0.1", tuple(Device(i, f"1.1.1.{i}") for i in range(8))),
            TableServer("10.0.0.2", tuple(Device(i, f"1.1.2.{i}") for i in range(8))),
        )
    ).write(copy / "cluster.json")
    return copy


def launched(done: subprocess.CompletedProcess[str]) -> tuple[list[str], list[str]]:
    """The words of the command that the stand-in was given, and its other arguments."""
    assert done.returncode == 7, done.stderr  # the launcher's own exit code comes through
    command, *rest = done.stdout.split("\0")[:-1]
    return shlex.split(command), rest


def test_run_distribute_on_one_machine(checkout: Path) -> None:
    program = [
        str(checkout / "run_mindformer.py"),
        "--config",
        str(checkout / "conf/bloom 7b.yaml"),
    ]
    parallel = ["--use_parallel", "True", f"parallel.rank_table_file={checkout / 'a table.json'}"]
    arguments = ["../a table.json", "../conf/bloom 7b.yaml", "[0,2]", "predict"]
    for size in ([], ["2"]):
        done = run("bash", "run_distribute.sh", *arguments, *size, cwd=checkout / "scripts")
        words, rest = launched(done)
        assert words == [*program, "--run_mode", "predict", *parallel] and rest == ["2"]


def test_a_prompt_without_a_rank_size(checkout: Path) -> None:
    """MindFormers 1.0.2 and 1.3.2: with five arguments the last is the prompt."""
    arguments = ["a table.json", "x.yaml", "[0,2)", "predict", "I love Beijing, because"]
    words, rest = launched(run("scripts/run_distribute.sh", *arguments, cwd=checkout))
    assert words[words.index("--predict_data") + 1] == arguments[-1] and rest == ["2"]


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_prompt_arrives_unchanged(checkout: Path, locale: str) -> None:
    prompt = 'it\'s 中国, "$(id)" `id` $HOME & \\ *\nand a line'
    arguments = ["a table.json", "x.yaml", "[0,2)", "predict", "2", prompt]
    done = run(
        "scripts/run_distribute.sh", *arguments, cwd=checkout, LC_ALL=locale, INPUT_DATA="other"
    )
    words, _ = launched(done)
    assert words[words.index("--predict_data") + 1] == prompt and "other" not in words

    order = "python run_lite.py model=tiny_llama seed='1'"
    done = run(
        *("scripts/run_dist_gen.sh", order, "a table.json", "[0,2]", "2"),
        cwd=checkout,
        LC_ALL=locale,
        INPUT_DATA=prompt,
    )
    words, rest = launched(done)
    assert words[:4] == ["python", "run_lite.py", "model=tiny_llama", "seed=1"]
    assert words[-2:] == ["--predict_data", prompt] and rest == ["2"]


def test_a_machine_of_several(checkout: Path) -> None:
    for first, rank in ((0, "0"), (8, "1")):
        where = ["cluster.json", "x.yaml", f"[{first},{first + 8}]", "predict", "16"]
        _, rest = launched(run("scripts/run_distribute.sh", *where, cwd=checkout))
        assert rest == ["16", "8", "10.0.0.1", "8118", rank, "output/msrun_log", "True", "7200"]


@pytest.mark.parametrize(
    ("script", "arguments", "code", "expected"),
    [
        ("run_distribute.sh", [], 2, "usage: run_distribute.sh RANK_TABLE_FILE CONFIG_PATH"),
        ("run_distribute.sh", ["a", "b", "c"], 2, "usage: "),
        ("run_distribute.sh", ["a", "b", "c", "d", "1", "x", "y"], 2, "usage: "),
        ("run_dist_gen.sh", ["a", "b", "[0,2]"], 2, "usage: run_dist_gen.sh EXECUTE_ORDER"),
        ("run_dist_gen.sh", ["a", "a table.json", "[0,2]", "2", "x"], 2, "usage: "),
        ("run_dist_gen.sh", ["a", "a table.json", "[0,2]", "x"], 2, "RANK_SIZE: got 'x'"),
        ("run_dist_gen.sh", ["a", "a table.json", "[0,2]", "4"], 2, "the rank size is 4, but"),
        ("run_dist_gen.sh", ["a", "a table.json", "0-2", "2"], 2, "got the range '0-2'"),
        ("run_dist_gen.sh", ["a", "cluster.json", "[4,12]", "16"], 2, "[4,12) is not a machine"),
        ("run_dist_gen.sh", ["a", "none.json", "[0,2]", "2"], 4, "none.json: No such file"),
        ("run_distribute.sh", ["a table.json", "x", "[0,4]", "predict"], 2, "has 2 ranks"),
    ],
)
def test_launch_scripts_refuse_what_does_not_fit(
    checkout: Path, script: str, arguments: list[str], code: int, expected: str
) -> None:
    done = run(f"scripts/{script}", *arguments, cwd=checkout)
    assert done.returncode == code and expected in done.stderr, done.stderr
    assert done.stdout == ""


def test_a_script_of_ones_own_is_given_the_prompt_its_way(checkout: Path) -> None:
    command = "python generate_custom.py --use_parallel True"
    arguments = [command, "a table.json", "[0,2]", "2"]
    done = run("scripts/run_dist_gen.sh", *arguments, cwd=checkout, INPUT_DATA="one, two")
    assert done.stdout.split("\0")[0] == f"{command} --input_data 'one, two'"
    done = run("scripts/run_dist_gen.sh", *arguments, cwd=checkout)
    assert done.stdout.split("\0")[0].rstrip() == command
