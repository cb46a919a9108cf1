"""docs/architecture.md: its stations are the functions that a native predict calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

STATION = re.compile(r"^\| [^|]+ \| `(\w+)` in \[[^]]+\]\(\.\./([^)]+)\)", re.MULTILINE)
TRACER = """
import json, sys
from lite_runner.app import main
stations = [tuple(one) for one in json.loads(sys.argv[1])]
called = {}
def trace(frame, event, argument):
    for station in stations:
        if event == "call" and frame.f_code.co_name == station[0]:
            if frame.f_code.co_filename.endswith("/" + station[1]):
                called.setdefault(station)
sys.setprofile(trace)
status = main(sys.argv[2:])
sys.setprofile(None)
print(json.dumps([status, list(called)]), file=sys.stderr)
"""


def test_stations_are_called_in_order(tmp_path: Path) -> None:
    stations = [list(one) for one in STATION.findall((ROOT / "docs/architecture.md").read_text())]
    assert len(stations) == 10
    run = subprocess.run(
        [
            *(sys.executable, "-c", TRACER, json.dumps(stations), "run_mode=predict"),
            *("model=tiny_llama", "backend=native", "verbosity=0", "predict_data=hello"),
            "max_new_tokens=3",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stderr.splitlines()[-1]) == [0, stations]
