"""Exports of the tiny models, made once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.mindir import write_resizable
from lite_runner.mindir.manifest import Graph, GraphName, Layout, Manifest
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
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Export]:
    """`exported("llama", "static_pair", sampled=True)`: its model, folder and graphs;
    `exported("llama", "resizable", rewritten=False)`: as MindSpore wrote it."""
    kept: dict[object, Export] = {}

    def export(
        case: str, layout: str = "static_pair", *, rewritten: bool = True, **options: Any
    ) -> Export:
        key = case, layout, rewritten, *options.items()
        if key not in kept:
            model, folder = shallow_model(case), tmp_path_factory.mktemp(f"{case}_{layout}")
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
            kept[key] = model, folder, graphs
        return kept[key]

    return export


@pytest.fixture(scope="session")
def artifact(exported: Callable[..., Export]) -> Callable[[Layout], Path]:
    """`artifact("static_pair")`: a folder of a tiny llama's graphs with their manifest."""

    def write(layout: Layout) -> Path:
        model, folder, graphs = exported("llama", layout)
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
