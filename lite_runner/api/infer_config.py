"""InferConfig: which exported model to run, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lite_runner.config.groups import options_of
from lite_runner.config.model_dir import MANIFEST, only_yaml
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.manifest import read_manifest
from lite_runner.model.exported_model import graphs_in

PATHS = ("prefill_model_path", "increment_model_path")
_CHOICES = {"model_type": ("mindir", "mindir_lite"), "target": ("auto", "Ascend", "CPU")}


class InferConfig(dict[str, Any]):
    """Which exported model to run, and how; a dict whose entries are attributes, as MindFormers'
    DictConfig. Raises ConfigError for unknown fields and invalid values."""

    prefill_model_path: str
    increment_model_path: str
    model_type: str
    model_name: str
    infer_seq_length: int
    target: str
    device_id: int
    rank_id: int
    ge_config_path: str | Sequence[str]
    dynamic: bool

    def __init__(
        self,
        prefill_model_path: str | Path | Mapping[str, Any] = "",
        increment_model_path: str | Path = "",
        model_type: str = "mindir",
        model_name: str = "common",
        infer_seq_length: int = 1024,
        target: str = "auto",
        device_id: int = 0,
        rank_id: int = 0,
        ge_config_path: str | Path | Sequence[str | Path] = "",
        dynamic: bool = False,
        **others: Any,
    ) -> None:
        """`prefill_model_path`: or a mapping of all fields that differ from these defaults.

        `model_type`: or mindir_lite. `model_name`: a model of conf/model, its family (bloom, llama,
        gpt2: the sizes are read from the graphs), or common: the manifest or yaml beside them says.
        `target`: Ascend, CPU, or auto: Ascend where there is one. `infer_seq_length`: positions of
        a row, where no graphs are given. `ge_config_path`: or a pair, of prefill and increment.
        """
        given = {name: value for name, value in locals().items() if name in FIELDS} | others
        if isinstance(prefill_model_path, Mapping):
            given |= {"prefill_model_path": "", **prefill_model_path}
        super().__init__()
        self.update(given)

    def update(self, *args: Any, **fields: Any) -> None:
        """Set several at once."""
        given = dict(*args, **fields)
        faults = [text for name, value in given.items() for text in _faults(name, value)]
        if faults:
            raise ConfigError.of(faults)
        super().update({name: _plain(value) for name, value in given.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"InferConfig has no {name!r}{did_you_mean(nearest(name, FIELDS))}")


FIELDS = tuple(InferConfig.__annotations__)


def _faults(name: str, value: Any) -> Iterator[str]:
    if name not in FIELDS:
        yield f"{name}: no such field{did_you_mean(nearest(name, FIELDS))}"
    elif name in _CHOICES:
        if value not in _CHOICES[name]:
            yield f"{name}: got {value!r}, expected one of {', '.join(_CHOICES[name])}"
    elif name == "dynamic":
        if type(value) is not bool:
            yield f"{name}: got {value!r}, expected True or False"
    elif name in ("infer_seq_length", "device_id", "rank_id"):
        least = int(name == "infer_seq_length")
        if type(value) is not int or value < least:
            yield f"{name}: got {value!r}, expected an integer >= {least}"
    else:
        texts = value if name == "ge_config_path" and isinstance(value, list | tuple) else [value]
        if not all(isinstance(text, (str, Path)) for text in texts):
            yield f"{name}: got {value!r}, expected a text"


def _plain(value: Any) -> Any:
    """Paths as texts."""
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return str(value) if isinstance(value, Path) else value


def infer_config(
    model: str | Path | tuple[str | Path, ...], kwargs: Mapping[str, Any]
) -> tuple[InferConfig, dict[str, Any]]:
    """The InferConfig of the arguments of `pipeline`, and its other arguments.

    Raises ConfigError for more than two paths, ArtifactError for a folder that is ambiguous.
    """
    given = {name: value for name, value in kwargs.items() if name in FIELDS}
    rest = {name: value for name, value in kwargs.items() if name not in FIELDS}
    paths: dict[str, str] = {}
    if isinstance(model, tuple):
        if not 1 <= len(model) <= 2:
            raise ConfigError(
                f"model: got {len(model)} paths, expected one, or two: (prefill, increment)"
            )
        paths = dict(zip(PATHS, map(str, model), strict=False))
    elif str(model) in options_of("model"):
        given.setdefault("model_name", str(model))
    else:
        paths = files_of(Path(model).expanduser())
    return InferConfig(**{**paths, **given}), rest


def files_of(folder: Path) -> dict[str, str]:
    """The paths of the graphs in a model's folder, by their names in InferConfig.

    Raises ArtifactError for a missing folder and for ambiguous files.
    """
    if not folder.is_dir():
        raise ArtifactError(
            f"{folder}: no such folder, and no model of that name",
            f"models: {', '.join(options_of('model'))}",
        )
    if (folder / MANIFEST).is_file():
        graphs = read_manifest(folder, check_files=False).paths(folder)
    else:
        only_yaml(folder)
        graphs = graphs_in(folder)
    return dict(zip(PATHS, map(str, graphs.values()), strict=False))
