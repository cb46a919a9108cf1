"""The config of a run as its folder keeps it: given again as --config, it repeats the run from any
folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

from lite_runner.config.fields import accepts, leaves
from lite_runner.config.groups import options_of
from lite_runner.config.options import GenerateOptions
from lite_runner.config.prompts import STANDARD_INPUT, is_file, prompt_file, read_prompts
from lite_runner.config.schema import RunConfig
from lite_runner.config.secret import KEY
from lite_runner.config.yaml_file import at, put_at

# Keys that name a file or folder to read, or a source elsewhere, or a list of such.
READ = (
    "load_checkpoint",
    "pretrained_model_dir",
    "adapter_path",
    "adapter_root",
    "eval_data",
    "bench.compare",
    "src_strategy_path_or_dir",
    "infer.model_dir",
    "infer.ge_config_path",
    "model.model_config.checkpoint_name_or_path",
    "parallel.rank_table_file",
    "processor.tokenizer.tokenizer_file",
)
# Keys that name what is written, by one run mode or another; exported graphs are read as well.
WRITTEN = (
    "output_dir",
    "convert_output",
    "export_output",
    "quantize_output",
    "shard_output",
    "infer.prefill_model_path",
    "infer.increment_model_path",
    "parallel.log_dir",
    "parallel.strategy_ckpt_save_file",
)


def path_at(config: RunConfig, key: str) -> Any:
    """What a config says at one of these keys; None where its run mode does not have it."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def with_input(config: RunConfig) -> RunConfig:
    """The config with the prompt that standard input holds, which can be read once. Raises
    ConfigError as `read_prompts`."""
    if not isinstance(config, GenerateOptions) or config.predict_data != STANDARD_INPUT:
        return config
    return replace(config, predict_data=tuple(read_prompts(config)))


def kept(config: RunConfig) -> dict[str, Any]:
    """Plain data of a config that means the same in every folder."""
    raw = config.to_dict()
    for key in READ:
        if isinstance(value := at(raw, key), list):
            put_at(raw, key, [_absolute(entry, there=True) for entry in value])
        elif value:
            put_at(raw, key, _absolute(value, there=True))
    for key in WRITTEN:
        if value := at(raw, key):
            put_at(raw, key, _absolute(value))
    if str(at(raw, KEY)).startswith("file:"):
        put_at(raw, KEY, f"file:{_absolute(at(raw, KEY)[5:])}")
    if isinstance(config, GenerateOptions):
        path = prompt_file(config.predict_data)
        if path is not None and is_file(path):
            raw["predict_data"] = str(path.absolute())
    return raw


def is_of_a_run(raw: Mapping[str, Any], config_of: Callable[[str], type[RunConfig]]) -> bool:
    """Whether a yaml is what `kept` gives: no other has every key of its run mode."""
    mode = raw.get("run_mode")
    if not isinstance(mode, str) or mode not in options_of("run_mode"):
        return False
    optional = leaves(config_of(mode)).items() - leaves(RunConfig).items()  # null was left out once
    null = {key for key, takes in optional if accepts(takes, NoneType)}
    return all(field.name in raw for field in fields(config_of(mode)) if field.name not in null)


def run_again(
    raw: Mapping[str, Any],
    groups: Mapping[str, Any],
    options: Sequence[Mapping[str, Any]],
    schema: type[RunConfig],
    every: Collection[str],
) -> dict[str, Any]:
    """The config of a former run (`raw`, of `kept`) with what was typed of the groups over it.

    `groups` are those composed, `options` the yaml files of the typed ones, `every` the keys of all
    run modes. What `schema`, the run mode's config, does not have of them is left out: the former
    run mode had it, and another one is typed.
    """
    heads = {key.partition(".")[0] for key in every}
    gone = heads - {field.name for field in fields(schema)}
    again = {**groups, **{key: value for key, value in raw.items() if key not in gone}}
    for key in leaves(schema):
        section, _, name = key.rpartition(".")
        former = at(again, section) if section and not section.startswith("model") else None
        if isinstance(former, Mapping) and name not in former:  # the run is older than the key
            put_at(again, key, at(groups, key))
    for option in options:
        for key in leaves(schema):
            section, _, name = key.rpartition(".")
            given = at(option, section) if section else option
            if isinstance(given, Mapping) and name in given:
                put_at(again, key, at(groups, key))
    return again


def _absolute(value: str, there: bool = False) -> str:
    """A path from the root; what is to be `there` and is not may be no path, but the name of a
    source."""
    if "://" in value:
        return value
    try:
        path = Path(value).expanduser()
        return str(path.absolute()) if not there or path.exists() else value
    except (OSError, RuntimeError, ValueError):  # too long, ~name of nobody, a NUL
        return value
