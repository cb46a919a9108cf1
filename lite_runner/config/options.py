"""Groups of keys that run modes share: a run mode's config is composed of them.

Each group is a RunConfig with keys of its own; conf/keys/ has their defaults. Objects are made of
the run modes' configs alone: of a group no methods are generated, which takes most of its import.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, TypeVar

from lite_runner.architectures.spec import Decoder
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import Items, stop_texts
from lite_runner.config.quantization import CacheType
from lite_runner.config.ranges import (
    Count,
    Index,
    NotNegative,
    Positive,
    Probability,
    TopLogprobs,
    TopP,
)
from lite_runner.config.schema import RunConfig
from lite_runner.config.secret import hidden
from lite_runner.config.sections import Export, Infer, RunMindFormers, TokenIds, token_ids
from lite_runner.records import dataclass

Exported = TypeVar("Exported", bound="ExportedOptions")
# Of logits: MindFormers computes parts of some models with float16.
DEFAULT_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class StrategyOptions(RunConfig):
    """Reading sharded checkpoints."""

    src_strategy_path_or_dir: str


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ComputeOptions(StrategyOptions):
    """Computing with a model's weights."""

    auto_trans_ckpt: bool
    kv_cache: CacheType


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SaveStrategyOptions(RunConfig):
    """Writing the strategy files of a parallel group alone."""

    only_save_strategy: bool


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AdapterOptions(RunConfig):
    """LoRA adapters: their folders, and the one of each prompt."""

    adapter_path: str  # "": none
    adapter_root: str  # "": the adapters may be anywhere
    adapter_id: str | tuple[str | None, ...] | None  # for all prompts, or one for each


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ExportedOptions(ComputeOptions):
    """Exported models: writing them, or running them in an engine."""

    on_ranks: ClassVar[bool] = True
    takes_parallel: ClassVar[bool] = True
    writes_graphs: ClassVar[bool] = False  # the run mode writes exported models

    engine: Literal["auto", "lite", "lite-worker", "graph-cell", "native"]
    export: Export
    infer: Infer

    @property
    def needs_checkpoint(self) -> bool:
        return not self.runs_given_model

    @property
    def runs_given_model(self) -> bool:
        """Whether an exported model is named, which has its weights in it."""
        named = self.infer.model_dir or self.infer.prefill_model_path
        return bool(named) and not self.writes_graphs  # or it is written there

    @property
    def takes_packed(self) -> bool:
        """Whether the exported model is packed layers for engine=native, not a graph."""
        return self.engine == "native" or self.export.layout == "packed"

    def without_given_model(self: Exported) -> Exported:
        """The config of a run from the checkpoint, whatever exported model is named."""
        infer = dataclasses.replace(
            self.infer, model_dir="", prefill_model_path="", increment_model_path=""
        )
        return dataclasses.replace(self, infer=infer)

    def without_secrets(self: Exported) -> Exported:
        infer = dataclasses.replace(self.infer, enc_key=hidden(self.infer.enc_key))
        return dataclasses.replace(self, infer=infer)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class BatchOptions(RunConfig):
    """How many rows are computed together."""

    predict_batch_size: Count | None  # null: the run mode decides


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AdapterSlotOptions(RunConfig):
    """How LoRA adapters are held on the device."""

    max_loaded_adapters: Count | None  # null: as many as run together
    adapter_dtype: Literal["auto", "bf16"]  # auto: without a loss


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class OverwriteOptions(RunConfig):
    """Writing files that outlive the run."""

    overwrite: bool


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class PromptOptions(RunConfig):
    """Prompts, and how completions are printed."""

    predict_data: str | Items
    chat: bool
    system: str  # of chats that begin without one; "": none
    truncate: Literal["none", "left"]
    stream: bool
    output_format: Literal["text", "jsonl"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SamplingOptions(RunConfig):
    """Sampling and lengths; null: as the model's model_config has it."""

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

    def generation(self, model: Decoder | None = None) -> GenerationConfig:
        """The generation options, the model's defaults filled in.

        `model` is the checkpoint's own, for model=auto.
        """
        defaults = self.model.model_config
        model = model or self.model_config()
        max_new_tokens, max_length = self.max_new_tokens, self.max_length
        if max_new_tokens is not None:  # wins over max_length
            max_length = None
        elif max_length is None:
            # No limit was typed: the context may cut the model's own short.
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
            eos_token_id=token_ids(eos) if eos is not None else model.eos_token_id if model else (),
            pad_token_id=model.pad_token_id if model else None,
            stop=stop_texts(self.stop),
            seed=self.seed or 0,  # a run that samples has one: see config/seeds.py
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SessionOptions(SamplingOptions, AdapterOptions, AdapterSlotOptions, ExportedOptions):
    """A model and its adapters, loaded for prompts that come later."""

    computes_here: ClassVar[bool] = True
    on_ranks: ClassVar[bool] = False
    takes_parallel: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class GenerateOptions(
    PromptOptions,
    SamplingOptions,
    AdapterOptions,
    AdapterSlotOptions,
    BatchOptions,
    ExportedOptions,
    SaveStrategyOptions,
):
    """All keys of generation."""

    computes_here: ClassVar[bool] = True
    adapter_lines: ClassVar[bool] = False  # a .txt file of prompts has lines adapter<TAB>prompt

    prefix_cache: Literal["auto", "none"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MindFormersOptions(RunConfig):
    """Computing with the real MindFormers."""

    runs_mindformers: ClassVar[bool] = True

    mindformers: RunMindFormers | None

    @property
    def mindformers_release(self) -> str | None:
        """The release that is asked for; None: the first that computes the model."""
        return self.mindformers.release if self.mindformers else None

    @property
    def caches(self) -> bool:
        """Whether MindFormers keeps a cache."""
        return self.use_past


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CompareOptions(RunConfig):
    """Comparing two backends."""

    compare_backend: Literal["ms", "mslite", "mindformers"] | None
    compare_tolerance: NotNegative | None  # null: DEFAULT_TOLERANCE

    @property
    def tolerance(self) -> float:
        """How far logits of the same may be apart."""
        given = self.compare_tolerance
        return DEFAULT_TOLERANCE if given is None else given

    @property
    def names_mindformers(self) -> bool:
        """Whether MindFormers computes, alone or to compare with."""
        return "mindformers" in (self.backend, self.compare_backend)


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given
