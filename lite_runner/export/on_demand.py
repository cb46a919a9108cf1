"""The exported model of a run in the cache, exported first where it is not there yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lite_runner import progress
from lite_runner.config.ranks import Ranks
from lite_runner.export.cache import folder_in_cache
from lite_runner.export.exchange import barrier, broadcast
from lite_runner.export.job import ExportJob
from lite_runner.export.output_paths import OutputPaths
from lite_runner.mindir.manifest import Manifest, read_manifest
from lite_runner.weights import caches


def cached_export(job: ExportJob) -> tuple[Path, Manifest]:
    """Its folder in the cache and its manifest. Of several ranks each calls this; replicas of the
    model share one export. Raises RunnerError."""
    folder, ranks = folder_in_cache(job.config, job.files, job.spec), job.ranks
    found = caches.use(folder)
    if not found:
        job.required_tokenizer  # noqa: B018  (without one it cannot be exported)
    if broadcast(ranks, "" if found else "missing"):
        from lite_runner.export.writer import export_artifact

        packed = job.spec.layout == "packed"
        without = " (backend=ms does without)" if packed else ""
        progress.note(
            f"no exported {job.config.model_name} in the cache: exporting it first{without}"
        )
        paths = OutputPaths(folder)
        if ranks.tensor > 1:  # all ranks are of one replica
            manifest = export_artifact(job, paths)
            caches.use(folder)
            return folder, manifest
        if job.first:
            export_artifact(replace(job, ranks=Ranks()), paths, verified=not packed)
            if packed:
                size = sum(one.stat().st_size for one in folder.iterdir())
                progress.note(f"{folder.name} is in the cache from now on: {size / 1e6:.0f} MB")
        barrier(ranks)
        caches.use(folder)
    return folder, read_manifest(folder, check_files=False)  # ours; checked when written
