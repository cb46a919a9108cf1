"""Exported models: the config that an InferConfig and what lies beside its graphs mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lite_runner.api.config import PretrainedConfig
from lite_runner.api.infer_config import PATHS, InferConfig
from lite_runner.api.model_source import resolve_source
from lite_runner.architectures import architecture_of
from lite_runner.config.groups import options_of
from lite_runner.config.mindformers import FAMILIES
from lite_runner.config.model_dir import MANIFEST, only_yaml
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.exported_model import common_folder, paths_of
from lite_runner.system import environment


def exported_config(config: InferConfig) -> PretrainedConfig:
    """The settings of a model for a run with backend=mslite.

    Raises ConfigError for an unknown model, and ArtifactError where a family is named and the
    sizes cannot be read from the graphs.
    """
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


def _model_beside(config: InferConfig) -> tuple[str, dict[str, str]]:
    """The arguments of `resolve_source`, from the manifest beside the graphs, else a yaml, else
    (where the family is named) the graphs themselves."""
    if config.prefill_model_path:
        paths = paths_of(config.prefill_model_path, config.increment_model_path)
        keys = {f"infer.{key}": str(path) for key, path in zip(PATHS, paths.values(), strict=False)}
        folder = common_folder(paths)
        if (folder / MANIFEST).is_file():
            return "auto", keys
        if found := only_yaml(folder):
            return str(found), keys
        if usual := FAMILIES.get(config.model_name):
            section = "model.model_config."
            told = sizes_in_graphs(config.model_name, list(paths.values()))
            return usual, keys | {f"{section}{name}": str(size) for name, size in told.items()}
    raise ConfigError(
        "model_name: got common, and neither a manifest nor a yaml says which model it is",
        f"model_name= one of {', '.join([*FAMILIES, *options_of('model')])}",
    )


def sizes_in_graphs(family: str, paths: Sequence[Path]) -> dict[str, int]:
    """Sizes read from the graphs of a family, by their names in the model's config."""
    usual = resolve_source(FAMILIES[family]).model_config()
    assert usual is not None
    environment.import_mindspore()
    from lite_runner.mindir.graph_check import sizes_of
    from lite_runner.mindir.inspect import read_graph

    graphs = [read_graph(path) for path in paths]
    parameters = {one.name: one for graph in graphs for one in graph.parameters}
    constants = frozenset[tuple[int, ...]]().union(*(graph.constants for graph in graphs))
    try:
        return sizes_of(architecture_of(usual), list(parameters.values()), constants)
    except ArtifactError as error:
        raise ArtifactError(f"{paths[0]}: {error.message}", error.hint) from None
