"""An export by the real MindFormers: the graph of its network without a cache."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

from lite_runner import progress
from lite_runner.backends.lite.export.job import ExportJob
from lite_runner.backends.lite.export.output_paths import OutputPaths
from lite_runner.backends.lite.export.writer import adopt
from lite_runner.backends.mindformers.run import open_mindformers
from lite_runner.backends.seat import RunOptions
from lite_runner.mindir.manifest import Manifest
from lite_runner.system.files import temporary_folder


def export_with_mindformers(job: ExportJob, paths: OutputPaths) -> Manifest:
    """As `export_artifact`. Raises RunnerError."""
    config, spec, files = job.config, job.spec, job.files
    paths.check()
    paths.make_parent()
    with temporary_folder("mindformers") as work, paths.temporary() as folder:
        exported = work / "graph"  # MindSpore takes no path with spaces, as `folder` may be
        exported.mkdir()
        options = RunOptions(
            config=config, device="CPU", slots=spec.slots, length=spec.length, folder=work
        )
        with closing(open_mindformers(files, options)) as opened:
            with progress.step(f"export {config.model_name} ({spec.layout})"):
                opened.process.export(exported / "model.mindir")
            made_by, release = dict(opened.process.versions), opened.run.release
        _move(exported, folder)
        hidden = release.hidden_tokens(files.model, use_past=False)
        (graph,) = folder.glob("*.mindir")  # MindSpore names large ones model_graph.mindir
        return adopt(folder, graph, job, paths, made_by=made_by, hidden=hidden)


def _move(exported: Path, folder: Path) -> None:
    """Files that MindSpore made readable by the owner only."""
    for path in exported.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for path in list(exported.iterdir()):
        shutil.move(path, folder)
