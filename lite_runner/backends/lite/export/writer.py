"""Writes and verifies an exported model: graphs, tokenizer, manifest, yaml and config.ini.

An artifact is a folder with a manifest. It gets its name only when its target engine has computed
what the online backend computes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner import native, progress
from lite_runner.architectures import architecture_of
from lite_runner.backends import Backend, Row
from lite_runner.backends.collectives import barrier, broadcast, gather_text
from lite_runner.backends.lite.engine import check_reads, ge_to_write
from lite_runner.backends.lite.export.job import ExportJob, check_room
from lite_runner.backends.lite.export.output_paths import OutputPaths
from lite_runner.backends.lite.ge import FILE_NAME, render
from lite_runner.backends.lite.layouts import open_exported
from lite_runner.config.backend_checks import EngineName
from lite_runner.config.model_dir import model_yaml
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import (
    MANIFEST,
    Graph,
    GraphName,
    Manifest,
    fits_any,
    keeps_cache,
    read_manifest,
)
from lite_runner.native.model import unsupported
from lite_runner.native.packed_model import pack
from lite_runner.system import environment
from lite_runner.system.environment import versions
from lite_runner.system.files import sha256_of
from lite_runner.weights.lora.adapter_reader import digest
from lite_runner.weights.quantization.quantize import describe_dtype
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead

MODEL_TYPES: dict[str, Literal["MINDIR", "MINDIR_LITE"]] = {
    "mindir": "MINDIR",
    "mindir_lite": "MINDIR_LITE",
}
# Of the largest logit. Lite's own rounding is a tenth of it; a wrong operator is far above.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
FOREIGN = 1e-3  # Lite rounds more in the graphs of MindFormers 1.0.2: by up to 1.6e-4
PROBE_PROMPTS = (5, 18)  # tokens
PROBE_STEPS = 3
LENGTH = max(PROBE_PROMPTS) + PROBE_STEPS
# MindSpore's own runtime keeps the number of threads that it started with.
PROBE_THREADS: Mapping[EngineName, tuple[int, ...]] = {
    "lite": (1, 2),
    "lite-worker": (1, 2),
    "graph-cell": (2,),
}


def export_artifact(job: ExportJob, paths: OutputPaths) -> Manifest:
    """Write the artifact, verify it in the job's engine, and only then give it its name.

    Several ranks have met, and each calls this: each writes and verifies its graphs, and the first
    does the rest.

    Raises ConfigError if the path exists already, ArtifactError where the engine
    computes something else, EnvironmentFault where memory or disk do not suffice, or the engine
    reads no MindIR of this MindSpore.
    """
    spec, ranks = job.spec, job.ranks
    if spec.rounded != "float32":
        progress.note(describe_dtype(spec.rounded, quantized=False))
    job = replace(job, files=replace(job.files, rounded=spec.rounded))
    if job.first:
        paths.check()
        paths.make_parent()
        check_room(paths.folder.parent, job.files, spec)
    environment.import_mindspore()
    check_reads(job.engine.name, spec.layout)
    with _temporary_folder(job, paths) as folder:
        with progress.step(f"export {job.settings.source.name} ({spec.layout})"):
            graphs = write_graphs(folder, job, paths.stems)
        if job.first:
            tokenizer = write_tokenizer(folder, job)
            write_manifest(folder, job, graphs, tokenizer)
        barrier(ranks)
        manifest = read_manifest(folder, check_files=False)
        verify(folder, manifest, job)
        barrier(ranks)
        if job.first:
            if ranks.size > 1 and spec.target == "Ascend" and job.engine.device != "Ascend":
                name_ascend(folder, manifest)
                write_manifest(folder, job, graphs, tokenizer)
            write_settings(folder, job, manifest, paths)
            paths.take(folder)
        barrier(ranks)
    return manifest


def adopt(
    folder: Path,
    graph: Path,
    job: ExportJob,
    paths: OutputPaths,
    *,
    made_by: Mapping[str, str],
    hidden: Collection[int],
) -> Manifest:
    """Make an artifact of `folder`, which holds a `graph` of another program, and give it its name.

    `made_by`: the versions that wrote it; `hidden`: token ids that its attention does not see.
    Raises ArtifactError where it is not a graph of the model, or computes something else.
    """
    # Imports MindSpore for its protobuf classes, and every run imports this module.
    from lite_runner.mindir.inspect import foreign_manifest

    settings = job.settings
    tokenizer = write_tokenizer(folder, job)
    manifest = replace(
        foreign_manifest({"model": graph}, job.files.model, settings.source.name),
        source=job.files.source,
        files=_digests(folder),
        tokenizer=tokenizer,
        versions=made_by,
    )
    manifest.write(folder)
    verify(folder, manifest, job, hidden=hidden, tolerance=FOREIGN)
    write_settings(folder, job, manifest, paths)
    paths.take(folder)
    return manifest


@contextmanager
def _temporary_folder(job: ExportJob, paths: OutputPaths) -> Iterator[Path]:
    """An empty folder beside the output and with its name, the same for all ranks."""
    if not job.first:
        yield Path(broadcast(job.ranks, ""))
        return
    with paths.temporary() as folder:
        broadcast(job.ranks, str(folder))
        yield folder


def name_ascend(folder: Path, manifest: Manifest) -> None:
    """Verified with the collectives of this machine, the graphs call Ascend's from now on."""
    from lite_runner.mindir.writer import ASCEND_GROUP, name_group

    for graph in manifest.graphs.values():
        for file in graph.files:
            name_group(folder / file, ASCEND_GROUP)


def write_graphs(
    folder: Path, job: ExportJob, stems: Mapping[GraphName, str] | None
) -> dict[GraphName, Graph]:
    """Write the graphs, converted where a .ms is asked for. Of several ranks each writes its own,
    and gets the names of all."""
    spec = job.spec
    weights = ReadAhead(job.files.resharded(job.ranks, vocab_parallel=spec.vocab_parallel))
    try:
        if fits_any(spec.layout):
            from lite_runner.mindir.write_resizable import export_resizable

            model, name = job.files.model, job.settings.source.name
            graphs = export_resizable(
                model, weights, folder, name, batch_size=1, seq_length=model.seq_length
            )
        else:
            graphs, stems = _of_mindformers(folder, job, weights, stems)
    finally:
        weights.close()
    if spec.model_type == "mindir_lite":
        return _converted(folder, graphs, spec.weight_fp16)
    if stems is not None:
        graphs = _renamed(folder, graphs, stems)
    return _of_all_ranks(graphs, job.ranks)


def _of_mindformers(
    folder: Path, job: ExportJob, weights: ReadAhead, stems: Mapping[GraphName, str] | None
) -> tuple[dict[GraphName, Graph], Mapping[GraphName, str] | None]:
    """The pair, or the full graph alone, and the `stems` with those of this rank where there are
    several."""
    from lite_runner.backends.collectives import tensor_parallel
    from lite_runner.mindir.write_static_pair import (
        RANK_STEMS,
        export_static_pair,
        stem_of_rank,
        stems_of,
    )

    spec, ranks = job.spec, job.ranks
    default = stems_of(job.settings.source.name, alone=spec.layout == "full")
    if ranks.size > 1:
        first = stems or {name: RANK_STEMS[name] for name in default}
        stems = {name: stem_of_rank(stem, ranks.rank) for name, stem in first.items()}
    graphs = export_static_pair(
        job.files.model,
        weights,
        folder,
        default if stems is None else stems,
        batch_size=spec.slots,
        seq_length=spec.length,
        dtype=spec.dtype,
        enc_key=spec.key,
        sampled=spec.sampled,
        # Rounded values lose nothing so. bfloat16 ones stay float32, as MindSpore 2.0 reads them.
        stored="float16" if (spec.rounded, spec.dtype) == ("float16", "float32") else None,
        parallel=tensor_parallel(ranks, vocab_parallel=spec.vocab_parallel),
    )
    return graphs, stems


def _renamed(
    folder: Path, graphs: dict[GraphName, Graph], stems: Mapping[GraphName, str]
) -> dict[GraphName, Graph]:
    """x_graph.mindir as x.mindir, as it was asked for; beside variables the longer name stays,
    by which MindFormers' tools know them."""
    named: dict[GraphName, Graph] = {}
    for name, graph in graphs.items():
        file = graph.file
        if not (folder / f"{stems[name]}_variables").exists():
            file = f"{stems[name]}.mindir"
            (folder / graph.file).rename(folder / file)
        named[name] = replace(graph, file=file)
    return named


def _of_all_ranks(graphs: dict[GraphName, Graph], ranks: Ranks) -> dict[GraphName, Graph]:
    """The graphs of the first rank, with the files of all."""
    names = json.dumps({name: graph.file for name, graph in graphs.items()})
    files = [json.loads(one) for one in gather_text(ranks, names)]
    return {
        name: replace(graph, file=files[0][name], others=tuple(one[name] for one in files[1:]))
        for name, graph in graphs.items()
    }


def _converted(
    folder: Path, graphs: dict[GraphName, Graph], weight_fp16: bool
) -> dict[GraphName, Graph]:
    """The graphs as .ms, in place of the MindIR files."""
    from lite_runner.backends.lite.engines.lite_release import convert_to_ms

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


def write_tokenizer(folder: Path, job: ExportJob) -> tuple[str, ...]:
    """Write the tokenizer's files; their names. Raises ConfigError where there is no tokenizer."""
    files = job.required_tokenizer.files()
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return tuple(files)


def write_manifest(
    folder: Path, job: ExportJob, graphs: Mapping[GraphName, Graph], tokenizer: tuple[str, ...]
) -> None:
    """Write the manifest, which lists all files that are in the folder by now; `tokenizer`: names
    of those that are the tokenizer's."""
    settings, files, spec = job.settings, job.files, job.spec
    manifest = Manifest(
        layout=spec.layout,
        model_name=settings.source.name,
        model=files.model,
        source=files.source,
        target=spec.target,
        model_type=MODEL_TYPES[spec.model_type],
        precision=spec.precision,
        batch_size=spec.slots,
        seq_length=files.model.seq_length if spec.fits_any else spec.length,
        graphs=graphs,
        files=_digests(folder),
        tokenizer=tokenizer,
        versions=versions(),
        encrypted=spec.key is not None,
        sampled=spec.sampled,
        adapter=files.adapter.name if files.adapter else "",
        adapter_sha256=digest(files.adapter) if files.adapter else "",
    )
    manifest.write(folder)


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder but its manifest."""
    there = {one.relative_to(folder).as_posix(): one for one in folder.rglob("*") if one.is_file()}
    return {name: sha256_of(there[name]) for name in sorted(there) if name != MANIFEST}


def write_settings(folder: Path, job: ExportJob, manifest: Manifest, paths: OutputPaths) -> None:
    """Write the yaml and config.ini that MindFormers' tools want beside graphs.

    The user may change them, so the manifest does not list them. No yaml is written beside one of
    the user's, nor for a family that MindFormers does not have.
    """
    settings = job.settings
    described = architecture_of(manifest.model).mindformers is not None
    if described and not paths.has_own_yaml():
        cached = keeps_cache(manifest.layout)
        kind = manifest.model_type.lower()
        text = model_yaml(manifest.model, settings, manifest.seq_length, kind, use_past=cached)
        (folder / f"{settings.source.name}.yaml").write_text(text, encoding="utf-8")
    ge = ge_to_write(settings.infer, manifest.target)
    if ge is not None and ge.sections:
        (folder / FILE_NAME).write_text(render(ge.sections), encoding="utf-8")


def verify(
    folder: Path,
    manifest: Manifest,
    job: ExportJob,
    *,
    hidden: Collection[int] = (),
    tolerance: float = 0.0,
) -> None:
    """Compare the artifact's logits with the online backend's: prompts of two lengths, some steps,
    with each number of PROBE_THREADS; without `hidden` tokens, which the graph does not see. Of
    several ranks each calls this, for its graphs. Raises ArtifactError where they differ by more
    than the precision, or `tolerance`, allows."""
    texts, engine = _probes(manifest, hidden), job.engine
    online = reference_backend(job, LENGTH)
    expected = _logits(online, texts)
    online.close()
    limit = max(TOLERANCE[manifest.precision], tolerance)
    graphs = manifest.paths(folder, job.ranks.tensor_index)
    for threads in PROBE_THREADS[engine.name]:
        options = replace(engine, threads=threads)
        with progress.step(f"verify in {engine.name}, threads={threads}"):
            backend = open_exported(graphs, manifest, options, slots=1)
            try:
                got = _logits(backend, texts)
            finally:
                backend.close()
        largest = np.abs(expected).max()
        if manifest.sampled:  # a 1 at the chosen token
            error = float((expected.max(-1) - (expected * got).sum(-1)).max() / largest)
        else:
            error = float(np.abs(got - expected).max() / largest)
        if not error <= limit:  # NaN fails too
            raise ArtifactError(
                f"the exported {manifest.model_name} differs in {engine.name} with "
                f"threads={threads}: off by {error:.1e} of the largest logit, at most {limit:.0e} "
                "expected; it is not kept"
            )


def reference_backend(job: ExportJob, length: int) -> Backend:
    """One slot of `length` tokens. The native kernels compute where they can: MindSpore's graphs
    take as long to compile as the export itself."""
    files, ranks, vocab_parallel = job.files, job.ranks, job.spec.vocab_parallel
    tensors = files.resharded(ranks, vocab_parallel=vocab_parallel)
    if ranks.tensor == 1 and native.unusable() is None and not unsupported(files.model):
        from lite_runner.backends.native.backend import NativeBackend, NativeOptions

        integers = QuantizedWeights(tensors, files.model)
        try:
            layers = list(pack(files.model, integers, dequantize=True))
        finally:
            integers.close()
        return NativeBackend(files.model, layers, NativeOptions(1, length))
    from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions

    weights = ReadAhead(tensors)
    options = MindSporeOptions(slots=1, length=length, ranks=ranks, vocab_parallel=vocab_parallel)
    try:
        return MindSporeBackend(files.model, weights, options)
    finally:
        weights.close()


def _probes(manifest: Manifest, hidden: Collection[int]) -> list[list[NDArray[np.int32]]]:
    """Prompts, each followed by as many single tokens as there is room for."""
    generator = np.random.default_rng(0)
    steps = min(PROBE_STEPS, manifest.seq_length - 1)
    sizes = [min(size, manifest.seq_length - steps) for size in PROBE_PROMPTS]
    seen = [token for token in range(manifest.model.vocab_size) if token not in hidden]
    texts = [generator.choice(seen, size + steps).astype(np.int32) for size in sizes]
    return [
        np.split(text, range(size, size + steps)) for size, text in zip(sizes, texts, strict=True)
    ]


def _logits(backend: Backend, texts: Sequence[Sequence[NDArray[np.int32]]]) -> NDArray[np.float32]:
    """[texts, pieces, vocab]: after each piece of a text, in one slot."""
    logits = []
    for pieces in texts:
        position = 0
        for piece in pieces:
            logits.append(backend.forward([Row(0, piece, position)])[0])
            position += len(piece)
    together: NDArray[np.float32] = np.stack(logits)
    return together.reshape(len(texts), len(texts[0]), -1)
