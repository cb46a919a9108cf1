"""Exporting a model: graphs, tokenizer and manifest in a folder, which is then an artifact.

An artifact is a folder with a manifest. It gets its name only when its target engine has computed
what the online backend computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lite_runner import progress
from lite_runner.backends.engines.start import check_reads
from lite_runner.export.exchange import barrier, broadcast
from lite_runner.export.graphs import name_ascend, write_graphs
from lite_runner.export.job import ExportJob
from lite_runner.export.memory import check_room
from lite_runner.export.output_paths import OutputPaths
from lite_runner.export.side_files import write_manifest, write_settings, write_tokenizer
from lite_runner.export.verify import verify
from lite_runner.mindir.manifest import Manifest, read_manifest
from lite_runner.system import environment
from lite_runner.weights.quantization import rounding


def export_artifact(job: ExportJob, paths: OutputPaths, *, verified: bool = True) -> Manifest:
    """Write the artifact, verify it in the job's engine, and only then give it its name. Not
    `verified`: it is used by the run that writes it, with the operators that packed it.

    Several ranks have met, and each calls this: each writes and verifies its graphs, and the first
    does the rest.

    Raises ConfigError where something stands there already, ArtifactError where the engine
    computes something else, EnvironmentFault where memory or disk do not suffice, or the engine
    reads no MindIR of this MindSpore.
    """
    spec, ranks = job.spec, job.ranks
    quantized = job.files.quantization.rounds
    if spec.rounded != "float32" and (quantized or spec.operators is None):
        progress.note(rounding.describe(spec.rounded, quantized=quantized))
    job = replace(job, files=replace(job.files, rounded=spec.rounded))
    if job.first:
        paths.check()
        paths.make_parent()
        check_room(paths.folder.parent, job.files, spec)
    if spec.layout != "packed":
        environment.import_mindspore()
        check_reads(job.engine.name, spec.layout)
    with _temporary_folder(job, paths) as folder:
        with progress.step(f"export {job.config.model_name} ({spec.layout})"):
            graphs, job = write_graphs(folder, job, paths.stems)
        if job.first:
            tokenizer = write_tokenizer(folder, job)
            write_manifest(folder, job, graphs, tokenizer)
        barrier(ranks)
        manifest = read_manifest(folder, check_files=False)
        if verified:
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


@contextmanager
def _temporary_folder(job: ExportJob, paths: OutputPaths) -> Iterator[Path]:
    """The same empty folder for all ranks, beside the output and with its name."""
    if not job.first:
        yield Path(broadcast(job.ranks, ""))
        return
    with paths.temporary() as folder:
        broadcast(job.ranks, str(folder))
        yield folder
