"""Exported pairs of the tiny models, made once for all tests of a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.export.manifest import GraphName, Manifest
from lite_runner.export.static_pair import export_static_pair, stems_of
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.read_ahead import ReadAhead

REFERENCE = Path(__file__).parents[1] / "fixtures" / "reference"
ExportedPair = Callable[..., tuple[Manifest, dict[GraphName, Path]]]


@pytest.fixture(scope="session")
def exported_pair(tmp_path_factory: pytest.TempPathFactory) -> ExportedPair:
    """The static pair of a case of tests/fixtures/reference: manifest and paths."""

    @functools.cache  # an export takes a second
    def build(
        case: str, batch: int, length: int, *, sampled: bool = False, target: str = "CPU"
    ) -> tuple[Manifest, dict[GraphName, Path]]:
        model = model_config_of(REFERENCE / case)
        assert model is not None
        folder = tmp_path_factory.mktemp(case)
        graphs = export_static_pair(
            model,
            ReadAhead(open_checkpoint(REFERENCE / case, model)),
            folder,
            stems_of(case),
            batch_size=batch,
            seq_length=length,
            dtype="float32",
            enc_key=None,
            sampled=sampled,
        )
        manifest = Manifest(
            layout="static_pair",
            model_name=case,
            model=model,
            source=case,
            target=target,
            model_type="MINDIR",
            precision="float32",
            batch_size=batch,
            seq_length=length,
            graphs=graphs,
            files={},
            tokenizer=(),
            versions={},
            sampled=sampled,
        )
        return manifest, manifest.paths(folder)

    return build
