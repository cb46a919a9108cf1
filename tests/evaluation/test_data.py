"""Data sets: finding splits and parts among published files, reading them, broken ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lite_runner.errors import ConfigError, RunnerError
from lite_runner.evaluation.data import DataSet, data_set, read_documents


def touched(folder: Path, *names: str) -> DataSet:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return DataSet.of(folder)


@pytest.mark.parametrize(
    ("files", "split", "subset", "expected"),
    [
        (["test.jsonl", "train.jsonl"], "test", "", ["test.jsonl"]),
        (["ARC-Easy-Test.jsonl", "ARC-Easy-Dev.jsonl"], "test", "", ["ARC-Easy-Test.jsonl"]),
        (["ARC-Easy-Test.jsonl", "ARC-Easy-Dev.jsonl"], "validation", "", ["ARC-Easy-Dev.jsonl"]),
        (
            ["hellaswag_val.jsonl", "hellaswag_train.jsonl"],
            "validation",
            "",
            ["hellaswag_val.jsonl"],
        ),
        (["data/test-00000-of-00001.parquet"], "test", "", ["data/test-00000-of-00001.parquet"]),
        (["test/law_test.csv", "dev/law_dev.csv"], "dev", "law", ["dev/law_dev.csv"]),
        (["law/val.parquet", "art/val.parquet"], "val", "law", ["law/val.parquet"]),
        (["test/law.csv", "test/tax_law.csv"], "test", "law", ["test/law.csv"]),
        (["train.jsonl"], "test", "", []),
    ],
)
def test_splits(
    tmp_path: Path, files: list[str], split: str, subset: str, expected: list[str]
) -> None:
    found = touched(tmp_path, *files).split(split, subset)
    assert [str(path.relative_to(tmp_path)) for path in found] == expected


def test_the_folder_of_a_data_set(tmp_path: Path) -> None:
    touched(tmp_path, "ARC-Easy/test.jsonl", "HumanEval.jsonl", "gsm8k-main/test.jsonl")
    assert data_set(tmp_path, ["arc_easy"], only=False).root == tmp_path / "ARC-Easy"
    assert data_set(tmp_path, ["humaneval"], only=False).root == tmp_path / "HumanEval.jsonl"
    assert data_set(tmp_path, ["gsm8k"], only=False).root == tmp_path / "gsm8k-main"
    assert data_set(tmp_path / "ARC-Easy", ["boolq"], only=True).root == tmp_path / "ARC-Easy"
    with pytest.raises(ConfigError, match="has no data of boolq: got ARC-Easy, HumanEval"):
        data_set(tmp_path, ["boolq"], only=False)


def test_parts(tmp_path: Path) -> None:
    found = touched(tmp_path, "law/test.jsonl", "test/art_test.csv")
    assert found.subsets(["anatomy", "art", "law"]) == ["art", "law"]


def test_reading(tmp_path: Path) -> None:
    documents = [{"a": "é"}, {"a": 2}]
    lines = "\n".join(map(json.dumps, documents)) + "\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text(json.dumps({"version": 1, "data": documents}))
    for name in ("a.jsonl", "b.jsonl.gz", "c.json"):
        assert read_documents([tmp_path / name]) == documents
    (tmp_path / "d.csv").write_text('x,y\r\n"1, or\n2",b\r\n')
    assert read_documents([tmp_path / "d.csv"], ["x", "y"]) == [{"x": "1, or\n2", "y": "b"}]
    (tmp_path / "e.csv").write_text("1,2\n")
    assert read_documents([tmp_path / "e.csv"], ["q", "r"]) == [{"q": "1", "r": "2"}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"a": 1}\n[1]\n', "line 2: got list, expected an object"),
        ("a.jsonl", b'{"a": \n', "line 1: "),
        ("a.jsonl", b"\xff\n", "can't decode byte 0xff"),
        ("a.json", b'{"a": 1}', "expected a list of objects"),
        ("a.csv", b"x,y\n1\n", "row 1: got 1 fields, expected 2"),
        ("a.jsonl.gz", b"no gzip", "Not a gzipped file"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunnerError) as raised:
        read_documents([tmp_path / name])
    assert expected in raised.value.message and str(tmp_path / name) in raised.value.message


def test_parquet_takes_a_package(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunnerError, match=r"pyarrow, which this Python cannot import|not parquet"):
        read_documents([tmp_path / "a.parquet"])
