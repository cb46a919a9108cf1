"""Exported models: made from a checkpoint and proved against the online backend.

An artifact is a folder with a manifest. It gets its name only when its target engine has computed
what the online backend computes.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner import environment, progress
from lite_runner.backends.base import Backend, Row
from lite_runner.config.plan import Memory, check_memory, free_memory, memory_need
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.export.manifest import (
    Graph,
    GraphName,
    Layout,
    Manifest,
    read_manifest,
)
from lite_runner.model_files import ModelFiles
from lite_runner.report import versions
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.files import make_folder, require_space, sha256_of, sync_folder
from lite_runner.weights.read_ahead import ReadAhead

EngineName = Literal["lite-worker", "graph-cell"]
ENGINE_OF: dict[Layout, EngineName] = {
    "resizable": "lite-worker",
    "dynamic": "graph-cell",
    "static_pair": "graph-cell",
}
# Of the largest logit. Lite's own rounding is a tenth of it; a wrong operator is far above.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
PROBE_PROMPTS = (5, 18)  # tokens
PROBE_STEPS = 3
PROBE_THREADS = (1, 2)


@dataclass(frozen=True)
class Wanted:
    """What an artifact has to be."""

    layout: Layout
    model_type: Literal["mindir", "mindir_lite"]
    weight_fp16: bool
    slots: int
    length: int  # positions of a slot

    @property
    def engine(self) -> EngineName:
        return ENGINE_OF[self.layout]

    @property
    def precision(self) -> str:
        return "float16" if self.weight_fp16 else "float32"


def open_artifact(folder: Path, manifest: Manifest, *, slots: int, threads: int | None) -> Backend:
    """The artifact in its engine. Raises RunnerError where it does not load."""
    graphs: dict[GraphName, Path] = {
        name: folder / graph.file for name, graph in manifest.graphs.items()
    }
    if manifest.layout == "resizable":
        from lite_runner.backends.engines.worker import WorkerEngine
        from lite_runner.backends.resizable import ResizableBackend

        return ResizableBackend(manifest, WorkerEngine(graphs, threads=threads), slots)
    environment.import_mindspore()
    from lite_runner.backends.dynamic import DynamicBackend
    from lite_runner.backends.engines.graph_cell import GraphCellEngine
    from lite_runner.backends.static_pair import StaticPairBackend

    engine = GraphCellEngine(graphs, manifest.graphs, threads=threads, dec_key=None)
    if manifest.layout == "static_pair":
        return StaticPairBackend(manifest, engine)
    return DynamicBackend(manifest, engine, slots)


def export_artifact(
    target: Path,
    config: RunConfig,
    files: ModelFiles,
    tokenizer: Tokenizer,
    want: Wanted,
    *,
    overwrite: bool = False,
) -> Manifest:
    """Write the artifact, prove it, and only then give it its name.

    Raises ConfigError where the folder exists (without `overwrite`), ArtifactError where the
    engine computes something else, EnvironmentFault where memory or disk do not suffice.
    """
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists already", "choose another name, or overwrite=true")
    make_folder(target.parent)
    _check_room(target.parent, files, want)
    environment.import_mindspore()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        folder = Path(name) / target.name
        folder.mkdir()
        with progress.step(f"export {config.model_name} ({want.layout})"):
            graphs = _write_graphs(folder, config, files, want)
            for file, text in tokenizer.files().items():
                (folder / file).write_text(text, encoding="utf-8")
        names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        manifest = Manifest(
            layout=want.layout,
            model_name=config.model_name,
            model=files.model,
            source=files.source,
            target="CPU",
            model_type="MINDIR_LITE" if want.model_type == "mindir_lite" else "MINDIR",
            precision=want.precision,
            batch_size=want.slots,
            seq_length=files.model.seq_length if want.layout == "resizable" else want.length,
            graphs=graphs,
            files={file: sha256_of(folder / file) for file in names},
            tokenizer=tuple(tokenizer.files()),
            versions=versions(),
        )
        manifest.write(folder)
        verify(folder, read_manifest(folder), files)
        if overwrite and target.exists():
            shutil.rmtree(target)
        # Where another process was first, its artifact has been proved like this one.
        if not target.exists():
            folder.rename(target)
    sync_folder(target.parent)
    return manifest


def _check_room(folder: Path, files: ModelFiles, want: Wanted) -> None:
    """Memory for the network and the graph that is made of it, disk for every graph."""
    need = memory_need(files.model, "float32", want.slots, want.length)
    check_memory(Memory(2 * need.weights, need.cache), free_memory())
    graphs = 2 if want.layout == "static_pair" or want.model_type == "mindir_lite" else 1
    require_space(folder, graphs * need.weights)


def verify(folder: Path, manifest: Manifest, files: ModelFiles) -> None:
    """Compare the artifact's logits with the online backend's: prompts of two lengths, some steps,
    each with one thread and with two. Raises ArtifactError where they differ."""
    prompts = _probes(manifest)
    expected = _logits(_online(files), prompts)
    limit = TOLERANCE[manifest.precision]
    for threads in PROBE_THREADS:
        with progress.step(f"verify in {ENGINE_OF[manifest.layout]}, threads={threads}"):
            backend = open_artifact(folder, manifest, slots=1, threads=threads)
            try:
                got = _logits(backend, prompts)
            finally:
                backend.close()
        error = float(np.abs(got - expected).max() / np.abs(expected).max())
        if not error <= limit:  # NaN fails too
            raise ArtifactError(
                f"the exported {manifest.model_name} computes something else in "
                f"{ENGINE_OF[manifest.layout]} with threads={threads}: off by {error:.1e} of the "
                f"largest logit, at most {limit:.0e} expected; it is not kept",
            )


def _probes(manifest: Manifest) -> list[NDArray[np.int32]]:
    generator = np.random.default_rng(0)
    sizes = [min(size, manifest.seq_length - PROBE_STEPS) for size in PROBE_PROMPTS]
    vocab = manifest.model.vocab_size
    return [generator.integers(0, vocab, size + PROBE_STEPS).astype(np.int32) for size in sizes]


def _logits(backend: Backend, prompts: list[NDArray[np.int32]]) -> NDArray[np.float32]:
    """[prompts, steps + 1, vocab]: after each prompt and each of its last tokens, in one slot."""
    logits = []
    for tokens in prompts:
        start = len(tokens) - PROBE_STEPS
        pieces = [tokens[:start], *np.split(tokens[start:], PROBE_STEPS)]
        position = 0
        for piece in pieces:
            logits.append(backend.forward([Row(0, piece, position)])[0])
            position += len(piece)
    together: NDArray[np.float32] = np.stack(logits)
    return together.reshape(len(prompts), PROBE_STEPS + 1, -1)


def _online(files: ModelFiles) -> Backend:
    from lite_runner.backends.online import OnlineBackend, OnlineOptions

    weights = ReadAhead(files.tensors())
    try:
        length = max(PROBE_PROMPTS) + PROBE_STEPS
        return OnlineBackend(files.model, weights, OnlineOptions(slots=1, length=length))
    finally:
        weights.close()


def _write_graphs(
    folder: Path, config: RunConfig, files: ModelFiles, want: Wanted
) -> dict[GraphName, Graph]:
    weights = ReadAhead(files.tensors())
    arguments = (files.model, weights, folder, config.model_name)
    graphs: dict[GraphName, Graph]
    try:
        if want.layout == "dynamic":
            from lite_runner.export.dynamic import export_dynamic

            graphs = export_dynamic(
                *arguments,
                slots=want.slots,
                seq_length=want.length,
                dtype="float32",
                enc_key=None,
            )
        elif want.layout == "static_pair":
            from lite_runner.export.static_pair import export_static_pair

            graphs = export_static_pair(
                *arguments,
                batch_size=want.slots,
                seq_length=want.length,
                dtype="float32",
                enc_key=None,
                sampled=False,
            )
        else:
            from lite_runner.export.resizable import export_resizable

            graphs = export_resizable(*arguments, batch_size=1, seq_length=files.model.seq_length)
    finally:
        weights.close()
    if want.model_type == "mindir_lite":
        graphs = _converted(folder, graphs, want.weight_fp16)
    return graphs


def _converted(
    folder: Path, graphs: dict[GraphName, Graph], weight_fp16: bool
) -> dict[GraphName, Graph]:
    """The same graphs as .ms, in place of the MindIR files."""
    from lite_runner.backends.engines.converter import convert_to_ms

    converted: dict[GraphName, Graph] = {}
    for name, graph in graphs.items():
        source = folder / graph.file
        target = source.with_suffix(".ms")
        convert_to_ms(source, target, weight_fp16=weight_fp16)
        converted[name] = Graph(target.name, graph.inputs, graph.outputs)
    for path in list(folder.iterdir()):
        if path.suffix not in (".ms", ".msw"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return converted
