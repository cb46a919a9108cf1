"""Validation errors of a config whose values are valid one by one: combinations.

Nothing here loads or downloads: an error costs the user no waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lite_runner.architectures import of_mindformers
from lite_runner.architectures.quantization import matrices_of, schemes
from lite_runner.architectures.settings import PREFIX, AutoSettings
from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import (
    Invalid,
    invalid,
    paths_of,
    raise_errors,
    section_errors,
    show,
)
from lite_runner.config.parallel import division_errors, parallel_errors, without_ranks
from lite_runner.config.sampling_checks import beyond_context, context_errors
from lite_runner.config.schema import (
    ExportedOptions,
    RunConfig,
    SamplingOptions,
    StrategyOptions,
)
from lite_runner.config.sections import RANDOM

_BYTE_TOKENIZER_SIZE = 259  # 256 bytes, begin, end, pad


def common_errors(config: RunConfig) -> Iterator[Invalid]:
    """All validation errors of what every run mode has."""
    yield from section_errors(config)
    yield from _parallel_mode(config)
    yield from _model(config)
    yield from _paths(config)
    if config.profile and config.run_mode == "doctor":
        yield invalid(
            ("profile", "run_mode"),
            "profile=true has no effect with run_mode=doctor",
        )
    if not config.output_dir:
        yield invalid("output_dir", "output_dir is empty; expected a folder")
    key = "model.model_config.is_sample_acceleration"
    if config.model.model_config.is_sample_acceleration and not isinstance(config, ExportedOptions):
        yield invalid(key, f"{key} has an effect only with an exported model")
    yield from quantization_errors(config)
    yield from parallel_errors(config)


def fits_model(config: RunConfig, model: Decoder) -> Iterator[Invalid]:
    """Validation errors of a config with its model; for model=auto when its checkpoint is known."""
    yield from division_errors(config, model)
    yield from unknown_modules(config, model)
    if isinstance(config, ExportedOptions):
        asked = config.infer.infer_seq_length
        if asked is not None and asked > model.seq_length:
            yield beyond_context("infer.infer_seq_length", asked, model)
    ends = model.eos_token_id
    if isinstance(config, SamplingOptions):
        yield from context_errors(config, model)
        ends = config.generation(model).eos_token_id
    ids: list[tuple[str, int | None]] = [("eos_token_id", i) for i in ends]
    ids += [("bos_token_id", model.bos_token_id), ("pad_token_id", model.pad_token_id)]
    for key, token in ids:
        if token is not None and token >= model.vocab_size:
            yield invalid(
                (key, "model"),
                f"{key}: got {token}, expected less than the vocabulary of {model.vocab_size}",
            )


def check_fits(config: RunConfig, model: Decoder) -> None:
    """Raises ConfigError with what of a config does not fit the model."""
    raise_errors(list(fits_model(config, model)))


def strategy_errors(config: StrategyOptions) -> Iterator[Invalid]:
    """A strategy of a checkpoint that has none."""
    strategy = config.src_strategy_path_or_dir
    if strategy and config.checkpoint_source == "random":
        yield invalid(
            ("src_strategy_path_or_dir", "load_checkpoint"),
            f"src_strategy_path_or_dir={strategy} has no effect with load_checkpoint=random",
        )


def _parallel_mode(config: RunConfig) -> Iterator[Invalid]:
    file, key = config.parallel.strategy_ckpt_save_file, "parallel.strategy_ckpt_save_file"
    if file and not config.use_parallel:
        yield invalid((key, "use_parallel"), f"{key}={file} {without_ranks(config)}")
    if config.parallel.parallel_mode == 0 and config.parallel_config.model_parallel > 1:
        yield invalid(
            "parallel.parallel_mode",
            "parallel.parallel_mode=0 is data parallel alone; parallel_config.model_parallel="
            f"{config.parallel_config.model_parallel} needs parallel.parallel_mode=1 (semi-auto)",
        )


def _model(config: RunConfig) -> Iterator[Invalid]:
    settings = config.model.model_config
    kind = of_mindformers(settings.type)
    network = "auto" if kind is None else kind.network
    if network != config.model.arch.type:
        yield invalid(
            "model",
            f"model.arch.type: got {config.model.arch.type}, expected {network} with"
            f" {PREFIX}type={settings.type}",
        )
    if not config.checkpoint_source and config.needs_checkpoint:
        which = "model=auto" if settings.type == "auto" else f"model={config.trainer.model_name}"
        yield invalid(
            ("load_checkpoint", "model"),
            f"load_checkpoint: {which} has no source of its own; give a path or hf://repo"
            + ("" if settings.type == "auto" else ", or random"),
        )
    if isinstance(settings, AutoSettings):
        if config.checkpoint_source == "random" and not config.pretrained_model_dir:
            yield invalid(
                ("load_checkpoint", "model"),
                "load_checkpoint: got random, expected a checkpoint: model=auto has no sizes",
            )
        if config.processor.tokenizer.type == "ByteTokenizer":
            yield invalid(
                "processor.tokenizer.type",
                "processor.tokenizer.type: ByteTokenizer is for the tiny models",
            )
    else:
        model = config.model.decoder
        assert model is not None
        yield from fits_model(config, model)
        is_byte = config.processor.tokenizer.type == "ByteTokenizer"
        if is_byte and model.vocab_size < _BYTE_TOKENIZER_SIZE:
            yield invalid(
                (f"{PREFIX}vocab_size",),
                f"{PREFIX}vocab_size: got {model.vocab_size}, expected at least"
                f" {_BYTE_TOKENIZER_SIZE} with ByteTokenizer",
            )


def _paths(config: RunConfig) -> Iterator[Invalid]:
    for key, _, path in paths_of(config):
        if "\0" in "".join(path or ""):
            yield invalid(key, f"{key}: got {show(path)}, expected no NUL in a path")


def quantization_errors(config: RunConfig) -> Iterator[Invalid]:
    """quant and quant_group with each other, and with the rest of the config."""
    if config.quant_group is not None and config.quant != "a16w4":
        group = f"quant_group={config.quant_group}"
        why = f"{group} needs quant=a16w4: 8 bits have no groups to choose"
        if config.writes_floats or not config.takes_quantized:
            why = f"{group} has no effect with run_mode={config.run_mode}"
        yield invalid(("quant_group", "quant"), why)
    if config.modules_to_not_convert is not None and config.quant in (None, "a8"):
        why = "modules_to_not_convert needs quant=a16w8, a16w4 or a8w8, which converts all others"
        if config.writes_floats or not config.takes_quantized:
            why = f"modules_to_not_convert has no effect with run_mode={config.run_mode}"
        yield invalid(("modules_to_not_convert", "quant"), why)
    if config.quant == "a8" and config.checkpoint_source == RANDOM:
        yield invalid(
            ("quant", "load_checkpoint"),
            "quant=a8 needs a quantized GGUF file, and random weights are floats; quant=a8w8 makes"
            " integers of them",
        )
    if config.quantization.quant == "none":
        return
    if config.writes_floats:
        yield invalid(
            ("quant", "run_mode"),
            f"quant={config.quant} has no effect with run_mode={config.run_mode}, which writes"
            " floats; run_mode=quantize writes integers",
        )
    yield from unavailable(config.floats_only, f"quant={config.quant}", "quant")


def unknown_modules(config: RunConfig, model: Decoder) -> Iterator[Invalid]:
    """Names of modules_to_not_convert that the model has not."""
    quantization = config.quantization
    if not quantization.kept:
        return
    matrices = list(schemes(model, replace(quantization, kept=())))
    for part in quantization.kept:
        if not part or not matrices_of(part, model, matrices):
            names = dict.fromkeys(name.removesuffix(".weight").split(".")[-1] for name in matrices)
            yield invalid(
                ("modules_to_not_convert", "model"),
                f"modules_to_not_convert: got {part!r}, which is in no name of the model's modules"
                f" ({', '.join(names)})",
            )


def unavailable(floats_only: Iterable[str], what: str, key: str) -> Iterator[Invalid]:
    """Settings that do not support quantized weights; `what` names the setting of those."""
    for setting in floats_only:
        other, _, value = setting.partition("=")
        why = ": graphs compute with floats; backend=native computes without an export"
        why = why if value in ("mslite", "export") else ""
        yield invalid((key, other), f"{what} is not available with {setting}{why}")
