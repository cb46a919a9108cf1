"""Exported models: made from a checkpoint, proved against the online backend, opened to run.

An artifact is a folder with a manifest. It gets its name only when its target engine has computed
what the online backend computes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import lite_runner
from lite_runner import environment, progress
from lite_runner.backends.base import Backend, Row
from lite_runner.backends.engines.lite_python import find_lite_python
from lite_runner.backends.sizes import cache_length
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.export.manifest import (
    Graph,
    GraphName,
    Manifest,
    read_manifest,
    sha256_of,
)
from lite_runner.model_files import ModelFiles
from lite_runner.report import versions
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.files import make_folder, sync_folder
from lite_runner.weights.read_ahead import ReadAhead
from lite_runner.weights.source import cache_dir

EngineName = Literal["lite-worker", "graph-cell"]
LAYOUT_OF: dict[EngineName, Literal["resizable", "dynamic"]] = {
    "lite-worker": "resizable",
    "graph-cell": "dynamic",
}
# Of the largest logit. Lite's own rounding is a tenth of it; a wrong operator is far above.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
PROBE_PROMPTS = (5, 18)  # tokens
PROBE_STEPS = 3
PROBE_THREADS = (1, 2)
PACKAGE = Path(lite_runner.__file__).parent


@dataclass(frozen=True)
class Wanted:
    """What an artifact has to be."""

    engine: EngineName
    model_type: Literal["mindir", "mindir_lite"]
    weight_fp16: bool
    slots: int
    length: int  # positions of a slot

    @property
    def precision(self) -> str:
        return "float16" if self.weight_fp16 else "float32"


def wanted(config: RunConfig, slots: int, length: int) -> Wanted:
    """The engine and form that a config asks for, or the first that this machine has.

    Raises EnvironmentFault where an engine was asked for that is not here.
    """
    asked = config.engine
    if asked == "auto" and config.export.layout != "auto":
        asked = next(name for name, layout in LAYOUT_OF.items() if layout == config.export.layout)
    if asked == "auto" and config.infer.model_type == "mindir_lite":
        asked = "lite-worker"
    engine: EngineName
    if asked == "graph-cell":
        engine = "graph-cell"
    else:
        try:
            find_lite_python()
            engine = "lite-worker"
        except EnvironmentFault as fault:
            if asked != "auto":
                raise
            progress.note(f"engine=auto: graph-cell, since {fault.message}")
            engine = "graph-cell"
    fastest: Literal["mindir", "mindir_lite"] = "mindir"
    if engine == "lite-worker":  # a .ms loads in a seventh of a MindIR's time
        fastest = "mindir_lite"
    model_type = config.infer.model_type or fastest
    if config.export.weight_fp16 and model_type != "mindir_lite":
        raise ConfigError("export.weight_fp16=true needs infer.model_type=mindir_lite")
    return Wanted(engine, model_type, config.export.weight_fp16, slots, length)


def folder_in_cache(files: ModelFiles, config: RunConfig, want: Wanted) -> Path:
    """Where the artifact of this model and form is kept; named by all that it is made from."""
    origin = files.source
    if files.path is not None:
        status = files.path.stat()
        origin = f"{files.path.resolve()} {status.st_size} {status.st_mtime_ns}"
    form = asdict(want)
    if want.engine == "lite-worker":  # its graph takes any number of slots and positions
        del form["slots"], form["length"]
    described = {
        "model": asdict(files.model),
        "origin": origin,
        "seed": files.seed if files.path is None else None,
        "form": form,
        "versions": versions(),
        "code": _code_hash(),
    }
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    layout = LAYOUT_OF[want.engine]
    return cache_dir() / "artifacts" / f"{config.model_name}-{layout}-{name}"


def open_offline(
    config: RunConfig, files: ModelFiles, tokenizer: Tokenizer, *, slots: int, length: int
) -> Backend:
    """The backend of the artifact that the config names, or of the one in the cache, which is
    exported first where there is none. Raises RunnerError."""
    if config.infer.model_dir:
        folder = Path(config.infer.model_dir).expanduser()
        manifest = read_manifest(folder)
        _check_fits(config, files, manifest, folder, slots, length)
    else:
        # Rounded up, so that prompts of other lengths find an artifact again.
        length = config.infer.infer_seq_length or cache_length(length, files.model.seq_length)
        want = wanted(config, 1 << (slots - 1).bit_length(), length)
        folder = folder_in_cache(files, config, want)
        if folder.is_dir():
            manifest = read_manifest(folder, check_files=False)  # ours; checked when written
        else:
            progress.note(f"no exported {config.model_name} in the cache: exporting it first")
            manifest = export_artifact(folder, config, files, tokenizer, want)
    with progress.step(f"load {folder.name}"):
        return open_artifact(folder, manifest, slots=slots, threads=config.context.threads)


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

    engine = GraphCellEngine(graphs, manifest.graphs, threads=threads, dec_key=None)
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
    environment.import_mindspore()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        folder = Path(name) / target.name
        folder.mkdir()
        with progress.step(f"export {config.model_name} ({LAYOUT_OF[want.engine]})"):
            graphs = _write_graphs(folder, config, files, want)
            for file, text in tokenizer.files().items():
                (folder / file).write_text(text, encoding="utf-8")
        names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        manifest = Manifest(
            layout=LAYOUT_OF[want.engine],
            model_name=config.model_name,
            model=files.model,
            source=files.source,
            target="CPU",
            model_type="MINDIR_LITE" if want.model_type == "mindir_lite" else "MINDIR",
            precision=want.precision,
            batch_size=want.slots,
            seq_length=files.model.seq_length if want.engine == "lite-worker" else want.length,
            graphs=graphs,
            files={file: sha256_of(folder / file) for file in names},
            tokenizer=tuple(tokenizer.files()),
            versions=versions(),
        )
        manifest.write(folder)
        verify(folder, read_manifest(folder), files)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    sync_folder(target.parent)
    return manifest


def verify(folder: Path, manifest: Manifest, files: ModelFiles) -> None:
    """Compare the artifact's logits with the online backend's: prompts of two lengths, some steps,
    each with one thread and with two. Raises ArtifactError where they differ."""
    prompts = _probes(manifest)
    expected = _logits(_online(files), prompts)
    limit = TOLERANCE[manifest.precision]
    for threads in PROBE_THREADS:
        with progress.step(f"verify in {_engine_of(manifest)}, {threads} threads"):
            backend = open_artifact(folder, manifest, slots=1, threads=threads)
            try:
                got = _logits(backend, prompts)
            finally:
                backend.close()
        error = float(np.abs(got - expected).max() / np.abs(expected).max())
        if not error <= limit:  # NaN fails too
            raise ArtifactError(
                f"the exported {manifest.model_name} computes something else in "
                f"{_engine_of(manifest)} with {threads} threads: off by {error:.1e} of the largest "
                f"logit, at most {limit:.0e} expected; it is not kept",
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
    try:
        if want.engine == "graph-cell":
            from lite_runner.export.dynamic import export_dynamic

            return export_dynamic(
                files.model,
                weights,
                folder,
                config.model_name,
                slots=want.slots,
                seq_length=want.length,
                dtype="float32",
                enc_key=None,
            )
        from lite_runner.export.resizable import export_resizable

        graphs = export_resizable(
            files.model,
            weights,
            folder,
            config.model_name,
            batch_size=1,
            seq_length=files.model.seq_length,
        )
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


def _check_fits(
    config: RunConfig, files: ModelFiles, manifest: Manifest, folder: Path, slots: int, length: int
) -> None:
    """The artifact that the user gave against what is asked of it."""
    if manifest.model != files.model:
        raise ArtifactError(
            f"{folder}: an export of {manifest.model_name}, another model than {config.model_name}",
            f"model={manifest.model_name}",
        )
    if config.engine not in ("auto", _engine_of(manifest)):
        raise ConfigError(
            f"engine={config.engine} does not run the layout {manifest.layout} of {folder}",
            f"engine={_engine_of(manifest)}",
        )
    if length > manifest.seq_length:
        raise ConfigError(
            f"{folder}: made for {manifest.seq_length} positions a row, but the longest prompt and "
            f"its new tokens need {length}",
            "ask for fewer new tokens, or export with a larger infer.infer_seq_length",
        )
    if manifest.layout == "dynamic" and slots > manifest.batch_size:
        raise ConfigError(
            f"{folder}: made for {manifest.batch_size} rows at a time, {slots} are asked for",
            f"predict_batch_size={manifest.batch_size}",
        )


def _engine_of(manifest: Manifest) -> EngineName:
    return "lite-worker" if manifest.layout == "resizable" else "graph-cell"


def _code_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.glob("export/*.py"), *PACKAGE.glob("models/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
