"""scripts/bundle.sh refuses incomplete work."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.paths import ROOT


def refused(*words: str) -> str:
    command = ["bash", str(ROOT / "scripts/bundle.sh"), *words]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_a_folder_and_a_model_are_needed(tmp_path: Path) -> None:
    assert "usage: scripts/bundle.sh FOLDER model=NAME" in refused(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_existing_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    assert "is there already" in refused(str(tmp_path), "model=smollm2_135m")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
