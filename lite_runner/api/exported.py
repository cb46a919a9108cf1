"""InferConfig, and the config of an exported model that it describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.api.config import PretrainedConfig
from lite_runner.api.model import PreTrainedModel
from lite_runner.api.settings import resolve_source
from lite_runner.architectures import architecture_of
from lite_runner.config import did_you_mean, nearest
from lite_runner.config.groups import graphs_of_model, options_of
from lite_runner.config.model_dir import only_yaml
from lite_runner.config.sections import MANIFEST
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.manifest import read_manifest
from lite_runner.model.exported_model import common_folder, graph_paths, graphs_in
from lite_runner.system import environment
from lite_runner.system.yaml_file import read_yaml

PATHS = ("prefill_model_path", "increment_model_path")
# The models of conf/ to start from, by the family names of run_infer_main.py.
FAMILIES = {
    "llama": "llama2_7b",
    "bloom": "bloom_560m",
    "gpt2": "gpt2",
    "glm": "glm_6b",
    "glm2": "glm2_6b",
    "glm3": "glm3_6b",
}
_CHOICES = {"model_type": ("mindir", "mindir_lite"), "target": ("auto", "Ascend", "CPU")}


class InferConfig(dict[str, Any]):
    """An exported model to run, and its options; a dict whose entries are attributes, as of
    MindFormers' DictConfig. Raises ConfigError for unknown fields and invalid values."""

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
        errors = [text for name, value in given.items() for text in _errors(name, value)]
        if errors:
            raise ConfigError.of(errors)
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


def _errors(name: str, value: Any) -> Iterator[str]:
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
            yield f"{name}: got {value!r}, expected a string"


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
    given, rest = _split(kwargs)
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


def _split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of an InferConfig among these arguments, and the others."""
    given = {name: value for name, value in kwargs.items() if name in FIELDS}
    return given, {name: value for name, value in kwargs.items() if name not in FIELDS}


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


def exported_config(config: InferConfig) -> PretrainedConfig:
    """The settings of a model for a run with backend=mslite.

    Raises ConfigError for an unknown model, and ArtifactError where a family is named and the
    sizes cannot be read from the graphs.
    """
    config = _with_graphs_of_model(config)
    ge = config.ge_config_path
    keys: dict[str, str | list[str]] = {
        "backend": "mslite",
        "infer.ge_config_path": ge if isinstance(ge, str) else list(ge),
        "context.device_target": config.target,
        "context.device_id": str(config.device_id),
        "infer.rank_id": str(config.rank_id),
        **{f"infer.{name}": getattr(config, name) for name in PATHS},
    }
    # The length and type of existing graphs win over the defaults of InferConfig.
    if not config.prefill_model_path:
        keys["infer.infer_seq_length"] = str(config.infer_seq_length)
    if not config.prefill_model_path or config.model_type != "mindir":
        keys["infer.model_type"] = config.model_type
    source = config.model_name
    if source == "common" or (source in FAMILIES and config.prefill_model_path):
        source, found = _model_beside(config)
        keys |= found
    return PretrainedConfig(resolve_source(source, **keys))


def exported_of(
    model: PreTrainedModel | PretrainedConfig, kwargs: Mapping[str, Any]
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The settings of an export of a model object, or of its config, and those of `kwargs` that
    are not fields of InferConfig.

    Raises ConfigError where the weights are in the object alone.
    """
    if isinstance(model, PreTrainedModel):
        if model.has_own_weights:
            raise ConfigError(
                "pipeline: backend='mslite' exports a checkpoint, and this model's weights were"
                " written by the script",
                "mindspore.save_checkpoint, and AutoModel.from_pretrained(..., "
                "checkpoint_name_or_path=FILE)",
            )
        model = model.config
    given, rest = _split(kwargs)
    config, fields = model.copy(), InferConfig(**given)
    if fields.dynamic:
        progress.note("InferConfig.dynamic=True has no effect: an export says itself which it is")
    infer = {name: fields[name] for name in given if name not in ("target", "device_id", "dynamic")}
    infer.pop("model_name", None)
    settings: dict[str, Any] = {"backend": "mslite"} | ({"infer": infer} if infer else {})
    if "device_id" in given:
        settings["device_id"] = fields.device_id
    if "target" in given:
        settings["device_target"] = fields.target
    config.update(settings)
    return config, rest


def _with_graphs_of_model(config: InferConfig) -> InferConfig:
    """The config with the section `infer` of a named model's yaml in place of defaults: of the yaml
    in MindFormers' configs/ in the current folder, else of that in conf/model."""
    name = config.model_name
    if config.prefill_model_path or name not in options_of("model"):
        return config
    section, source = graphs_of_model(name), f"conf/model/{name}.yaml"
    for file in sorted(Path("configs").glob(f"*/*_{name}.yaml")):
        found = read_yaml(file).get("infer")
        if isinstance(found, Mapping) and found.get("prefill_model_path"):
            section, source = dict(found), str(file)
    if not section.get("prefill_model_path"):
        return config
    progress.note(f"infer: taken from {source}")
    usual = InferConfig()
    given = {name: value for name, value in config.items() if value != usual[name]}
    return InferConfig(**{**section, **given})


def _model_beside(config: InferConfig) -> tuple[str, dict[str, str]]:
    """The arguments of `resolve_source`, from the manifest beside the graphs, else a yaml, else
    (where the family is named) the graphs themselves."""
    if config.prefill_model_path:
        paths = graph_paths(config.prefill_model_path, config.increment_model_path)
        keys = {f"infer.{key}": str(path) for key, path in zip(PATHS, paths.values(), strict=False)}
        folder = common_folder(paths)
        if (folder / MANIFEST).is_file():
            return "auto", keys
        if found := only_yaml(folder):
            return str(found), keys
        if usual := FAMILIES.get(config.model_name):
            section = "model.model_config."
            sizes = sizes_in_graphs(config.model_name, list(paths.values()))
            return usual, keys | {f"{section}{name}": str(size) for name, size in sizes.items()}
    raise ConfigError(
        "model_name: got common, and neither a manifest nor a yaml names the model",
        f"model_name= one of {', '.join([*FAMILIES, *options_of('model')])}",
    )


def sizes_in_graphs(family: str, paths: Sequence[Path]) -> dict[str, int]:
    """Sizes read from the graphs of a family, by their names in the model's config."""
    usual = resolve_source(FAMILIES[family]).model_config()
    assert usual is not None
    environment.import_mindspore()
    from lite_runner.mindir.inspect import read_graph, sizes_of

    graphs = [read_graph(path) for path in paths]
    parameters = {one.name: one for graph in graphs for one in graph.parameters}
    constants = frozenset[tuple[int, ...]]().union(*(graph.constants for graph in graphs))
    try:
        return sizes_of(architecture_of(usual), list(parameters.values()), constants)
    except ArtifactError as error:
        raise ArtifactError(f"{paths[0]}: {error.message}", error.hint) from None
