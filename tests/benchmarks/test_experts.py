"""The models of make bench-experts: known here, and of one active size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lite_runner.text import load_tokenizer
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from tests.paths import ROOT

SIZES = "--hidden 64 --layers 2 --heads 4 --experts 6 --chosen 2 --width 32"


def test_a_sparse_model_and_a_dense_one(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks/experts.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), *SIZES.split()],
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    sparse, dense = (model_config_of(tmp_path / f"{name}.gguf") for name in ("sparse", "dense"))
    assert sparse is not None and sparse.sparse is not None and dense is not None
    experts = sparse.sparse.experts
    assert experts is not None and (experts.count, experts.chosen) == (6, 2)
    assert dense.intermediate_size == experts.chosen * sparse.sparse.width
    for name, model in (("sparse", sparse), ("dense", dense)):
        path = tmp_path / f"{name}.gguf"
        for tensor in open_checkpoint(path, model).values():
            assert 0 < abs(tensor.float32()).max() <= 1
        assert load_tokenizer(path, model_vocab=model.vocab_size).decode([104, 105]) == "hi"
