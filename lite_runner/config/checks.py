"""What does not go together in a config whose values are right one by one.

Nothing here loads or downloads: a fault costs the user no waiting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from lite_runner.architectures import network_name
from lite_runner.architectures.spec import Decoder
from lite_runner.config.ascend import ascend_faults
from lite_runner.config.cluster import cluster_faults
from lite_runner.config.evaluation import evaluation_faults, window_faults
from lite_runner.config.fields import Fault, fault, show
from lite_runner.config.ge import ge_faults
from lite_runner.config.lengths import context_faults
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.parallel import division_faults, parallel_faults
from lite_runner.config.prompts import prompt_faults
from lite_runner.config.quantization_checks import quantization_faults
from lite_runner.config.repeat import READ, WRITTEN, path_at
from lite_runner.config.request import is_utf8
from lite_runner.config.requests import adapter_names, request_faults
from lite_runner.config.sampling_checks import sampling_faults
from lite_runner.config.schema import (
    AdapterFormat,
    AutoSettings,
    LayerNormSettings,
    LlamaSettings,
    RunConfig,
)
from lite_runner.distributed.rank_table_file import read_rank_table

_GENERATION = (
    *("do_sample", "max_new_tokens", "max_length", "min_new_tokens", "temperature", "top_k"),
    *("top_p", "min_p", "repetition_penalty", "num_beams", "length_penalty"),
    *("num_return_sequences", "eos_token_id", "stop", "logprobs", "prompt_logprobs"),
)
_ONLY_IN = {  # keys that one or two run modes have
    "convert_format": ("convert",),
    "convert_output": ("convert",),
    "merge": ("convert",),
    "mindformers": ("convert",),
    "eval_data": ("eval",),
    "eval_window": ("eval",),
    "eval_stride": ("eval",),
    "export_output": ("export",),
    "quantize_output": ("quantize",),
    "shard_output": ("shard",),
    "shard_format": ("shard",),
    "transform_process_num": ("shard",),
    "transform_rank": ("shard",),
    "overwrite": ("convert", "export", "quantize", "shard"),
}
_BYTE_TOKENIZER_SIZE = 259  # 256 bytes, begin, end, pad


def run_faults(config: RunConfig) -> Iterator[Fault]:
    """Everything that stands against this run, as far as the config shows it."""
    yield from _unavailable(config)
    yield from _model(config)
    if config.predicts:
        yield from _prompts(config)
        yield from request_faults(config)
        yield from sampling_faults(config, config.generation(), vars(config))
    if config.run_mode == "convert":
        yield from _convert(config)
    if config.run_mode == "eval":
        yield from evaluation_faults(config)
        yield from _no_predicting(config)
    if config.run_mode in ("export", "quantize"):
        yield from _no_predicting(config)
    yield from quantization_faults(config)
    yield from _adapters(config)
    yield from _shards(config)
    yield from offline_faults(config)
    yield from ge_faults(config)
    yield from ascend_faults(config)
    yield from parallel_faults(config)
    yield from cluster_faults(config)
    yield from _places(config)
    yield from rank_table_faults(config)


def fits_model(config: RunConfig, model: Decoder) -> Iterator[Fault]:
    """What of a config does not fit the model; for model=auto when its checkpoint is known."""
    yield from division_faults(config, model)
    if config.run_mode == "eval":
        yield from window_faults(config, model)
    yield from context_faults(config, model)
    generation = config.generation(model)
    asked = config.infer.infer_seq_length
    if asked is not None and asked > model.seq_length:
        yield fault(
            ("infer.infer_seq_length", "model"),
            f"infer.infer_seq_length: got {asked}, expected at most the model's context of"
            f" {model.seq_length} tokens",
        )
    ids: list[tuple[str, int | None]] = [("eos_token_id", i) for i in generation.eos_token_id]
    ids += [("bos_token_id", model.bos_token_id), ("pad_token_id", model.pad_token_id)]
    for key, token in ids:
        if token is not None and token >= model.vocab_size:
            yield fault(
                (key, "model"),
                f"{key}: got {token}, expected less than the vocabulary of {model.vocab_size}",
            )


def _unavailable(config: RunConfig) -> Iterator[Fault]:
    """What is planned and named, but not built: refused, never ignored."""
    file, key = config.parallel.strategy_ckpt_save_file, "parallel.strategy_ckpt_save_file"
    if file and not config.use_parallel:
        yield fault(
            (key, "use_parallel"), f"{key}={file} has a meaning only with use_parallel=true"
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
            " how a model is cut is said here, not searched for",
        )
    offline = config.predicts and config.backend != "ms"
    if config.context.mode == 1 and (offline or config.run_mode == "export"):
        yield fault(
            ("context.mode", "backend", "run_mode"),
            "context.mode=1 (pynative): an exported model is a graph; context.mode=0, or"
            " backend=ms",
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
    # An exported model has its weights in it.
    infer = config.infer
    given = config.predicts and (infer.model_dir or infer.prefill_model_path)
    # Adapters are converted by the model's sizes alone.
    alone = config.convert_format in get_args(AdapterFormat) and settings.type != "auto"
    if not config.checkpoint_source and not given and not alone:
        which = "model=auto" if settings.type == "auto" else f"model={config.model_name}"
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
        yield from _sizes(settings)
        model = settings.resolve()
        yield from fits_model(config, model)
        is_byte = config.processor.tokenizer.type == "ByteTokenizer"
        if is_byte and model.vocab_size < _BYTE_TOKENIZER_SIZE:
            yield fault(
                (f"{prefix}vocab_size",),
                f"{prefix}vocab_size: got {model.vocab_size}, expected at least"
                f" {_BYTE_TOKENIZER_SIZE} with ByteTokenizer",
            )
    if not re.fullmatch(r"\w[\w.-]*", config.model_name, re.ASCII):
        yield fault(
            "trainer.model_name",
            f"trainer.model_name: got {show(config.model_name)}, expected letters, digits and"
            " . _ - (it names the output folder)",
        )


def _sizes(settings: LlamaSettings | LayerNormSettings) -> Iterator[Fault]:
    prefix = "model.model_config."
    hidden, heads = settings.hidden_size, settings.num_heads
    given_head_dim = settings.head_dim if isinstance(settings, LlamaSettings) else None
    if given_head_dim is None and hidden % heads:
        yield fault(
            (f"{prefix}hidden_size", f"{prefix}num_heads"),
            f"{prefix}hidden_size: got {hidden}, expected a multiple of num_heads={heads}",
        )
    if isinstance(settings, LayerNormSettings):
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
    yield from _rope(settings)
    yield from _windows(settings)


def _rope(settings: LlamaSettings) -> Iterator[Fault]:
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


def _windows(settings: LlamaSettings) -> Iterator[Fault]:
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


def _prompts(config: RunConfig) -> Iterator[Fault]:
    for text in prompt_faults(config):
        yield fault("predict_data", text)
    if config.system and not config.chat:
        yield fault(
            ("system", "chat"), "system= needs chat=true: it is the first message of a chat"
        )
    if not is_utf8(config.system):
        yield fault("system", "system: not valid UTF-8")


def _convert(config: RunConfig) -> Iterator[Fault]:
    if not config.convert_output:
        yield fault("convert_output", "convert_output is empty; give the file or folder to write")
    try:
        chosen = config.release.number is not None
    except ValueError as error:
        yield fault("mindformers.release", f"mindformers.release: {error}")
        return
    form = config.convert_format
    if chosen and form in ("huggingface", "peft"):
        yield fault(
            ("mindformers.release", "convert_format"),
            f"mindformers.release has no meaning with convert_format={form}, which MindFormers"
            " is not meant to read",
        )
    yield from _no_predicting(config)


def _adapters(config: RunConfig) -> Iterator[Fault]:
    """LoRA adapters: where they are, and what a conversion makes of them."""
    path, form = config.adapter_path, config.convert_format
    if config.run_mode in ("quantize", "shard") and path:
        yield fault(
            "adapter_path", f"adapter_path={path} has no meaning with run_mode={config.run_mode}"
        )
    pool = ("max_loaded_adapters", "adapter_dtype")
    for key in ("adapter_id", "adapter_root", *pool):
        if getattr(config, key) in (None, "", "auto"):
            continue
        if key == "adapter_id" and not adapter_names(config.adapter_id):
            continue  # the base model, which every run has
        if not path:
            yield fault((key, "adapter_path"), f"{key} needs adapter_path=lora_adapter.json")
        elif key in pool and not config.predicts:
            yield fault(key, f"{key} has no meaning with run_mode={config.run_mode}")
    if config.merges_adapter and not config.adapter_path and config.checkpoint_source == "random":
        key = "model.model_config.pet_config"
        yield fault(
            (key, "load_checkpoint"), f"{key}.pet_type=lora: random weights have no LoRA weights"
        )
    ids = config.adapter_id
    nameless = ids is not None and (isinstance(ids, tuple) or not adapter_names(ids))
    if nameless and not config.predicts:
        got = show(config.adapter_id)
        yield fault("adapter_id", f"adapter_id: got {got}, expected the name of one adapter")
    if config.run_mode != "convert":
        return
    keys = ("convert_format", "merge", "adapter_path")
    if config.merge and not path:
        yield fault(keys, "merge=true needs adapter_path=, the adapter to merge")
    elif form in get_args(AdapterFormat):
        if config.merge:
            yield fault(
                keys,
                f"convert_format={form} is of adapters; merge=true writes a checkpoint: ckpt,"
                " safetensors or huggingface",
            )
        elif not path:
            yield fault(keys, f"convert_format={form} needs adapter_path=, the adapters to convert")
    elif path and not config.merge:
        yield fault(
            keys,
            f"convert_format={form} with adapter_path=: expected peft or mindformers to convert"
            " adapters, or merge=true to merge one into the checkpoint",
        )


def _shards(config: RunConfig) -> Iterator[Fault]:
    """Checkpoints that are cut for many ranks: made, and read."""
    sharding = config.run_mode == "shard"
    if config.only_save_strategy and not sharding and not (config.predicts and config.use_parallel):
        yield fault(
            ("only_save_strategy", "use_parallel", "run_mode"),
            "only_save_strategy=true needs run_mode=shard, or predict with use_parallel=true",
        )
    loading = config.predicts or config.run_mode in ("eval", "export")
    exported = config.infer.model_dir or config.infer.prefill_model_path
    if not (sharding or loading) or (config.predicts and exported):
        for key in ("src_strategy_path_or_dir", "auto_trans_ckpt"):
            if value := getattr(config, key):
                yield fault(
                    key,
                    f"{key}={value if isinstance(value, str) else show(value)} has a meaning only"
                    " with run_mode=shard or export, or run_mode=predict or eval of a checkpoint",
                )
    strategy = config.src_strategy_path_or_dir
    if strategy and config.checkpoint_source == "random":
        yield fault(
            ("src_strategy_path_or_dir", "load_checkpoint"),
            f"src_strategy_path_or_dir={strategy} has no meaning with load_checkpoint=random",
        )
    if not sharding:
        return
    yield from _no_predicting(config)
    if strategy and config.only_save_strategy:
        yield fault(
            ("src_strategy_path_or_dir", "only_save_strategy"),
            f"src_strategy_path_or_dir={strategy} has no meaning with only_save_strategy=true,"
            " which reads no weights",
        )
    if config.auto_trans_ckpt:
        yield fault("auto_trans_ckpt", "auto_trans_ckpt is for predict; shard cuts anyway")
    asked = config.parallel_config
    ranks = asked.data_parallel * asked.model_parallel if config.use_parallel else 1
    suffix = f".{config.shard_format}"
    one_file = ranks == 1 and not config.only_save_strategy
    if one_file and config.shard_output and not config.shard_output.endswith(suffix):
        yield fault(
            ("shard_output", "shard_format", "parallel"),
            f"shard_output: got {config.shard_output}, expected the name of a {suffix} file to"
            " merge to; parallel=tp2 (or another) cuts for several ranks",
        )
    if config.transform_rank is not None and config.transform_rank >= ranks:
        yield fault(
            ("transform_rank", "parallel"),
            f"transform_rank: got {config.transform_rank}, expected less than the {ranks} of the"
            " parallel group",
        )
    if config.transform_rank is not None and config.only_save_strategy:
        yield fault(
            ("transform_rank", "only_save_strategy"),
            "transform_rank has no meaning with only_save_strategy=true, which writes no weights",
        )


def _no_predicting(config: RunConfig) -> Iterator[Fault]:
    for key in ("predict_data", *_GENERATION):
        if getattr(config, key) not in (None, ""):
            yield fault(key, f"{key} has no meaning with run_mode={config.run_mode}")


def _places(config: RunConfig) -> Iterator[Fault]:
    for key, modes in _ONLY_IN.items():
        if config.run_mode not in modes and getattr(config, key) is not None:
            yield fault(key, f"{key} has a meaning only with run_mode={' or '.join(modes)}")
    for key in (*READ, *WRITTEN):
        path = path_at(config, key)
        if path and "\0" in (path if isinstance(path, str) else "".join(path)):
            yield fault(key, f"{key}: got {show(path)}, expected no NUL in a path")
    if not config.output_dir:
        yield fault("output_dir", "output_dir is empty; expected a folder")


def rank_table_faults(config: RunConfig) -> Iterator[Fault]:
    """Why the rank table is of another job.

    Raises ArtifactError for a file that is missing or no rank table.
    """
    path, ranks = config.parallel.rank_table_file, config.parallel_config
    key = "parallel.rank_table_file"
    if not path:
        return
    if not config.use_parallel:
        yield fault((key, "use_parallel"), f"{key} has a meaning only with use_parallel=true")
        return
    table = read_rank_table(Path(path))
    if clash := table.clash():
        yield fault(key, f"{key}: {path} is of no cluster: {clash}")
    wanted = ranks.data_parallel * ranks.model_parallel
    if table.ranks != wanted:
        yield fault(
            (key, "parallel", "parallel_config.data_parallel", "parallel_config.model_parallel"),
            f"{key}: {path} has {table.ranks} ranks, expected {wanted}:"
            f" data_parallel={ranks.data_parallel} times model_parallel={ranks.model_parallel}",
        )
