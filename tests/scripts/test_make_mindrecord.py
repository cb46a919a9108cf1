"""scripts/make_mindrecord.py: its files are learned as the examples are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.training.data import read_data
from scripts import make_mindrecord

RECORDS = [
    {"instruction": "Count.", "input": "", "output": "1 2 3"},
    {"instruction": "Say it", "input": "twice", "output": "it it"},
    {"instruction": "Left", "input": "", "output": "out"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(RECORDS), encoding="utf-8")
    return path


def test_examples_are_the_same(source: Path, tmp_path: Path) -> None:
    flags = ["--output_path", str(tmp_path / "out"), "--N=2", "--model=tiny_llama"]
    flags += ["--seq_length=300", "load_checkpoint=random"]
    assert make_mindrecord.main(["--input_dataset_file", str(source), *flags]) == 0
    tokenizer = byte_tokenizer()
    found = read_data(tmp_path / "out/alpaca.mindrecord", tokenizer, "alpaca", 300)
    expected = read_data(source, tokenizer, "alpaca", 300)
    assert (found.records, expected.records) == (2, 3)
    for one, other in zip(found.texts, expected.texts[:2], strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.rows(), other.rows())


def test_a_number_that_is_none(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--output_path", "out", "--N=0", "--model=tiny_llama"]
    assert make_mindrecord.main(["--input_dataset_file", str(source), *flags]) == 2
    assert "--N: got 0, expected a number of examples, or -1" in capsys.readouterr().err


def test_an_error_names_the_flag(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--output_path", "out", "--seq_length=2", "--model=tiny_llama"]
    flags.append("load_checkpoint=random")
    assert make_mindrecord.main(["--input_dataset_file", str(source), *flags]) == 2
    stderr = capsys.readouterr().err
    assert "--input_dataset_file: " in stderr and "finetune.data" not in stderr
    assert "of 3 examples 3 have no target within 2 tokens" in stderr and "--seq_length" in stderr
