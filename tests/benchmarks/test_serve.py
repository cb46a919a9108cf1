"""benchmarks/serve.py against a server of a tiny model, and one that does not start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.tiny_gguf import write_tiny_gguf


def test_a_table_of_servers(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    ours = f"{sys.executable} {ROOT}/run_lite.py run_mode=serve model={{gguf}} serve.port={{port}}"
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks/serve.py", "--gguf", "tiny.gguf"),
            *("--server", f"ours={ours} adapter_path={{adapters}}"),
            *("--server", f"broken={sys.executable} -c \"raise SystemExit('no such thing')\""),
            *("--rates", "4", "9", "--seconds", "2", "--prompt", "20", "--new", "5"),
            *("--adapters", "2", "--shared"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "without broken: no such thing" in done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["ours", "4"], ["ours", "9"]]
    for _, _, speed, failed, *times in rows:
        assert int(speed) > 0 and failed == "0" and len(times) == 6
