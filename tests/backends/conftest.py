"""Dry runs, and exports of the tiny models: what their manifests say, and pairs, made once for all
tests of a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.app import main
from lite_runner.mindir.manifest import Graph, GraphName, Layout, Manifest
from lite_runner.mindir.write_static_pair import export_static_pair, stems_of
from lite_runner.weights.read_ahead import ReadAhead

pytest.register_assert_rewrite("tests.backends.shared")
ExportedPair = Callable[..., tuple[Manifest, dict[GraphName, Path]]]


@pytest.fixture
def dry(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The output of a dry run of these settings."""

    def run(*settings: str) -> str:
        assert main([*settings, "dry_run=true"]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def tokens() -> NDArray[np.int32]:
    """A prompt of 200."""
    return np.random.default_rng(5).integers(0, 90, 200).astype(np.int32)


@pytest.fixture(scope="session")
def manifest_of(reference: Callable[[str], Any]) -> Callable[..., Manifest]:
    """`manifest_of(case, layout, graphs, batch, length)`: of a case of tests/fixtures/reference."""

    def make(
        case: str,
        layout: Layout,
        graphs: Mapping[GraphName, Graph],
        batch: int,
        length: int,
        **others: Any,
    ) -> Manifest:
        return Manifest(
            layout=layout,
            model_name=case,
            model=reference(case).config,
            source=case,
            model_type="MINDIR",
            precision="float32",
            batch_size=batch,
            seq_length=length,
            graphs=graphs,
            files={},
            tokenizer=(),
            versions={},
            **{"target": "CPU", **others},
        )

    return make


@pytest.fixture(scope="session")
def exported_pair(
    tmp_path_factory: pytest.TempPathFactory,
    reference: Callable[[str], Any],
    manifest_of: Callable[..., Manifest],
) -> ExportedPair:
    """The static pair of a case of tests/fixtures/reference: manifest and paths."""

    @functools.cache  # an export takes a second
    def build(
        case: str, batch: int, length: int, *, sampled: bool = False, target: str = "CPU"
    ) -> tuple[Manifest, dict[GraphName, Path]]:
        known = reference(case)
        folder = tmp_path_factory.mktemp(case)
        graphs = export_static_pair(
            known.config,
            ReadAhead(known.tensors()),
            folder,
            stems_of(case),
            batch_size=batch,
            seq_length=length,
            dtype="float32",
            enc_key=None,
            sampled=sampled,
        )
        manifest = manifest_of(
            case, "static_pair", graphs, batch, length, target=target, sampled=sampled
        )
        return manifest, manifest.paths(folder)

    return build
