"""Validation errors of a config whose values are valid one by one: combinations.

Nothing here loads or downloads: a fault costs the user no waiting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lite_runner.architectures import network_name
from lite_runner.architectures.spec import Decoder
from lite_runner.config.ascend import ascend_faults
from lite_runner.config.fields import Fault, fault, raise_faults, show
from lite_runner.config.lengths import beyond_context, context_faults
from lite_runner.config.options import ExportedOptions, SamplingOptions, StrategyOptions
from lite_runner.config.parallel import division_faults, parallel_faults
from lite_runner.config.quantization_checks import quantization_faults
from lite_runner.config.repeat import READ, WRITTEN, path_at
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import (
    AutoSettings,
    ChatGLM2Settings,
    GLMSettings,
    LayerNormSettings,
    LlamaLikeSettings,
    MixtureSettings,
    RotarySettings,
)
from lite_runner.config.sizes import size_faults

_BYTE_TOKENIZER_SIZE = 259  # 256 bytes, begin, end, pad


def common_faults(config: RunConfig) -> Iterator[Fault]:
    """All validation errors of what every run mode has."""
    yield from _parallel_mode(config)
    yield from _model(config)
    yield from _paths(config)
    key = "model.model_config.is_sample_acceleration"
    if config.model.model_config.is_sample_acceleration and not isinstance(config, ExportedOptions):
        yield fault(key, f"{key} has an effect only with an exported model")
    yield from quantization_faults(config)
    yield from ascend_faults(config)
    yield from size_faults("context.cache_limit", config.context.cache_limit)
    yield from parallel_faults(config)


def fits_model(config: RunConfig, model: Decoder) -> Iterator[Fault]:
    """What of a config does not fit the model; for model=auto when its checkpoint is known."""
    yield from division_faults(config, model)
    if isinstance(config, ExportedOptions):
        asked = config.infer.infer_seq_length
        if asked is not None and asked > model.seq_length:
            yield beyond_context("infer.infer_seq_length", asked, model)
    ends = model.eos_token_id
    if isinstance(config, SamplingOptions):
        yield from context_faults(config, model)
        ends = config.generation(model).eos_token_id
    ids: list[tuple[str, int | None]] = [("eos_token_id", i) for i in ends]
    ids += [("bos_token_id", model.bos_token_id), ("pad_token_id", model.pad_token_id)]
    for key, token in ids:
        if token is not None and token >= model.vocab_size:
            yield fault(
                (key, "model"),
                f"{key}: got {token}, expected less than the vocabulary of {model.vocab_size}",
            )


def check_fits(config: RunConfig, model: Decoder) -> None:
    """Raises ConfigError with what of a config does not fit the model."""
    raise_faults(list(fits_model(config, model)))


def strategy_faults(config: StrategyOptions) -> Iterator[Fault]:
    """A strategy of a checkpoint that has none."""
    strategy = config.src_strategy_path_or_dir
    if strategy and config.checkpoint_source == "random":
        yield fault(
            ("src_strategy_path_or_dir", "load_checkpoint"),
            f"src_strategy_path_or_dir={strategy} has no effect with load_checkpoint=random",
        )


def _parallel_mode(config: RunConfig) -> Iterator[Fault]:
    file, key = config.parallel.strategy_ckpt_save_file, "parallel.strategy_ckpt_save_file"
    if file and not config.use_parallel:
        yield fault(
            (key, "use_parallel"), f"{key}={file} has an effect only with use_parallel=true"
        )
    mode = config.parallel.parallel_mode
    if mode == 0 and config.parallel_config.model_parallel > 1:
        yield fault(
            "parallel.parallel_mode",
            "parallel.parallel_mode=0 is data parallel alone; model_parallel="
            f"{config.parallel_config.model_parallel} needs 1 (semi-auto)",
        )
    elif mode > 1:
        yield fault(
            "parallel.parallel_mode",
            f"parallel.parallel_mode: got {mode}, expected 1 (semi-auto) or 0 (data parallel):"
            " there is no search for a sharding strategy",
        )


def _model(config: RunConfig) -> Iterator[Fault]:
    settings = config.model.model_config
    prefix = "model.model_config."
    network = "auto" if settings.type == "auto" else network_name(settings.type)
    if network != config.model.arch.type:
        yield fault(
            "model",
            f"model.arch.type: got {config.model.arch.type}, expected {network} with"
            f" {prefix}type={settings.type}",
        )
    if not config.checkpoint_source and config.needs_checkpoint:
        which = "model=auto" if settings.type == "auto" else f"model={config.trainer.model_name}"
        yield fault(
            ("load_checkpoint", "model"),
            f"load_checkpoint: {which} has no source of its own; give a path or hf://repo"
            + ("" if settings.type == "auto" else ", or random"),
        )
    if isinstance(settings, AutoSettings):
        if config.checkpoint_source == "random" and not config.pretrained_model_dir:
            yield fault(
                ("load_checkpoint", "model"),
                "load_checkpoint: got random, expected a checkpoint: model=auto has no sizes",
            )
        if config.processor.tokenizer.type == "ByteTokenizer":
            yield fault(
                "processor.tokenizer.type",
                "processor.tokenizer.type: ByteTokenizer is for the tiny models",
            )
    else:
        yield from (
            _chatglm(settings) if isinstance(settings, ChatGLM2Settings) else _sizes(settings)
        )
        model = settings.resolve()
        yield from fits_model(config, model)
        is_byte = config.processor.tokenizer.type == "ByteTokenizer"
        if is_byte and model.vocab_size < _BYTE_TOKENIZER_SIZE:
            yield fault(
                (f"{prefix}vocab_size",),
                f"{prefix}vocab_size: got {model.vocab_size}, expected at least"
                f" {_BYTE_TOKENIZER_SIZE} with ByteTokenizer",
            )
    name = config.trainer.model_name
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        yield fault(
            "trainer.model_name",
            f"trainer.model_name: got {show(name)}, expected letters, digits and . _ - (it names"
            " the output folder)",
        )


def _sizes(settings: RotarySettings | LayerNormSettings | GLMSettings) -> Iterator[Fault]:
    prefix = "model.model_config."
    hidden, heads = settings.hidden_size, settings.num_heads
    given_head_dim = settings.head_dim if isinstance(settings, RotarySettings) else None
    if given_head_dim is None and hidden % heads:
        yield fault(
            (f"{prefix}hidden_size", f"{prefix}num_heads"),
            f"{prefix}hidden_size: got {hidden}, expected a multiple of num_heads={heads}",
        )
    if isinstance(settings, LayerNormSettings):
        return
    if isinstance(settings, GLMSettings):
        if hidden // heads % 4:
            yield fault(
                (f"{prefix}hidden_size", f"{prefix}num_heads"),
                f"{prefix}num_heads: got {heads}, expected heads of a multiple of 4, not of"
                f" {hidden // heads}: each half of them turns pairs",
            )
        return
    kv_heads = settings.n_kv_heads or heads
    if heads % kv_heads:
        yield fault(
            (f"{prefix}num_heads", f"{prefix}n_kv_heads"),
            f"{prefix}num_heads: got {heads}, expected a multiple of n_kv_heads={kv_heads}",
        )
    head_dim = given_head_dim or hidden // heads
    if head_dim % 2 or head_dim == 0:
        yield fault(
            f"{prefix}head_dim",
            f"{prefix}head_dim: got {head_dim}, expected an even number: rotary positions"
            " turn pairs",
        )
    factor = settings.partial_rotary_factor
    if factor is not None and (int(head_dim * factor) < 2 or int(head_dim * factor) % 2):
        yield fault(
            f"{prefix}partial_rotary_factor",
            f"{prefix}partial_rotary_factor: got {factor:g}, expected a fraction of the"
            f" {head_dim} of a head that is an even number: rotary positions turn pairs",
        )
    yield from _rope(settings)
    if isinstance(settings, LlamaLikeSettings):
        yield from _windows(settings)
    if isinstance(settings, MixtureSettings):
        yield from _experts(settings)


def _chatglm(settings: ChatGLM2Settings) -> Iterator[Fault]:
    prefix = "model.model_config."
    heads, groups = settings.num_heads, settings.multi_query_group_num
    if settings.multi_query_attention and (heads % groups or heads == groups):
        yield fault(
            (f"{prefix}num_heads", f"{prefix}multi_query_group_num"),
            f"{prefix}multi_query_group_num: got {groups}, expected a divisor of num_heads={heads},"
            " and fewer; multi_query_attention=false has as many",
        )
    if settings.kv_channels % 4:
        yield fault(
            f"{prefix}kv_channels",
            f"{prefix}kv_channels: got {settings.kv_channels}, expected a multiple of 4: half of a"
            " head is rotated",
        )


def _rope(settings: RotarySettings) -> Iterator[Fault]:
    rope, key = settings.rope_scaling, "model.model_config.rope_scaling"
    if rope is None:
        return
    if rope.factor < 1:
        yield fault(key, f"{key}.factor: got {rope.factor:g}, expected >= 1")
    if rope.original_seq_length < 1:
        yield fault(
            key, f"{key}.original_seq_length: got {rope.original_seq_length}, expected >= 1"
        )
    if rope.type == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        yield fault(
            key,
            f"{key}: got low_freq_factor={rope.low_freq_factor:g} and"
            f" high_freq_factor={rope.high_freq_factor:g}, expected 0 < low < high",
        )
    if rope.type == "yarn" and not 0 < rope.beta_slow < rope.beta_fast:
        yield fault(
            key,
            f"{key}: got beta_slow={rope.beta_slow:g} and beta_fast={rope.beta_fast:g},"
            " expected 0 < slow < fast",
        )


def _experts(settings: MixtureSettings) -> Iterator[Fault]:
    prefix, experts = "model.model_config.", settings.num_experts
    if settings.num_experts_per_tok > experts:
        yield fault(
            (f"{prefix}num_experts", f"{prefix}num_experts_per_tok"),
            f"{prefix}num_experts_per_tok: got {settings.num_experts_per_tok}, expected at most"
            f" num_experts={experts}",
        )
    if settings.mlp_bias:
        yield fault(f"{prefix}mlp_bias", f"{prefix}mlp_bias: got true, expected false with experts")


def _windows(settings: LlamaLikeSettings) -> Iterator[Fault]:
    prefix, layers = "model.model_config.", settings.num_layers
    kinds = settings.layer_types
    if settings.use_sliding_window and settings.sliding_window is None:
        yield fault(
            (f"{prefix}use_sliding_window", f"{prefix}sliding_window"),
            f"{prefix}sliding_window: got null, expected a number of tokens with"
            " use_sliding_window=true",
        )
    if settings.use_sliding_window and kinds is not None and len(kinds) != layers:
        yield fault(
            (f"{prefix}layer_types", f"{prefix}num_layers"),
            f"{prefix}layer_types: got {len(kinds)} layers, expected num_layers={layers}",
        )


def _paths(config: RunConfig) -> Iterator[Fault]:
    for key in (*READ, *WRITTEN):
        path = path_at(config, key)
        if path and "\0" in (path if isinstance(path, str) else "".join(path)):
            yield fault(key, f"{key}: got {show(path)}, expected no NUL in a path")
    if not config.output_dir:
        yield fault("output_dir", "output_dir is empty; expected a folder")
