"""The config groups: conf/, the user's own folders, and their composition by Hydra."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lite_runner import __version__
from lite_runner.config import at, show
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.system.files import parse_json, user_path
from lite_runner.system.user_cache import remembered
from lite_runner.system.yaml_file import read_yaml

GROUPS = ("model", "parallel", "ge", "run_mode", "backend")
DOWNLOADS = "checkpoint_download"  # MindFormers', in the current folder
WEIGHTS = (".ckpt", ".safetensors", ".gguf", ".bin")
# Owners and repositories of Hugging Face that have another name on ModelScope; all others are the
# same on both.
_OWNERS_ON_MODELSCOPE = {
    **dict.fromkeys(("google", "meta-llama", "microsoft"), "LLM-Research"),
    "mistralai": "AI-ModelScope",
    "zai-org": "ZhipuAI",
}
_ON_MODELSCOPE = {
    "meta-llama/Llama-2-7b-hf": "modelscope/Llama-2-7b-ms",
    "meta-llama/Llama-2-13b-hf": "modelscope/Llama-2-13b-ms",
    "meta-llama/Llama-2-70b-hf": "modelscope/Llama-2-70b-ms",
    "meta-llama/Llama-3.1-8B-Instruct": "LLM-Research/Meta-Llama-3.1-8B-Instruct",
}
_VARIABLE = re.compile(rb"oc\.env:(\w+)")


def conf_dir() -> Path:
    """The folder conf/: beside run_lite.py in a checkout, in the package where installed."""
    return _conf_of(__file__)


@cache
def _conf_of(module: str) -> Path:
    package = Path(module).resolve().parent.parent
    beside = package.parent
    # Beside an installed package, a folder conf/ may be unrelated.
    checkout = (beside / "run_lite.py").is_file() and not (package / "conf").is_dir()
    folder = (beside if checkout else package) / "conf"
    if not (folder / "config.yaml").is_file():
        raise EnvironmentFault(
            f"{folder / 'config.yaml'} is missing",
            "install it again: pip install . (in the folder of run_lite.py)",
        )
    return folder


def user_folder(entry: str) -> Path:
    """The folder that --config-dir or an entry of hydra.searchpath names: a path, `file://PATH` or
    `pkg://PACKAGE.FOLDER`. Raises ConfigError where there is none, or no group in it."""
    path = (
        _of_package(entry[6:])
        if entry.startswith("pkg://")
        else Path(entry.removeprefix("file://"))
    )
    folder = user_path(str(path), entry).absolute()
    if not folder.is_dir():
        raise ConfigError(f"{entry}: no such folder of config groups")
    if not any((folder / group).is_dir() for group in GROUPS) and not own_groups([folder]):
        raise ConfigError(
            f"{entry}: holds no config group; expected a folder {', '.join(GROUPS[:-1])} or"
            f" {GROUPS[-1]} in it, or one of your own, such as experiment, with yaml files"
        )
    return folder


def _of_package(name: str) -> Path:
    """The folder of an installed package, which is not imported for it."""
    first, *below = name.split(".")
    try:
        spec = importlib.util.find_spec(first) if first else None
    except ValueError:  # a module without one, such as __main__
        spec = None
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places:
        raise ConfigError(f"pkg://{name}: no package {first} is installed in this Python")
    return Path(places[0], *below)


def own_groups(folders: Iterable[Path]) -> list[str]:
    """The user's own groups, for +GROUP=OPTION: folders of yaml files beside ours."""
    ours = {*GROUPS, "keys", "model_family"}
    found = {path.parent.name for folder in folders for path in folder.glob("*/*.yaml")}
    return sorted(found - ours)


def options_of(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """The options of a group; models of a family from small to large."""
    names = {
        entry.name.removesuffix(".yaml")
        for folder in (conf_dir(), *folders)
        for entry in _entries(folder / group)
        if entry.name.endswith(".yaml")
    }
    return sorted(names, key=_order)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """The entries of a folder, unordered; none if the folder is missing."""
    try:
        return list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def exists(path: str) -> bool:
    """True if a file or folder exists; never raises, whatever the text."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return False


def twice_defined(group: str, option: str, folders: Sequence[Path]) -> list[Path]:
    """The files of an option that several folders define; none if it is unambiguous."""
    every = (folder / group / f"{option}.yaml" for folder in dict.fromkeys((conf_dir(), *folders)))
    found = [path for path in every if path.is_file()]
    return found if len(found) > 1 else []


def option_files(
    group: str, option: str, folders: Sequence[Path] = (), above: tuple[Path, ...] = ()
) -> Iterator[Path]:
    """The file of an option, and those that it names in `defaults` to build on; `above`: those that
    build on it. Raises ConfigError."""
    for folder in (conf_dir(), *folders):
        path = folder / group / f"{option}.yaml"
        if not path.is_file():
            continue
        if path in above:
            raise ConfigError(f"{path}: its defaults lead back to itself")
        defaults = _defaults(path)
        yield path
        for entry in defaults:
            # Mappings are options of other groups.
            if isinstance(entry, str) and entry != "_self_":
                place = entry if entry.startswith("/") else f"/{group}/{entry}"
                below, _, name = place[1:].rpartition("/")
                yield from option_files(below, name, folders, (*above, path))


def _defaults(path: Path) -> list[Any]:
    """The list `defaults` of a yaml; empty without one. Raises ConfigError."""
    found = read_yaml(path).get("defaults")
    if found is not None and not isinstance(found, list):
        raise ConfigError(f"{path}: defaults: got {show(found)}, expected a list of options")
    return found or []


def files_of(group: str, option: str, folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The contents of the files of `option_files`."""
    return map(read_yaml, option_files(group, option, folders))


def values_of(group: str, option: str, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """The values in the files of `option_files` by dotted key."""
    found: dict[str, Any] = {}
    for raw in files_of(group, option, folders):
        found = dict(_dotted(raw)) | found  # the option overrides what it builds on
    found.pop("defaults", None)
    return found


def options_named_in(path: Path) -> dict[str, str]:
    """The options of groups that a yaml chooses in its `defaults`."""
    return {
        str(group).removeprefix("override ").lstrip("/"): str(name)
        for entry in _defaults(path)
        if isinstance(entry, dict)
        for group, name in entry.items()
    }


def own_source(model: str) -> str:
    """The source of the published weights of a model of conf/model; "" for none."""
    file = conf_dir() / "model" / f"{model}.yaml"
    if not file.is_file():
        return ""
    named = at(read_yaml(file), "model.model_config.checkpoint_name_or_path")
    return from_chosen_hub(str(named or ""))


def name_of(source: str) -> str:
    """The last part of a checkpoint's path or source, in letters of `trainer.model_name`."""
    if "://" in source and not source.startswith("pypi://"):
        source = source.partition("@")[0]  # without the revision
    name = source.rstrip("/").rpartition("/")[2]
    for suffix in (".gguf", ".safetensors", ".ckpt"):
        name = name.removesuffix(suffix)
    name = re.sub(r"-\d{5}-of-\d{5}$", "", name)  # of a split GGUF
    name = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII).lstrip(".-")
    return "auto" if name in ("", "random") else name


def from_chosen_hub(source: str) -> str:
    """A model's own source, on the hub that LITE_RUNNER_SOURCE names. Raises ConfigError."""
    chosen = os.environ.get("LITE_RUNNER_SOURCE", "").strip() or "huggingface"
    if chosen not in ("huggingface", "modelscope"):
        raise ConfigError(
            f"LITE_RUNNER_SOURCE: got {chosen!r}, expected huggingface or modelscope",
            "unset LITE_RUNNER_SOURCE, or name the model's source: load_checkpoint=ms://OWNER/NAME",
        )
    if chosen == "huggingface" or not source.startswith("hf://"):
        return source
    owner, _, name = source.removeprefix("hf://").partition("/")
    if found := _ON_MODELSCOPE.get(f"{owner}/{name}"):
        return f"ms://{found}"
    return f"ms://{_OWNERS_ON_MODELSCOPE.get(owner, owner)}/{name}"


def download_folders(model: str) -> tuple[Path, ...]:
    """MindFormers' folders of a model's files: of its name, and of its family's
    (llama2 of llama2_7b)."""
    return tuple(Path(DOWNLOADS) / one for one in dict.fromkeys((model, model.partition("_")[0])))


def downloaded_weights(model: str) -> Path | None:
    """The checkpoint of a model in checkpoint_download/: a file of its name, or the folder of its
    name if that holds any weights."""
    for folder in download_folders(model):
        files = (folder / f"{model}{suffix}" for suffix in WEIGHTS)
        if found := next((file for file in files if file.is_file()), None):
            return found
    folder = Path(DOWNLOADS) / model
    holds = folder.is_dir() and any(path.suffix in WEIGHTS for path in folder.iterdir())
    return folder if holds else None


@cache
def _order(name: str) -> tuple[str, float]:
    size = re.fullmatch(r"(.+)_([\d.]+)([mb])", name)
    if size is None:
        return name, 0.0
    return size[1], float(size[2]) * (1.0 if size[3] == "b" else 0.001)


def compose_groups(choices: Mapping[str, str], folders: Iterable[Path] = ()) -> dict[str, Any]:
    """conf/ and `folders` with these options, resolved to plain data. ConfigError for a broken
    yaml."""
    conf, others = conf_dir(), tuple(folders)
    if others:  # changes in a user's folder, which may hold anything, are not looked for
        return _composed(conf, others, choices)
    plain: dict[str, Any] = parse_json(_text_of(conf, tuple(sorted(choices.items())), _state(conf)))
    return plain


@lru_cache(maxsize=64)
def _text_of(conf: Path, choices: tuple[tuple[str, str], ...], state: str) -> str:
    """Hydra's composition of conf/ in this state, as JSON; read once per process."""
    name = " ".join((str(conf), *_overrides(dict(choices))))
    return json.dumps(remembered(name, state, lambda: _composed(conf, (), dict(choices))))


def graphs_of_model(model: str, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """The section `infer` in the yaml of a model: where its exported graphs are."""
    for raw in files_of("model", model, folders):
        if isinstance(section := raw.get("infer"), dict):
            return section
    return {}


def _overrides(choices: Mapping[str, str]) -> list[str]:
    return [f"{group}={name}" for group, name in choices.items()]


def _composed(conf: Path, others: Sequence[Path], choices: Mapping[str, str]) -> dict[str, Any]:
    """Composition by Hydra, which takes a third of a second with its import.

    Without the settings of Hydra's own command line, a quarter of the files: `compose` leaves them
    out of what it returns.
    """
    from hydra import compose, initialize_config_dir
    from hydra.conf import HydraConf
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    hydras = [item for entry in HydraConf().defaults for item in entry.items()]
    overrides = [*_overrides(choices), *(f"~hydra/{group}" for group, name in hydras if name)]
    if others:
        listed = ",".join(_quoted(f"file://{folder}") for folder in others)
        overrides.append(f"hydra.searchpath=[{listed}]")
    try:
        with initialize_config_dir(config_dir=str(conf), version_base="1.3"):
            composed = compose("config", overrides)
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        where = " and ".join(map(str, (conf, *others)))
        raise ConfigError(f"the yaml files of {where} do not compose: {reason}") from None
    except RecursionError:
        where = " and ".join(map(str, others))
        raise ConfigError(
            f"the yaml files of {where} do not compose: a circle of defaults"
        ) from None
    assert isinstance(plain, dict)
    # Hydra composes the keys of the run mode after the model.
    offline = choices.get("backend") in ("auto", "mslite") or plain.get("run_mode") == "export"
    if offline and isinstance(infer := plain.get("infer"), dict):
        infer.update(graphs_of_model(choices.get("model", ""), others))
    return {str(key): value for key, value in plain.items()}


def _state(conf: Path) -> str:
    """A digest of the yaml files and of the environment variables that they name."""
    digest, variables = _content(tuple(sorted(_files(conf))))
    return f"{digest} {[os.environ.get(name) for name in variables]}"


def _files(folder: Path | str) -> Iterator[tuple[str, int, int]]:
    """Each file in a folder: its path, and the size and time that tell it from an earlier one."""
    for entry in _entries(folder):
        if entry.is_dir():
            yield from _files(entry.path)
        else:
            found = entry.stat()
            yield entry.path, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=1)
def _content(files: tuple[tuple[str, int, int], ...]) -> tuple[str, tuple[str, ...]]:
    """A digest of these `_files`, and the environment variables that they name."""
    whole, variables = hashlib.sha256(__version__.encode()), list[str]()
    for path, size, _ in files:
        content = Path(path).read_bytes()
        whole.update(f"{path} {size} ".encode() + content)
        variables += [name.decode() for name in _VARIABLE.findall(content)]
    return whole.hexdigest(), tuple(variables)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def keys_by_run_mode(folders: Sequence[Path] = ()) -> dict[str, frozenset[str]]:
    """The dotted keys that conf/ gives a default for with each run mode; those that every run has
    are left out. Nothing of a run mode is imported for it."""
    conf = conf_dir()
    if folders:
        found = _keys_by_run_mode(folders)
    else:
        found = remembered(f"{conf} keys", _state(conf), _keys_by_run_mode)
    return {mode: frozenset(keys) for mode, keys in found.items()}


def _keys_by_run_mode(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    ge = {key for option in options_of("ge") for key in values_of("ge", option, folders)}
    found = {}
    for option in options_of("run_mode", folders):
        keys = set(values_of("run_mode", option, folders))
        if any(key.startswith("infer.") for key in keys):
            keys |= ge
        found[option] = sorted(keys - {"run_mode"})
    return found


def _dotted(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
