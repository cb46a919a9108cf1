"""Exports of the tiny models, made once for all tests of all workers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import FileLock

from lite_runner.architectures.spec import Decoder
from lite_runner.mindir import write_resizable
from lite_runner.mindir.manifest import Graph, GraphName, Layout, Manifest, TensorSpec
from lite_runner.mindir.write_resizable import export_resizable
from lite_runner.mindir.write_static_pair import export_static_pair, stems_of
from lite_runner.system.files import sha256_of
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.read_ahead import ReadAhead
from tests.models import reference_model
from tests.paths import REFERENCE

BATCH, LENGTH = 2, 48

Export = tuple[Decoder, Path, dict[GraphName, Graph]]


def shallow_model(case: str) -> Decoder:
    """A reference model with one block of each kind, half as much to compile. Of llama both
    are there, so that layers can be counted."""
    model = reference_model(case)
    return model if case == "llama" else replace(model, blocks=tuple(dict.fromkeys(model.blocks)))


@pytest.fixture(scope="session")
def exports() -> Path:
    """In the cache of this session, which its workers inherit."""
    folder = Path(os.environ["LITE_RUNNER_CACHE"]) / "test_exports"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def exported(exports: Path) -> Callable[..., Export]:
    """`exported("llama", "static_pair", sampled=True)`: its model, folder and graphs, which are
    not to be changed; `exported("llama", "resizable", rewritten=False)`: as MindSpore wrote it."""

    def export(
        case: str, layout: str = "static_pair", *, rewritten: bool = True, **options: Any
    ) -> Export:
        given = (f"{name}={value}" for name, value in options.items())
        folder = exports / "-".join([case, layout, str(rewritten), *given])
        described, model = folder.with_suffix(".json"), shallow_model(case)
        with FileLock(folder.with_suffix(".lock")):
            if described.is_file():
                stored = json.loads(described.read_text(encoding="utf-8"))
                return model, folder, {name: graph_of(one) for name, one in stored.items()}
            folder.mkdir(exist_ok=True)
            weights = ReadAhead(open_checkpoint(REFERENCE / case, reference_model(case)))
            settings = {"dtype": "float32", "enc_key": None, "seq_length": LENGTH, **options}
            if layout == "static_pair":
                settings = {"batch_size": BATCH, "sampled": False, **settings}
                graphs = export_static_pair(model, weights, folder, stems_of("tiny"), **settings)
            else:
                rewrite = write_resizable.rewrite_for_lite if rewritten else lambda path: None
                with mock.patch.object(write_resizable, "rewrite_for_lite", rewrite):
                    graphs = export_resizable(
                        model, weights, folder, "tiny", batch_size=1, seq_length=LENGTH
                    )
            described.write_text(json.dumps(graphs, default=asdict))
        return model, folder, graphs

    return export


def graph_of(stored: dict[str, Any]) -> Graph:
    inputs, outputs = (
        tuple(TensorSpec(one["name"], tuple(one["shape"]), one["dtype"]) for one in stored[key])
        for key in ("inputs", "outputs")
    )
    return Graph(stored["file"], inputs, outputs)


@pytest.fixture(scope="session")
def artifact(
    exported: Callable[..., Export], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Layout], Path]:
    """`artifact("static_pair")`: a folder of a tiny llama's graphs with their manifest."""

    def write(layout: Layout) -> Path:
        model, source, graphs = exported("llama", layout)
        folder = Path(shutil.copytree(source, tmp_path_factory.mktemp(layout) / "x"))
        Manifest(
            layout=layout,
            model_name="llama",
            model=model,
            source="llama",
            target="CPU",
            model_type="MINDIR",
            precision="float32",
            batch_size=BATCH if layout == "static_pair" else 1,
            seq_length=LENGTH,
            graphs=graphs,
            files={one.file: sha256_of(folder / one.file) for one in graphs.values()},
            tokenizer=(),
            versions={"mindspore": "2.10.0"},
        ).write(folder)
        return folder

    return write
