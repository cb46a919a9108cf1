"""The texts of --help, made from conf/ itself, of --cfg, of --info and of shell completion."""

from __future__ import annotations

import platform
import re
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import yaml

from lite_runner import __version__
from lite_runner.config.argv import CommandLine
from lite_runner.config.choices import user_folders
from lite_runner.config.compose import compose_line
from lite_runner.config.composed import Schemas
from lite_runner.config.config_file import ConfigFile
from lite_runner.config.fields import raise_faults
from lite_runner.config.groups import GROUPS, conf_dir, keys_by_run_mode, options_of
from lite_runner.config.secret import KEY, hidden
from lite_runner.config.yaml_file import at, put_at, read_yaml

_USAGE = """\
Run an LLM job on MindSpore.

usage: run_lite.py [key=value ...] [flags]

  run_lite.py run_mode=predict model=smollm2_135m predict_data='The capital of France is'
  run_lite.py model=llama2_7b load_checkpoint=/models/llama2 predict_data=prompts.txt
  run_lite.py model=auto load_checkpoint=/models/folder predict_data=- < prompt.txt
  run_lite.py model=tiny_llama predict_data=hi do_sample=true temperature=0.7 seed=1,2,3 -m
  run_lite.py run_mode=convert model=bloom_560m convert_format=ckpt convert_output=bloom.ckpt
  run_lite.py run_mode=quantize model=smollm2_135m quant=a16w8 quantize_output=smollm2_a16w8
  run_lite.py run_mode=eval model=smollm2_135m eval_data=text.txt
  run_lite.py --config FILE --run_mode predict --load_checkpoint X --predict_data 'Hi'
"""
_FLAGS = """\
Flags
  -h, --help                       this text
  --version                        the version
  -c, --cfg job|hydra|all          print the composed config and stop; hydra: its search path
  -i, --info                       versions, folders, files and options that a run is composed of
  -cd, --config-dir DIR            more models and options: DIR/model/NAME.yaml, ...
  -m, --multirun                   run every combination of seed=1,2 'model=glob(tiny_*)'
  -sc, --shell-completion ACTION   eval "$(python run_lite.py -sc install=bash)"

Flags of run_mindformer.py, each as --key value
  --config FILE (a yaml of MindFormers, or your own; several are laid over one another)
  --run_mode  --predict_data TEXT ...  --load_checkpoint  --use_parallel  --device_target
  --device_id  --mode  --seed  --output_dir  --predict_batch_size
  --do_sample  --options key=value ...  --section.key value
"""
_KEY = re.compile(r"^(\w+): (.*?)  # (.*)$")


def help_text(line: CommandLine) -> str:
    """Usage, groups with their options, top-level keys with their comments, and flags."""
    folders = user_folders(line, ConfigFile())
    lines = [_USAGE, "Groups (group=option; the first line of conf/GROUP/OPTION.yaml says more)"]
    for group in GROUPS:
        options = ", ".join(options_of(group, folders))
        lines.append(_wrapped(f"  {group:<10}", options))
    lines += ["", "Keys (key=value; --cfg job shows all sections)"]
    lines += _keys(conf_dir() / "config.yaml")
    by_mode = keys_by_run_mode(folders)
    for path in sorted((conf_dir() / "keys").glob("*.yaml")):
        modes = [mode for mode, keys in by_mode.items() if _names(path) <= keys]
        if own := _keys(path):
            lines += ["", f"{_title(path)} (run_mode={', '.join(modes)})", *own]
    for mode in by_mode:
        if own := _keys(conf_dir() / f"run_mode/{mode}.yaml"):
            lines += ["", f"Keys of run_mode={mode}", *own]
    return "\n".join([*lines, "", _FLAGS])


def config_text(line: CommandLine, schemas: Schemas) -> str:
    """The composed config as yaml, as --cfg prints it, without secrets. Raises ConfigError."""
    composed = compose_line(line, schemas)
    raise_faults(composed.faults)
    if isinstance(key := at(composed.raw, KEY), str):
        put_at(composed.raw, KEY, hidden(key))
    shown = {} if line.shown == "hydra" else composed.raw
    if line.shown != "job":
        shown["hydra"] = {"searchpath": [str(folder) for folder in composed.folders]}
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def info_text(line: CommandLine, schemas: Schemas) -> str:
    """Versions, and what a run is composed of: folders, files and options. Raises ConfigError."""
    composed = compose_line(line, schemas)
    raise_faults(composed.faults)
    usual = [
        entry for entry in read_yaml(conf_dir() / "config.yaml")["defaults"] if entry != "_self_"
    ]
    options = {group: name for entry in usual for group, name in entry.items()} | composed.choices
    rows = [
        ("lite-runner", __version__),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        *((name, _version(name)) for name in ("mindspore", "numpy", "hydra-core")),
        *(("config folder", str(folder)) for folder in (conf_dir(), *composed.folders)),
        *(("config file", file) for file in line.config_files),
        *(("option", f"{group}={name}") for group, name in options.items()),
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
        text, 98, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )


def _keys(path: Path) -> list[str]:
    """The top-level keys of a yaml with their defaults and meanings."""
    found = map(_KEY.match, path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()
    rows = (match.groups() for match in found if match)
    return [f"  {name + '=' + default:<32} {meaning}" for name, default, meaning in rows]


def _title(path: Path) -> str:
    """What a yaml says of itself in its first comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("# ") and "@package" not in line)[2:-1]


def _names(path: Path) -> set[str]:
    """The keys of a yaml that are no sections."""
    raw = read_yaml(path)
    return {key for key, value in raw.items() if key != "defaults" and not isinstance(value, dict)}


def complete(args: list[str]) -> None:
    """Print Hydra's shell completion, which reads conf/ by itself."""
    import hydra

    sys.argv = [sys.argv[0], *args]
    folder = str(conf_dir())
    hydra.main(version_base="1.3", config_path=folder, config_name="config")(lambda _: None)()
