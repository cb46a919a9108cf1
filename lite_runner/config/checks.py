"""Validation errors of combinations of values, each of which is valid by itself.

Nothing here loads or downloads: an error costs the user no waiting. Those of exported models and of
MindFormers are in backend_checks.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

from lite_runner.architectures import of_mindformers, parameters
from lite_runner.architectures.quantization import OF_BLOCKS, matrices_of, schemes
from lite_runner.architectures.settings import PREFIX, AutoSettings
from lite_runner.architectures.spec import Decoder
from lite_runner.config import Invalid, invalid, paths_of, raise_errors, section_errors, show
from lite_runner.config.generation import (
    GenerationConfig,
    beyond_context,
    length_errors,
    sampling_errors,
)
from lite_runner.config.parallel import (
    division_errors,
    parallel_errors,
    replica_errors,
    without_ranks,
)
from lite_runner.config.prompts import adapter_names, prompt_errors, request_errors
from lite_runner.config.schema import (
    AdapterOptions,
    CompareOptions,
    Exported,
    ExportedOptions,
    GenerateOptions,
    MindFormersOptions,
    RunConfig,
    SamplingOptions,
    SessionOptions,
    StrategyOptions,
)
from lite_runner.config.sections import RANDOM
from lite_runner.records import dataclass

_BYTE_TOKENIZER_SIZE = 259  # 256 bytes, bos, eos, pad


def common_errors(config: RunConfig) -> Iterator[Invalid]:
    """All validation errors of keys that every run mode has."""
    yield from section_errors(config)
    yield from _parallel_mode(config)
    yield from _model(config)
    yield from _paths(config)
    if config.profile and config.run_mode == "doctor":
        yield invalid(("profile", "run_mode"), "profile=true has no effect with run_mode=doctor")
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
    """Raise ConfigError with the settings that do not fit the model."""
    raise_errors(list(fits_model(config, model)))


def strategy_errors(config: StrategyOptions) -> Iterator[Invalid]:
    """The validation error of a strategy for random weights."""
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
    """Validation errors of quant and quant_group, together and with the rest of the config."""
    if config.quant_group is not None and config.quant != "a16w4":
        group = f"quant_group={config.quant_group}"
        why = f"{group} needs quant=a16w4: 8 bits have no groups to choose"
        if config.writes_floats or not config.takes_quantized:
            why = f"{group} has no effect with run_mode={config.run_mode}"
        yield invalid(("quant_group", "quant"), why)
    if config.modules_to_not_convert is not None and config.quant in (None, *OF_BLOCKS):
        why = "modules_to_not_convert needs quant=a16w8, a16w4 or a8w8, which converts all others"
        if config.writes_floats or not config.takes_quantized:
            why = f"modules_to_not_convert has no effect with run_mode={config.run_mode}"
        yield invalid(("modules_to_not_convert", "quant"), why)
    if config.quant in OF_BLOCKS and config.checkpoint_source == RANDOM:
        yield invalid(
            ("quant", "load_checkpoint"),
            f"quant={config.quant} needs a quantized GGUF file, and random weights are floats;"
            f" quant={config.quant}w8 makes integers of them",
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
    """Validation errors of modules_to_not_convert with names that the model lacks."""
    quantization = config.quantization
    if not quantization.kept:
        return
    matrices = list(schemes(model, replace(quantization, kept=())))
    for part in quantization.kept:
        known = any(part in one.name for one in parameters(model))  # some are never converted
        if not part or not (known or matrices_of(part, model, matrices)):
            names = dict.fromkeys(name.removesuffix(".weight").split(".")[-1] for name in matrices)
            yield invalid(
                ("modules_to_not_convert", "model"),
                f"modules_to_not_convert: got {part!r}, which is in no name of the model's modules"
                f" ({', '.join(names)})",
            )


def unavailable(floats_only: Iterable[str], what: str, key: str) -> Iterator[Invalid]:
    """Validation errors of settings that do not support quantized weights, set by `what`."""
    for setting in floats_only:
        other, _, value = setting.partition("=")
        why = ": graphs compute with floats; backend=native computes without an export"
        why = why if value in ("mslite", "export") else ""
        yield invalid((key, other), f"{what} is not available with {setting}{why}")


def with_backend(config: Exported) -> Exported:
    """The config with backend=mslite in place of auto where it has settings of exported models."""
    asked = not config.writes_graphs and any(offline_settings(config).values())
    return replace(config, backend="mslite") if config.backend == "auto" and asked else config


def offline_errors(config: ExportedOptions) -> Iterator[Invalid]:
    """Validation errors of exporting, and of running an exported model; none where nothing asks for
    either."""
    settings = offline_settings(config)
    if config.writes_graphs or config.in_lite or config.infer.rank_id or any(settings.values()):
        from lite_runner.config.backend_checks import exported_errors

        yield from exported_errors(config, settings)


def offline_settings(config: ExportedOptions) -> dict[str, bool]:
    """The settings of exported models by their keys, and whether each is given."""
    infer, export, settings = config.infer, config.export, config.model.model_config
    return {
        "engine": config.chosen_engine is not None,
        "export.layout": export.chosen_layout is not None,
        "export.target": export.target != "auto",
        "export.weight_fp16": export.weight_fp16,
        "infer.model_dir": bool(infer.model_dir),
        "infer.prefill_model_path": bool(infer.prefill_model_path),
        "infer.increment_model_path": bool(infer.increment_model_path),
        "infer.enc_key": bool(infer.enc_key),
        "model.model_config.is_sample_acceleration": settings.is_sample_acceleration,
        "infer.infer_seq_length": infer.infer_seq_length is not None,
        "infer.model_type": infer.model_type is not None,
        "infer.ge_config_path": bool(infer.ge_config_path),
        "ge": infer.ge_options is not None,
    }


def context_errors(config: SamplingOptions, model: Decoder) -> Iterator[Invalid]:
    """Validation errors of typed lengths beyond the model's context."""
    new = config.max_new_tokens
    total = config.max_length if new is None else None  # max_new_tokens wins
    yield from length_errors(GenerationConfig(max_new_tokens=new, max_length=total), model)


def typed_errors(config: RunConfig, typed: Collection[str]) -> Iterator[Invalid]:
    """Validation errors of the model's own lengths among the `typed` dotted keys."""
    model, settings = config.model_config(), config.model.model_config
    section = "model.model_config"
    for key in ("model", "load_checkpoint"):
        if key in typed and getattr(getattr(config, "serve", None), "models", None):
            yield invalid(key, f"{key} has no effect with serve.models: name the model there")
    if model is None:
        return
    if (key := f"{section}.max_new_tokens") in typed:
        options = GenerationConfig(max_new_tokens=settings.max_new_tokens)
        yield from length_errors(options, model, key)
    if (key := f"{section}.max_decode_length") in typed:
        options = GenerationConfig(max_length=settings.max_decode_length)
        yield from length_errors(options, model, key)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ComparedOptions(GenerateOptions, CompareOptions):
    """Options of run modes that complete prompts once."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ComparedOptions, MindFormersOptions):
    """Options of run_mode=predict."""


@dataclass(frozen=True, kw_only=True)
class SloraOptions(ComparedOptions):
    """Options of run_mode=slora."""

    adapter_lines: ClassVar[bool] = True
    takes_quantized: ClassVar[bool] = False


def generate_errors(config: GenerateOptions) -> Iterator[Invalid]:
    """All validation errors of a run that generates."""
    yield from prompt_errors(config)
    yield from request_errors(config)
    yield from sampling_errors(config, config.generation(), vars(config))
    yield from adapter_errors(config, one=False)
    if config.only_save_strategy and not config.use_parallel:
        yield invalid(
            ("only_save_strategy", "use_parallel"),
            "only_save_strategy=true needs use_parallel=true",
        )
    for key in ("src_strategy_path_or_dir", "auto_trans_ckpt"):
        if config.runs_given_model and (value := getattr(config, key)):
            yield invalid(
                key,
                f"{key}={value if isinstance(value, str) else show(value)} has no effect"
                " with an exported model, which has its weights in it",
            )
    if not config.runs_given_model:
        yield from strategy_errors(config)
    yield from offline_errors(config)
    if config.in_mindformers:
        from lite_runner.config.backend_checks import mindformers_run_errors

        yield from mindformers_run_errors(config)
    yield from replica_errors(config)
    yield from _speculation_errors(config)
    if config.num_beams is not None and config.num_beams > 1:
        given = {"speculate": config.demands_drafts, "draft_model": bool(config.draft_model)}
        for key in (key for key, is_given in given.items() if is_given):
            yield invalid(
                (key, "num_beams"),
                f"{key}={getattr(config, key)} has no effect with num_beams={config.num_beams}:"
                " beams change until the end",
            )


def _speculation_errors(config: GenerateOptions | SessionOptions) -> Iterator[Invalid]:
    if config.demands_drafts and config.draft_model:
        yield invalid(
            ("speculate", "draft_model"),
            f"speculate={config.speculate} and draft_model={config.draft_model} both draft tokens;"
            " give one of them",
        )


def adapter_errors(config: AdapterOptions, *, one: bool) -> Iterator[Invalid]:
    """Validation errors of LoRA adapters; with `one` a run mode takes a single one."""
    for key in ("adapter_id", "adapter_root", "max_loaded_adapters", "adapter_dtype"):
        if getattr(config, key, None) in (None, "", "auto"):
            continue
        if key == "adapter_id" and not adapter_names(config.adapter_id):
            continue  # the base model, which is always there
        if not config.takes_adapters:
            yield invalid((key, "adapter_path"), f"{key} needs adapter_path=lora_adapter.json")
    ids = config.adapter_id
    nameless = ids is not None and (isinstance(ids, tuple) or not adapter_names(ids))
    if one and nameless:
        got = show(config.adapter_id)
        yield invalid("adapter_id", f"adapter_id: got {got}, expected the name of one adapter")


def session_errors(config: SessionOptions) -> Iterator[Invalid]:
    """Validation errors of run modes that load a model for later prompts."""
    yield from sampling_errors(config, config.generation(), vars(config))
    yield from adapter_errors(config, one=False)
    yield from _speculation_errors(config)
    if not config.runs_given_model:
        yield from strategy_errors(config)
    yield from offline_errors(config)


def mindformers_available_errors(config: RunConfig) -> Iterator[Invalid]:
    """The validation error of backend=mindformers in a run mode without it."""
    if config.in_mindformers and not config.runs_mindformers:
        yield invalid(
            ("backend", "run_mode"),
            f"backend=mindformers is not available with run_mode={config.run_mode}; expected"
            " run_mode=predict, eval or export, or backend=ms",
        )


def predict_errors(config: PredictOptions) -> Iterator[Invalid]:
    """All validation errors of run_mode=predict."""
    yield from completion_errors(config)
    if (release := config.mindformers_release) is not None and not config.names_mindformers:
        from lite_runner.config.backend_checks import without_mindformers

        yield without_mindformers(release)


def completion_errors(config: ComparedOptions) -> Iterator[Invalid]:
    """Validation errors of completing prompts, with one backend or two."""
    yield from generate_errors(config)
    if (compared := config.compared) is not None:
        from lite_runner.config.backend_checks import compare_errors

        yield from compare_errors(config, compared)
