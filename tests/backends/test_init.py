from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner.backends import LOGITS_BYTES, cache_length, chunk_length, rows_at_once, step_budget
from tests.paths import ROOT

LAST = '"mindformers": "mindformers"'


@pytest.mark.parametrize(
    ("wanted", "longest", "expected"),
    [(10, 8192, 256), (256, 8192, 256), (257, 8192, 512), (10, 128, 128), (1000, 1000, 1000)],
)
def test_cache_lengths_are_few(wanted: int, longest: int, expected: int) -> None:
    assert cache_length(wanted, longest) == expected


def test_chunks_shrink_as_scores_grow() -> None:
    assert [chunk_length(9, length) for length in (256, 8192, 32768)] == [512, 128, 32]


@pytest.mark.parametrize("chunk", [32, 4096])
def test_a_step_has_room_for_a_chunk_and_a_token_of_every_slot(chunk: int) -> None:
    assert step_budget(100, chunk) >= chunk + 100
    assert step_budget(100, chunk) == step_budget(0, chunk) + 100


@pytest.mark.parametrize(
    ("vocab", "longest", "expected"),
    [(49152, 512, 256), (250880, 512, 64), (320, 512, 512), (320, 32, 32), (10**9, 512, 1)],
)
def test_rows_at_once_stay_within_their_memory(vocab: int, longest: int, expected: int) -> None:
    assert rows_at_once(vocab, longest) == expected
    assert expected == 1 or 4 * vocab * expected <= LOGITS_BYTES


def test_a_backend_is_a_folder_and_a_row(tmp_path: Path) -> None:
    for name in ("lite_runner", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "run_lite.py", tmp_path)
    folder = tmp_path / "lite_runner/backends/toy"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("toy_backend.py"), folder / "__init__.py")
    rows = tmp_path / "lite_runner/config/schema.py"
    assert LAST in rows.read_text()
    rows.write_text(rows.read_text().replace(LAST, f'{LAST}, "toy": "toy"'))
    (tmp_path / "conf/backend/toy.yaml").write_text("# @package _global_\n# A toy.\nbackend: toy\n")

    command = [sys.executable, "run_lite.py", "model=tiny_llama", "backend=toy"]
    command += ["predict_data=abc", "max_new_tokens=4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "defg\n"), done.stderr
    result = json.loads((tmp_path / "outputs/latest/result.json").read_text())
    assert (result["backend"], result["engine"]) == ("toy", "counting")
