"""MindRecord files, which MindSpore writes and reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.training.data import read_data
from lite_runner.weights.formats.mindrecord_file import (
    is_mindrecord,
    read_mindrecord,
    write_mindrecord,
)


def test_names_of_several_files() -> None:
    names = ("a.mindrecord", "a.mindrecord0", "a.MINDRECORD12", "a.json", "mindrecord")
    assert [is_mindrecord(Path(name)) for name in names] == [True, True, True, False, False]


def test_labels_of_padded_texts(tmp_path: Path) -> None:
    """One eos at the end; with labels those tokens that have one."""
    tokenizer = byte_tokenizer()
    eos = tokenizer.eos_token_ids[0]
    ids = np.array([70, 71, 72, eos, eos, eos])
    labels = np.array([-100, -100, 72, eos, -100, -100])
    write_mindrecord(tmp_path / "a.mindrecord", [(ids, labels), (ids, ids)], "two")
    data = read_data(tmp_path / "a.mindrecord", tokenizer, "alpaca", 100)
    assert [one.ids.tolist() for one in data.texts] == [[70, 71, 72, eos]] * 2
    assert [one.rows().tolist() for one in data.texts] == [[1, 2], [0, 1, 2]]
    write_mindrecord(tmp_path / "b.mindrecord", [(ids, ids + 1)], "shifted")
    with pytest.raises(ConfigError, match="record 1: labels that are other tokens"):
        read_data(tmp_path / "b.mindrecord", tokenizer, "alpaca", 100)


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "a.mindrecord"
    path.write_bytes(bytes(100))
    with pytest.raises(ArtifactError, match=r"its index .* is missing"):
        next(read_mindrecord(path))
    path.with_name("a.mindrecord.db").write_bytes(bytes(100))
    with pytest.raises(ArtifactError, match="not a MindRecord file"):
        next(read_mindrecord(path))
