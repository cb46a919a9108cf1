"""The files and the job of a plan as plain data for JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lite_runner.architectures.plain import StoredDecoder, decoder_of, to_plain
from lite_runner.config.fields import read
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import GenerateOptions
from lite_runner.config.prompt import Request
from lite_runner.config.quantization import Quantization
from lite_runner.config.requests import read_requests
from lite_runner.config.schema import RunConfig
from lite_runner.model.adapters import open_adapter_job
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate
from lite_runner.plan.job import Job

REOPENED = "opened by each rank"  # in place of paths


def files_to_plain(files: ModelFiles) -> dict[str, Any] | str:
    """The files by their paths; REOPENED for an exported model, or one with a merged adapter."""
    if files.exported is not None or files.adapter is not None:
        return REOPENED
    return {
        "source": files.source,
        "path": None if files.path is None else str(files.path),
        "model": to_plain(files.model),
        "seed": files.seed,
        "strategy": None if files.strategy is None else str(files.strategy),
        "auto_trans": files.auto_trans,
        "verified": files.verified,
        "quantization": asdict(files.quantization),
    }


def files_from_plain(raw: Mapping[str, Any] | str, config: RunConfig) -> ModelFiles:
    """The inverse of `files_to_plain`. Raises ArtifactError where a file is missing."""
    if isinstance(raw, str):
        return locate(config)
    return ModelFiles(
        raw["source"],
        None if raw["path"] is None else Path(raw["path"]),
        decoder_of(read(raw["model"], StoredDecoder, "model", [])),  # ours: no faults
        raw["seed"],
        strategy=None if raw["strategy"] is None else Path(raw["strategy"]),
        auto_trans=raw["auto_trans"],
        verified=raw["verified"],
        quantization=Quantization(**raw["quantization"]),
    )


def job_to_plain(job: Job) -> dict[str, Any]:
    """The job without its requests, which are in the config."""
    return {
        "tokens": [list(map(int, ids)) for ids in job.tokens],
        "generation": asdict(job.generation),
        "slots": job.slots,
        "length": job.length,
        "adapters": None if job.adapters is None else list(job.adapters.of_prompts),
        "all_logits": job.all_logits,
    }


def job_from_plain(raw: Mapping[str, Any], config: RunConfig, files: ModelFiles) -> Job:
    """The inverse of `job_to_plain`; adapters are opened again. Raises ArtifactError."""
    generation: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in raw["generation"].items()
    }
    requests: tuple[Request, ...] = ()
    adapters = None
    if isinstance(config, GenerateOptions):
        requests = tuple(read_requests(config))
        if raw["adapters"] is not None:
            adapters = open_adapter_job(config, files.model, raw["adapters"])
    return Job(
        requests,
        raw["tokens"],
        GenerationConfig(**generation),
        raw["slots"],
        raw["length"],
        adapters=adapters,
        all_logits=raw["all_logits"],
    )
