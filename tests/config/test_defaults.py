"""conf/ and the dataclasses are one to one: every key has one default, a comment and a type."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from lite_runner.architectures import ModelSettings
from lite_runner.architectures.settings import LearnedKeySettings, PetLoraSettings
from lite_runner.architectures.spec import RopeScaling
from lite_runner.config import free_mapping, hints_of, leaves
from lite_runner.config import schema as options
from lite_runner.config.generation import StructuredOptions
from lite_runner.config.groups import GROUPS, compose_groups, conf_dir, files_of, options_of
from lite_runner.config.schema import ComputeOptions, ExportedOptions, RunConfig
from lite_runner.config.sections import ComputeSettings, ExportSettings
from lite_runner.system.yaml_file import read_yaml
from tests.each import each
from tests.paths import ROOT

CONF = conf_dir()
RUN_MODES = options_of("run_mode")
KEYS = sorted(path.stem for path in (CONF / "keys").glob("*.yaml"))
MOST_COMMON_KEYS = 25
# Fields that only some models set: their defaults stand in the dataclasses.
OF_SOME_MODELS = {
    f"model.model_config.{field.name}"
    for section in get_args(ModelSettings)[1]
    for field in dataclasses.fields(section)
    if field.default is not dataclasses.MISSING and field.name != "type"
} | {
    f"model.model_config.{section}.{field.name}"
    for section, settings in (
        ("pet_config", PetLoraSettings),
        ("pet_config", LearnedKeySettings),
        ("rope_scaling", RopeScaling),
    )
    for field in dataclasses.fields(settings)
}
# The header of an option's yaml says what it means.
IN_HEADER = ("run_mode", "backend")
COMMENTED = [CONF / "config.yaml", CONF / "model_base.yaml"] + [
    path
    for folder in ("keys", "run_mode", "parallel", "ge", "backend")
    for path in sorted((CONF / folder).glob("*.yaml"))
]


def test_few_keys_are_common_to_all_run_modes() -> None:
    assert len(names(RunConfig)) <= MOST_COMMON_KEYS


def test_a_run_mode_is_a_module_and_a_yaml() -> None:
    modules = (ROOT / "lite_runner/run_modes").glob("[!_]*.py")
    assert sorted(path.stem for path in modules) == RUN_MODES


@each("name", RUN_MODES)
def test_a_run_mode_has_its_config_and_three_functions(name: str) -> None:
    module = import_module(f"lite_runner.run_modes.{name}")
    assert issubclass(module.Config, RunConfig)
    assert all(callable(getattr(module, function)) for function in ("errors", "plan", "run"))


def test_settings_of_backends_are_read_from_configs() -> None:
    """By name: a misspelled one with a default would be that default, whatever was typed."""
    for group, settings in ((ComputeOptions, ComputeSettings), (ExportedOptions, ExportSettings)):
        computing = [one for one in map(config_of, RUN_MODES) if issubclass(one, group)]
        for field in dataclasses.fields(settings):
            found = [field.name in names(one) or hasattr(one, field.name) for one in computing]
            defaults = field.default is not dataclasses.MISSING
            assert any(found) if defaults else all(found), field.name


@each("name", RUN_MODES)
def test_the_yaml_of_a_run_mode_mirrors_its_config(name: str) -> None:
    path, config = CONF / f"run_mode/{name}.yaml", config_of(name)
    assert read_yaml(path)["run_mode"] == name
    shared = {one for stem in KEYS if issubclass(config, one := group_class(stem))}
    assert {group_class(stem) for stem in built_on(path)} == shared
    inherited = names(RunConfig).union(*map(names, shared))
    assert own_keys(path) == names(config) - inherited


@each("stem", KEYS)
def test_a_file_of_keys_mirrors_its_group(stem: str) -> None:
    path, group = CONF / f"keys/{stem}.yaml", group_class(stem)
    above = {one for other in KEYS if issubclass(group, one := group_class(other))} - {group}
    assert {group_class(other) for other in built_on(path)} == above
    assert own_keys(path) == names(group) - names(RunConfig).union(*map(names, above))


def test_every_group_has_a_file_of_keys() -> None:
    classes = {
        one
        for one in vars(options).values()
        if isinstance(one, type) and issubclass(one, RunConfig) and one is not RunConfig
    } | {StructuredOptions}
    assert {group_class(stem) for stem in KEYS} == classes


@each("mode", RUN_MODES)
def test_every_key_of_a_run_has_one_default(mode: str) -> None:
    """With the options of config.yaml; for predict, with the other options of a group as well."""
    for chosen in choices(mode):
        found = Counter(key for raw in yamls(chosen) for key in dotted(raw))
        schema = leaves(config_of(mode), compose_groups(chosen))
        if not has_infer(mode):  # the group ge has no effect then
            found = Counter({key: n for key, n in found.items() if not key.startswith("infer.")})
        defaults = Counter[str]()
        for key, count in found.items():
            root = free_mapping(key, schema)
            assert key in schema or root is not None, f"{chosen}: {key}: no dataclass has it"
            assert count == 1 or root is not None, f"{chosen}: {key}: {count} defaults"
            defaults[root or key] += 1
        sections = {key[:i] for key in defaults for i, letter in enumerate(key) if letter == "."}
        missing = schema.keys() - defaults.keys() - sections - OF_SOME_MODELS
        assert not missing, f"{chosen}: no default in conf/: {sorted(missing)}"


def test_every_key_has_a_comment(subtests: pytest.Subtests) -> None:
    for path in COMMENTED:
        with subtests.test(path=path.relative_to(CONF)):
            text = path.read_text(encoding="utf-8")
            lines = ["", *text.splitlines()]
            root = yaml.compose(text)
            assert isinstance(root, yaml.MappingNode)
            bare = [
                key
                for key, line in values(root)
                if key not in IN_HEADER and not key.startswith("infer.ge_options.")
                if " # " not in lines[line] and not lines[line - 1].strip().startswith("# ")
            ]
            assert not bare, f"{path}: say what {', '.join(bare)} means"


def config_of(mode: str) -> type[RunConfig]:
    found: type[RunConfig] = import_module(f"lite_runner.run_modes.{mode}").Config
    return found


def has_infer(mode: str) -> bool:
    return "infer" in hints_of(config_of(mode))


def group_class(stem: str) -> type[RunConfig]:
    """The dataclass of a file of conf/keys, as SaveStrategyOptions of save_strategy.yaml."""
    classes = {name.lower(): value for name, value in vars(options).items()}
    names = [f"{name.replace('_', '')}options" for name in (stem, stem.removesuffix("s"))]
    found: type[RunConfig] = next(classes[name] for name in names if name in classes)
    return found


def names(section: type[RunConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(section)}


def own_keys(path: Path) -> set[str]:
    """The top-level keys of a yaml."""
    return read_yaml(path).keys() - {"defaults", "run_mode"}


def built_on(path: Path) -> set[str]:
    """The files of conf/keys that a yaml names in `defaults`, and those that they name."""
    entries = [entry for entry in read_yaml(path).get("defaults") or () if entry != "_self_"]
    # A mapping chooses the option of another group.
    direct = {entry.removeprefix("/keys/") for entry in entries if isinstance(entry, str)}
    return direct.union(*(built_on(CONF / f"keys/{stem}.yaml") for stem in direct))


def choices(mode: str) -> Iterator[dict[str, str]]:
    entries = [entry for entry in read_yaml(CONF / "config.yaml")["defaults"] if entry != "_self_"]
    usual = {group: name for entry in entries for group, name in entry.items()} | {"run_mode": mode}
    assert set(usual) == set(GROUPS)
    yield usual
    if mode == "predict":
        for group in usual.keys() - {"run_mode"}:
            # Of the options with the same keys, one: there are many models, of a few kinds.
            kinds = {frozenset(keys_of(group, option)): option for option in options_of(group)}
            yield from (usual | {group: option} for option in kinds.values())


def keys_of(group: str, option: str) -> Iterator[str]:
    return (key for raw in files_of(group, option, ()) for key in dotted(raw))


def yamls(chosen: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """config.yaml and the files of the options; one that two of them name counts once."""
    seen: list[dict[str, Any]] = [read_yaml(CONF / "config.yaml")]
    for group, option in chosen.items():
        seen += [raw for raw in files_of(group, option, ()) if raw not in seen]
    for raw in seen:
        yield {key: value for key, value in raw.items() if key not in ("defaults", "hydra")}


def dotted(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def values(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Every key that is no section, and its line."""
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode):
            if name != "hydra":
                yield from values(value, f"{name}.")
        elif name != "defaults":
            yield name, key.start_mark.line + 1
