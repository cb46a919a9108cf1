"""The texts of --help, made from conf/ itself, of --cfg, of --info and of shell completion."""

from __future__ import annotations

import itertools
import platform
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import yaml

from lite_runner import __version__
from lite_runner.config import at, did_you_mean, nearest, put_at, raise_errors
from lite_runner.config.argv import CommandLine, ConfigFile
from lite_runner.config.compose import Schemas, compose_line, user_folders
from lite_runner.config.groups import (
    GROUPS,
    conf_dir,
    keys_by_run_mode,
    option_files,
    options_named_in,
    options_of,
    own_groups,
)
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.secret import KEY, hidden
from lite_runner.system.yaml_file import dump_yaml, read_yaml

_USAGE = """\
Run an LLM job on MindSpore.

usage: run_lite.py [key=value ...] [flags]

  run_lite.py run_mode=predict model=smollm2_135m predict_data='The capital of France is'
  run_lite.py model=llama2_7b load_checkpoint=/models/llama2 predict_data=prompts.txt
  run_lite.py model=auto load_checkpoint=/models/folder predict_data=- < prompt.txt
  run_lite.py model=tiny_llama predict_data=hi temperature=0.7 seed=1,2,3 -m
  run_lite.py run_mode=convert model=bloom_560m convert_format=ckpt convert_output=bloom.ckpt
  run_lite.py run_mode=quantize model=smollm2_135m quant=a16w8 quantize_output=smollm2_a16w8
  run_lite.py run_mode=eval model=smollm2_135m eval_data=text.txt
  run_lite.py verify outputs/latest
  run_lite.py schema > lite-runner.schema.json
  run_lite.py --config FILE --run_mode predict --load_checkpoint X --predict_data 'Hi'
"""
_FLAGS = """\
Flags
  -h, --help [RUN_MODE]            this text; of a run mode all keys, those of sections too
  --version                        the version
  -c, --cfg job|hydra|all|schema   print the composed config and stop; hydra: its search path;
                                   schema: the JSON schema of a yaml, for editors
  -i, --info                       versions, folders, files and options that a run is composed of
  -cd, --config-dir DIR            more models and options: DIR/model/NAME.yaml, ...
  -cn, --config-name NAME          --config DIR/NAME.yaml, of --config-path DIR or --config-dir
  -m, --multirun                   run every combination of seed=1,2 'model=glob(tiny_*)';
                                   hydra/launcher=joblib: several at a time
  -sc, --shell-completion ACTION   eval "$(python run_lite.py -sc install=bash)"

Flags of run_mindformer.py, each as --key value
  --config FILE (a yaml of MindFormers, or your own; several are laid over one another)
  --run_mode  --predict_data TEXT ...  --load_checkpoint  --use_parallel  --device_target
  --device_id  --mode  --seed  --output_dir  --predict_batch_size
  --do_sample  --options key=value ...  --section.key value
"""
_COMMENT = re.compile(r"[ \t]+# (.*)")
_WIDTH, _MEANING = 98, 35  # columns of a line, and column of meanings


@dataclass(frozen=True)
class Key:
    """A key as conf/ lists it."""

    name: str  # dotted
    default: str  # as in yaml
    meaning: str  # its comment; "" for a size of a model


def keys_in(path: Path) -> list[Key]:
    """The keys of a yaml of conf/, those of sections too."""
    text = path.read_text(encoding="utf-8")
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    return list(_keys(root, text, ""))


def key_tables(
    mode: str,
    schemas: Schemas,
    choices: Mapping[str, str] | None = None,
    folders: Sequence[Path] = (),
) -> dict[str, list[Key]]:
    """All keys of a run mode by title: its own, those it shares, the common ones, the groups'.

    `choices`: options of the other groups, the defaults of conf/ where there are none.
    """
    config = schemas.config_of(mode)
    own, *shared = option_files("run_mode", mode, folders)
    chosen = (
        options_named_in(conf_dir() / "config.yaml") | options_named_in(own) | dict(choices or {})
    )
    groups = ["parallel"] * config.takes_parallel + ["ge"] * (
        "infer" in {field.name for field in fields(config)}
    )
    files = {f"Keys of run_mode={mode}": [own]}
    files |= {_title(path): [path] for path in shared}
    files["Keys of every run mode"] = [conf_dir() / "config.yaml"]
    for group in (*groups, "model"):
        title = f"Keys of the group {group}, here of {group}={chosen[group]}"
        files[title] = [*option_files(group, chosen[group], folders)]
    tables: dict[str, list[Key]] = {}
    seen = {"run_mode"}
    for title, paths in files.items():
        found = {key.name: key for path in reversed(paths) for key in keys_in(path)}
        tables[title] = [key for name, key in found.items() if name not in seen]
        seen |= found.keys()
    return {title: keys for title, keys in tables.items() if keys}


def help_text(line: CommandLine, schemas: Schemas) -> str:
    """The text of --help: of the run mode that the line names, else of all. Raises ConfigError."""
    folders = user_folders(line, ConfigFile())
    if mode := _topic(line, options_of("run_mode", folders)):
        return _mode_help(mode, line, schemas, folders)
    lines = [_USAGE, "Groups (group=option; the first line of conf/GROUP/OPTION.yaml says more)"]
    for group in GROUPS:
        options = ", ".join(options_of(group, folders))
        lines.append(_wrapped(f"  {group:<10}", options))
    for group in own_groups(folders):
        lines.append(_wrapped(f"  +{group:<8} ", ", ".join(options_of(group, folders))))
    lines += ["", "Keys of every run mode (key=value; --help RUN_MODE lists all of a run mode)"]
    lines += _rows(_top_level(conf_dir() / "config.yaml"))
    by_mode = keys_by_run_mode(folders)
    for path in sorted((conf_dir() / "keys").glob("*.yaml")):
        modes = [mode for mode, keys in by_mode.items() if _names(path) <= keys]
        if own := [*_rows(_top_level(path))]:
            lines += ["", f"{_title(path)} (run_mode={', '.join(modes)})", *own]
    for mode in by_mode:
        path = conf_dir() / f"run_mode/{mode}.yaml"
        if path.is_file() and (own := [*_rows(_top_level(path))]):
            lines += ["", f"Keys of run_mode={mode}", *own]
    return "\n".join([*lines, "", _FLAGS])


def _topic(line: CommandLine, modes: Sequence[str]) -> str:
    """The run mode that --help is about; "" for none. Raises ConfigError for a word after --help
    that is none."""
    if line.topic and line.topic not in modes:
        near = did_you_mean(nearest(line.topic, modes))
        raise ConfigError(f"--help {line.topic}: expected one of {', '.join(modes)}{near}")
    typed = [str(s.value) for s in line.settings if s.key == "run_mode"]
    named = [word for word in (*line.bare, *typed, line.topic) if word in modes]
    return named[-1] if named else ""


def _mode_help(mode: str, line: CommandLine, schemas: Schemas, folders: Sequence[Path]) -> str:
    path = next(option_files("run_mode", mode, folders))
    typed = {s.key: str(s.value) for s in line.settings if s.key in GROUPS and not s.prefix}
    choices = {key: name for key, name in typed.items() if name in options_of(key, folders)}
    lines = [
        _title(path),
        "",
        f"usage: run_lite.py run_mode={mode} [group=option ...] [key=value ...]",
    ]
    for title, keys in key_tables(mode, schemas, choices, folders).items():
        lines += ["", title, *_rows(keys)]
    return "\n".join([*lines, "", "--help lists the options of the groups, and the flags"])


def config_text(line: CommandLine, schemas: Schemas) -> str:
    """The composed config as yaml, as --cfg prints it, without secrets. Raises ConfigError."""
    composed = compose_line(line, schemas)
    raise_errors(composed.errors)
    if isinstance(key := at(composed.raw, KEY), str):
        put_at(composed.raw, KEY, hidden(key))
    shown = {} if line.shown == "hydra" else composed.raw
    if line.shown != "job":
        shown["hydra"] = {"searchpath": [str(folder) for folder in composed.folders]}
    return dump_yaml(shown)


def info_text(line: CommandLine, schemas: Schemas) -> str:
    """Versions, and what a run is composed of: folders, files and options. Raises ConfigError."""
    composed = compose_line(line, schemas)
    raise_errors(composed.errors)
    options = options_named_in(conf_dir() / "config.yaml") | composed.choices
    rows = [
        ("lite-runner", __version__),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        *((name, _version(name)) for name in ("mindspore", "numpy", "hydra-core")),
        *(("config folder", str(folder)) for folder in (conf_dir(), *composed.folders)),
        *(("config file", file) for file in line.config_files),
        *(("option", f"{group}={name}") for group, name in options.items()),
        *(("option", f"+{group}={name}") for group, name in composed.own.items()),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _wrapped(head: str, text: str) -> str:
    indent = " " * len(head)
    return textwrap.fill(
        text, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )


def _keys(section: yaml.MappingNode, text: str, prefix: str) -> Iterator[Key]:
    for name, value in section.value:
        key, end = f"{prefix}{name.value}", value.end_mark.index
        if key in ("defaults", "hydra"):
            continue
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _keys(value, text, f"{key}.")
        else:
            comment = _COMMENT.match(text, end)
            default = text[value.start_mark.index : end]
            yield Key(key, default, comment[1] if comment else "")


def _rows(keys: Iterable[Key]) -> Iterator[str]:
    """Each key with its meaning beside it, or below where the key is long."""
    for key in keys:
        head = f"  {key.name}={key.default}"
        if key.meaning and len(head) < _MEANING:
            yield _wrapped(f"{head:<{_MEANING}}", key.meaning)
        else:
            yield head
            if key.meaning:
                yield _wrapped(" " * _MEANING, key.meaning)


def _top_level(path: Path) -> list[Key]:
    return [key for key in keys_in(path) if "." not in key.name and key.meaning]


def _title(path: Path) -> str:
    """The first comment of a yaml, as its title."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line[2:] for line in head if "@package" not in line).rstrip(".")


def _names(path: Path) -> set[str]:
    """The keys of a yaml that are not sections."""
    raw = read_yaml(path)
    return {key for key, value in raw.items() if key != "defaults" and not isinstance(value, dict)}


def complete(args: list[str]) -> None:
    """Print Hydra's shell completion, which reads conf/ by itself."""
    import hydra

    sys.argv = [sys.argv[0], *args]
    folder = str(conf_dir())
    hydra.main(version_base="1.3", config_path=folder, config_name="config")(lambda _: None)()
