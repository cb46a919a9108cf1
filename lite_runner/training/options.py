"""The keys of fine-tuning, and their validation errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lite_runner.config import Invalid, invalid, show
from lite_runner.config.groups import values_of
from lite_runner.config.prompts import is_file
from lite_runner.config.schema import OverwriteOptions
from lite_runner.config.sections import AdapterFormat, CheckpointFormat, ModelSource
from lite_runner.records import (
    Count,
    Index,
    InputPath,
    NotNegative,
    OutputPath,
    Positive,
    Range,
    dataclass,
)

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LoraOptions:
    """The adapter."""

    r: Count
    alpha: Positive
    dropout: Annotated[float, Range(0, 0.99)]
    # Names of Hugging Face or MindFormers, or a regular expression; null: query and value
    targets: str | tuple[str, ...] | None
    rslora: bool  # the scale is alpha / sqrt(r), not alpha / r


@dataclass(frozen=True)
class FinetuneOptions:
    """The data, the optimizer, and the trained part of the model."""

    data: InputPath
    skip: Index  # leading records of data to skip
    take: Count | None  # records of data after them; null: all
    eval_data: InputPath  # "": none
    eval_steps: Count | None  # null: an epoch
    early_stop: Count | None  # null: not
    template: Literal["alpaca", "belle", "none"]  # of records with instruction and output
    steps: Count | None  # null: epochs
    epochs: Positive  # where steps is null
    batch_size: Count
    accumulate: Count  # batches per step
    learning_rate: Annotated[float, Range(0, 1000)]  # far beyond any that trains, within float32
    schedule: Schedule
    warmup_steps: Index
    weight_decay: NotNegative
    clip: NotNegative  # 0: not
    max_length: Count | None  # tokens per example; null: 1024, or the model's context
    packing: bool  # several texts per example, up to max_length
    shuffle: bool
    full: bool
    dtype: Literal["float32", "bfloat16", "stored"]  # of frozen matrices
    checkpoint: bool  # a block's activations are recomputed, not kept
    lora: LoraOptions
    init_adapter: InputPath  # "": none
    save_steps: Count | None  # null: only at the end
    charts: bool
    resume: bool

    def errors(self) -> Iterator[Invalid]:
        """Validation errors of settings that contradict each other."""
        if self.full and self.init_adapter:
            yield invalid(
                ("finetune.full", "finetune.init_adapter"),
                "finetune.full=true trains the model itself, and finetune.init_adapter= is an"
                " adapter to train; expected one of them",
            )
        if self.full and self.dtype != "float32":
            yield invalid(
                ("finetune.dtype", "finetune.full"),
                f"finetune.dtype={self.dtype} is the type of weights that are not trained, and"
                " finetune.full=true trains all; expected finetune.dtype=float32",
            )
        if self.steps is not None and self.warmup_steps > self.steps:
            yield invalid(
                ("finetune.warmup_steps", "finetune.steps"),
                f"finetune.warmup_steps: got {self.warmup_steps}, expected at most the"
                f" {self.steps} of finetune.steps",
            )
        for name, value in (("eval_steps", self.eval_steps), ("early_stop", self.early_stop)):
            if value is not None and not self.eval_data:
                yield invalid(
                    (f"finetune.{name}", "finetune.eval_data"),
                    f"finetune.{name}={value} has an effect only with finetune.eval_data=",
                )
        if not self.data:
            yield invalid(
                "finetune.data",
                "finetune.data is empty; give a file of examples: finetune.data=TRAIN.jsonl",
            )
        for name, path in (
            ("data", self.data),
            ("eval_data", self.eval_data),
            ("init_adapter", self.init_adapter),
        ):
            if path and "\0" not in path and not _exists(Path(path).expanduser()):
                yield invalid(f"finetune.{name}", f"finetune.{name}: no file or folder {path}")
        if self.lora.targets == ():
            yield invalid(
                "finetune.lora.targets",
                "finetune.lora.targets: an empty list, expected names of modules, or null",
            )

    def without_effect(self) -> Iterator[str]:
        """Notes on keys that others leave without effect."""
        lora = {f"lora.{name}": value for name, value in vars(self.lora).items()}
        given = {"epochs": self.epochs, **lora}
        usual = values_of("run_mode", "finetune")
        changed = {
            name: f"finetune.{name}={show(value)}"
            for name, value in given.items()
            if value != usual[f"finetune.{name}"]
        }
        causes: dict[str, Iterable[str]] = {}
        if self.steps is not None:
            causes[f"finetune.steps={self.steps}"] = ("epochs",)
        if self.full:
            causes["finetune.full=true"] = lora
        if self.init_adapter:  # has all of an adapter's settings but the dropout
            causes[f"finetune.init_adapter={self.init_adapter}"] = lora.keys() - {"lora.dropout"}
        for cause, names in causes.items():
            if idle := [text for name, text in changed.items() if name in names]:
                yield f"{', '.join(idle)}: no effect with {cause}"


def _exists(path: Path) -> bool:
    return is_file(path) or path.is_dir()  # of MindRecord files, or an adapter


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OverwriteOptions):
    """Options of a fine-tuning."""

    on_ranks: ClassVar[bool] = True
    takes_parallel: ClassVar[bool] = True

    finetune: FinetuneOptions
    finetune_output: OutputPath
    convert_format: AdapterFormat | CheckpointFormat | None

    @property
    def form(self) -> AdapterFormat | CheckpointFormat:
        """The output format; a model after LoRA has the adapter merged."""
        return self.convert_format or ("huggingface" if self.finetune.full else "peft")

    @property
    def for_mindformers(self) -> bool:
        """True if checkpoints are written as MindFormers', too."""
        return self.finetune.save_steps is not None and self.form in ("mindformers", "ckpt")

    @property
    def vocab_parallel(self) -> bool:
        """Each rank has the whole embedding and head."""
        return False

    @property
    def target(self) -> Path:
        """The folder to write."""
        return Path(self.finetune_output).expanduser()

    @property
    def source(self) -> ModelSource:
        """The sources of the model; an adapter in its config is to be trained, not merged."""
        return replace(super().source, pet=None)
