"""A backend of one's own is a folder, a row and an option of the group."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

ROW = '    "mindformers": "mindformers",\n'


def test_a_backend_is_a_folder_and_a_row(tmp_path: Path) -> None:
    for name in ("lite_runner", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "run_lite.py", tmp_path)
    folder = tmp_path / "lite_runner/backends/toy"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("toy_backend.py"), folder / "__init__.py")
    rows = tmp_path / "lite_runner/config/schema.py"
    assert ROW in rows.read_text()
    rows.write_text(rows.read_text().replace(ROW, f'{ROW}    "toy": "toy",\n'))
    (tmp_path / "conf/backend/toy.yaml").write_text("# @package _global_\n# A toy.\nbackend: toy\n")

    command = [sys.executable, "run_lite.py", "model=tiny_llama", "backend=toy"]
    command += ["predict_data=abc", "max_new_tokens=4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "defg\n"), done.stderr
    result = json.loads((tmp_path / "outputs/latest/result.json").read_text())
    assert (result["backend"], result["engine"]) == ("toy", "counting")
