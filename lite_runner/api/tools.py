"""MindFormerConfig and the helpers that scripts import from mindformers.tools."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lite_runner import progress
from lite_runner.config.sections import ParallelConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.system.yaml_file import read_yaml

if TYPE_CHECKING:
    from lite_runner.api.model import PreTrainedModel


class MindFormerConfig(dict[str, Any]):
    """Sections and settings by key, and as attributes too: config.model.model_config.seq_length.

    As in MindFormers an attribute that is not there is None. What the settings mean is found out
    by who takes the config: AutoModel.from_config, Trainer, build_context, LlamaConfig(**section).
    """

    def __init__(self, *sources: str | Path | Mapping[str, Any], **settings: Any) -> None:
        """Of yaml files or mappings, the later over the earlier. Raises ConfigError for a file."""
        super().__init__()
        for source in (*sources, settings):
            self._lay(source if isinstance(source, Mapping) else read_yaml(Path(source)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy and pickle
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.pop(name, None)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _section(value))

    def update(self, *sources: Any, **settings: Any) -> None:
        """As a dict's; sections become configs."""
        for name, value in dict(*sources, **settings).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As a dict's; a section becomes a config."""
        if name not in self:
            self[name] = default
        return self[name]

    def merge_from_dict(self, options: Mapping[str, Any]) -> None:
        """Set keys like "model.model_config.seq_length"."""
        for key, value in options.items():
            *sections, name = key.split(".")
            place = self
            for section in sections:
                if not isinstance(place.get(section), MindFormerConfig):
                    place[section] = {}
                place = place[section]
            place[name] = value

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, as in a yaml file."""
        return {name: _plain(value) for name, value in self.items()}

    def _lay(self, source: Mapping[str, Any]) -> None:
        for name, value in source.items():
            below = self.get(name)
            if isinstance(below, MindFormerConfig) and isinstance(value, Mapping):
                below._lay(value)
            else:
                self[name] = value


class PetConfig(MindFormerConfig):
    """The section `pet_config` of a model in a script: how its weights are adapted."""

    def __init__(self, pet_type: str | None = None, **settings: Any) -> None:
        super().__init__(pet_type=pet_type, **settings)


class LoraConfig(PetConfig):
    """The `pet_config` of a model with LoRA. Of further settings only `lora_dropout` is read, by
    Trainer.finetune."""

    def __init__(
        self,
        lora_rank: int = 8,
        lora_alpha: int = 16,
        target_modules: str | None = None,
        **rest: Any,
    ) -> None:
        if target_modules is not None:
            rest["target_modules"] = target_modules
        super().__init__("lora", lora_rank=lora_rank, lora_alpha=lora_alpha, **rest)


def build_parallel_config(config: MindFormerConfig) -> MindFormerConfig:
    """Make an object of the section `parallel_config`. Raises ConfigError for invalid settings."""
    from lite_runner.api.config import TransformerOpParallelConfig

    section = config.get("parallel_config") or {}
    if isinstance(section, Mapping):
        config["parallel_config"] = TransformerOpParallelConfig(**section)
    return config


def transform_and_load_checkpoint(
    config: MindFormerConfig,
    model: Any,
    network: PreTrainedModel,
    dataset: Any = None,
    optimizer: Any = None,
    do_eval: bool = False,
    do_predict: bool = False,
) -> None:
    """Make `network` load the weights that `config` names, sharded for its ranks.

    `model`, `dataset` and `optimizer` are what MindFormers compiles before it loads: they are not
    needed here. Raises ConfigError for an optimizer, and where no checkpoint is named.
    """
    if optimizer is not None:
        raise ConfigError("transform_and_load_checkpoint: got an optimizer", "optimizer=None")
    if not config.get("load_checkpoint"):
        raise ConfigError("transform_and_load_checkpoint: config.load_checkpoint is empty")
    names = ("load_checkpoint", "auto_trans_ckpt", "src_strategy_path_or_dir")
    network.config.update({name: config[name] for name in names if config.get(name)})


def _section(value: Any) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, MindFormerConfig):
        return MindFormerConfig(value)
    if isinstance(value, list):
        return [_section(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return vars(value) if isinstance(value, ParallelConfig) else value


class _Notes(logging.Handler):
    """Shows lines as the rest of lite_runner does, which logs them as well."""

    def emit(self, record: logging.LogRecord) -> None:
        progress.note(self.format(record))


logger = logging.getLogger("lite_runner.mindformers")
logger.addHandler(_Notes())
logger.setLevel(logging.INFO)
logger.propagate = False


def str2bool(text: str) -> bool:
    """true/false, 1/0, yes/no, whatever the case; a type for argparse, whose error it raises."""
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "y"):
        return True
    if lowered in ("false", "0", "no", "n"):
        return False
    raise argparse.ArgumentTypeError(f"got {text!r}, expected True or False")


def get_real_rank() -> int:
    """The rank of this process: RANK_ID, 0 where it is not set. ConfigError where it is none."""
    text = os.environ.get("RANK_ID", "0")
    if not text.isdecimal():
        raise ConfigError(f"RANK_ID: got {text!r}, expected an integer >= 0")
    return int(text)


def get_last_checkpoint(folder: str | Path) -> str:
    """The path of the newest .ckpt or .safetensors file in a folder. ArtifactError: there is none.

    Of several equally new ones, the last by name.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ArtifactError(f"{path}: no such folder", "give the folder with the checkpoints")
    found = [item for item in path.iterdir() if item.suffix in (".ckpt", ".safetensors")]
    if not found:
        raise ArtifactError(f"{path}: holds no checkpoint, expected a .ckpt or .safetensors file")
    return str(max(found, key=lambda item: (item.stat().st_mtime_ns, item.name)))
