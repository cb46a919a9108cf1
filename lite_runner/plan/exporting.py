"""Who writes an export, this project or MindFormers, and what it writes."""

from __future__ import annotations

from lite_runner.config.export_checks import ExportOptions
from lite_runner.config.ranks import Ranks
from lite_runner.export.engine import engine_for
from lite_runner.export.job import ExportJob, default_length, job_of_export
from lite_runner.export.output_paths import OutputPaths
from lite_runner.export.writer import export_artifact
from lite_runner.mindir.manifest import Manifest
from lite_runner.model.files import ModelFiles
from lite_runner.plan.mindformers_export import export_with_mindformers, spec_for_mindformers
from lite_runner.text.tokenizer import Tokenizer


def export_job(
    config: ExportOptions,
    files: ModelFiles,
    ranks: Ranks,
    tokenizer: Tokenizer | None = None,
    *,
    slots: int,
) -> ExportJob:
    """As `job_of_export`, by the backend of the config."""
    if config.backend != "mindformers":
        return job_of_export(config, files, ranks, tokenizer, slots=slots)
    length = config.infer.infer_seq_length or default_length(files.model)
    spec = spec_for_mindformers(slots, length)
    return ExportJob(config, files, tokenizer, spec, engine_for(config, spec.layout), ranks)


def write_export(job: ExportJob, paths: OutputPaths) -> Manifest:
    """Write the artifact, verified. Raises RunnerError."""
    if job.config.backend == "mindformers":
        return export_with_mindformers(job, paths)
    return export_artifact(job, paths)
