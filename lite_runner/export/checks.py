"""An exported model against the run that is to use it, before its graphs are loaded."""

from __future__ import annotations

from pathlib import Path

from lite_runner.backends.dynamic import cannot_copy
from lite_runner.backends.engines.start import EngineOptions
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.config.sampling_checks import more_than_greedy
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.export.spec import check_length
from lite_runner.mindir.manifest import Manifest
from lite_runner.model.exported_model import ExportedModel


def check_fits(config: ExportedOptions, given: ExportedModel, slots: int, length: int) -> None:
    """Raises ConfigError, ArtifactError where the exported model that the user gave does not serve
    a run of `slots` rows of `length` positions."""
    folder, manifest = given.folder, given.manifest
    cache = manifest.operators.kv_cache if manifest.operators else "fp32"
    if manifest.layout == "packed":
        cache = config.kv_cache
    if manifest.operators and not config.context.kernels:
        raise ConfigError(
            f"{folder}: a graph of this project's own operators, and context.kernels=false",
            "leave context.kernels= out, or export it without quant=",
        )
    if config.kv_cache not in ("fp32", cache):
        raise ConfigError(
            f"{folder}: exported with kv_cache={cache}, got kv_cache={config.kv_cache}",
            "leave kv_cache= out, or export it again",
        )
    if manifest.encrypted and not config.infer.enc_key:
        raise ArtifactError(f"{folder}: the model is encrypted", "infer.enc_key= its key")
    if config.infer.enc_key and not manifest.encrypted:
        raise ConfigError(f"infer.enc_key: the model in {folder} is not encrypted")
    asked = config.infer.infer_seq_length or manifest.seq_length
    if max(length, asked) > manifest.seq_length:
        raise ConfigError(
            f"{folder}: made for {manifest.seq_length} positions a row, but "
            + (
                f"the longest prompt and its new tokens need {length}"
                if length > manifest.seq_length
                else f"infer.infer_seq_length={asked} is asked for"
            ),
            "ask for fewer new tokens, or export with a larger infer.infer_seq_length",
        )
    check_length(length, asked)
    if not manifest.fits_any and slots > manifest.batch_size:
        raise ConfigError(
            f"{folder}: made for {manifest.batch_size} rows at a time, {slots} are asked for",
            f"predict_batch_size={manifest.batch_size}",
        )


def check_ranks(
    config: ExportedOptions,
    manifest: Manifest,
    folder: Path,
    engine: EngineOptions,
    ranks: Ranks,
) -> None:
    """Raises ConfigError where there are no graphs for each of the ranks. Started by hand, which is
    for Ascend, each process knows its own rank alone."""
    by_hand = ranks.size == 1 and engine.device == "Ascend"
    if manifest.ranks != ranks.tensor and not by_hand:
        raise ConfigError(
            f"{folder}: exported for {manifest.ranks} ranks that share the model, got"
            f" model_parallel={ranks.tensor}",
            f"parallel_config.model_parallel={manifest.ranks}, or export it again with"
            f" model_parallel={ranks.tensor}",
        )
    if config.infer.rank_id and engine.device != "Ascend":
        raise ConfigError(
            f"infer.rank_id={config.infer.rank_id}: a process that was started by hand is one of"
            " several ranks only on Ascend",
            "parallel=tp2 (or another) starts all ranks",
        )


def check_generation(manifest: Manifest, generation: GenerationConfig) -> None:
    """Raises ConfigError for options that the graphs cannot generate with."""
    copies = max(generation.num_beams, generation.num_return_sequences) > 1
    if copies and not manifest.fits_any:
        raise ConfigError(*cannot_copy(manifest.layout))
    if manifest.sampled and (asked := more_than_greedy(generation)):
        raise ConfigError(
            f"the exported model chooses the likeliest token itself (is_sample_acceleration), so "
            f"{', '.join(asked.values())} cannot be done",
            "export it without model.model_config.is_sample_acceleration",
        )
