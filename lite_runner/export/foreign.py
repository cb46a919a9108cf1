"""A graph that another program exported, as an artifact of ours: with a tokenizer and a manifest
beside it, and verified as every export is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from lite_runner.export.job import ExportJob
from lite_runner.export.output_paths import OutputPaths
from lite_runner.export.side_files import write_settings, write_tokenizer
from lite_runner.export.verify import verify
from lite_runner.mindir.manifest import MANIFEST, Manifest
from lite_runner.system.files import sha256_of


def adopt(
    folder: Path,
    graph: Path,
    job: ExportJob,
    paths: OutputPaths,
    *,
    made_by: Mapping[str, str],
    hidden: Collection[int],
) -> Manifest:
    """Make an artifact of `folder`, which holds `graph`, and give it its name.

    `made_by`: the versions that wrote it; `hidden`: token ids that its attention does not see.
    Raises ArtifactError where it is no graph of the model, or computes something else.
    """
    # Imports MindSpore for its protobuf classes, and every run imports this module.
    from lite_runner.mindir.inspect import foreign_manifest

    config = job.config
    tokenizer = write_tokenizer(folder, job)
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    manifest = replace(
        foreign_manifest({"model": graph}, job.files.model, config.model_name),
        source=job.files.source,
        files={name: sha256_of(folder / name) for name in names if name != MANIFEST},
        tokenizer=tokenizer,
        versions=made_by,
    )
    manifest.write(folder)
    verify(folder, manifest, job, hidden=hidden)
    write_settings(folder, job, manifest, paths)
    paths.take(folder)
    return manifest
