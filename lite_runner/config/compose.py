"""conf/ + file + command line -> one checked `RunConfig`, or one error with every fault.

Hydra composes the groups. The settings are laid over its result here, each checked against
the dataclasses: no key is ever added, and no text is interpolated.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.checks import run_faults
from lite_runner.config.fields import (
    Fault,
    accepts,
    annotation_of,
    describe,
    free_mapping,
    is_name,
    leaves,
    read,
    show,
)
from lite_runner.config.ge import ge_notes
from lite_runner.config.grammar import value_of
from lite_runner.config.lengths import typed_faults
from lite_runner.config.mindformers import arch_of, base_model, listed, translate
from lite_runner.config.mindformers_keys import IGNORED, is_only_mindformers
from lite_runner.config.model_dir import with_model
from lite_runner.config.repeat import is_of_a_run, run_again
from lite_runner.config.schema import RunConfig
from lite_runner.config.suggest import did_you_mean, nearest, nearest_key
from lite_runner.config.yaml_file import at, put, read_yaml
from lite_runner.errors import ConfigError, EnvironmentFault

GROUPS = ("model", "parallel", "ge", "run_mode", "backend")
_TRAINING = ("train", "finetune")  # run modes of run_mindformer
# Keys of a file that are for exported models only.
OFFLINE_ONLY = ("infer.", "model.model_config.is_sample_acceleration")
# Where run_mindformer's run_mode=export puts the graphs.
MINDFORMERS_EXPORT = {
    "prefill_model_path": "mindir_full_checkpoint",
    "increment_model_path": "mindir_inc_checkpoint",
}
_HELP = "run_lite.py --help lists the groups and keys"


def conf_dir() -> Path:
    """The folder conf/: beside run_lite.py in a checkout, in the package where installed."""
    package = Path(__file__).resolve().parent.parent
    beside = package.parent
    # Elsewhere a folder conf/ beside the package may be anybody's.
    folder = beside / "conf" if (beside / "run_lite.py").is_file() else package / "conf"
    if not (folder / "config.yaml").is_file():
        raise EnvironmentFault(
            f"{folder / 'config.yaml'} is missing", "install lite-runner again: pip install ."
        )
    return folder


def options_of(group: str) -> list[str]:
    """The options of a group; models of a family from small to large."""
    return sorted((path.stem for path in (conf_dir() / group).glob("*.yaml")), key=_order)


def own_source(model: str) -> str:
    """Where the weights of a model of conf/model are published; "" for another, or for none."""
    file = conf_dir() / "model" / f"{model}.yaml"
    if not file.is_file():
        return ""
    return str(at(read_yaml(file), "model.model_config.checkpoint_name_or_path") or "")


def _order(name: str) -> tuple[str, float]:
    size = re.fullmatch(r"(.+)_([\d.]+)([mb])", name)
    if size is None:
        return name, 0.0
    return size[1], float(size[2]) * (1.0 if size[3] == "b" else 0.001)


def heads() -> list[str]:
    """The first parts of every key a user may write: groups, our keys, MindFormers'."""
    known = (*GROUPS, *leaves(RunConfig), *IGNORED)
    return sorted({key.partition(".")[0] for key in known})


def compose_groups(choices: Mapping[str, str]) -> dict[str, Any]:
    """conf/ with these options, resolved to plain data. ConfigError for a broken yaml."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    folder = conf_dir()
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            composed = compose("config", [f"{group}={name}" for group, name in choices.items()])
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the yaml files of {folder} do not compose: {reason}") from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@dataclass
class Composed:
    """Plain data of one run, and what is wrong with it so far."""

    raw: dict[str, Any]
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fail(self, key: str, text: str) -> None:
        self.faults.append(Fault((key,), text))


def resolve(line: CommandLine) -> tuple[RunConfig, list[str]]:
    """The run that a command line asks for, and notes for the user.

    Raises ConfigError with all that is wrong: keys, types, ranges, and what does not go together.
    """
    composed = compose_line(line)
    checked: list[Fault] = []
    config = read(composed.raw, RunConfig, "", checked)
    faulty = {key for fault in composed.faults for key in fault.keys}
    # A fault that follows from another one would only distract.
    faults = composed.faults + [f for f in checked if not faulty.intersection(f.keys)]
    if config is not None:
        typed = {setting.key for setting in line.settings}
        found = [*run_faults(config), *typed_faults(config, typed)]
        faults += [f for f in found if not faulty.intersection(f.keys)]
    raise_faults(faults)
    assert config is not None
    return config, [*composed.notes, *ge_notes(config)]


def raise_faults(faults: Sequence[Fault]) -> None:
    """All `faults` as one ConfigError; nothing where there are none."""
    if faults:
        error = ConfigError.of(list(dict.fromkeys(fault.text for fault in faults)))
        error.hint = _HELP
        raise error


def compose_line(line: CommandLine) -> Composed:
    """Groups, file and settings in one; faults of keys and values are collected, not raised."""
    early = [Fault((), text) for text in line.faults]
    file: dict[str, Any] = dict(line.config or {})
    if line.config_file is not None:
        try:
            file = read_yaml(Path(line.config_file))
        except ConfigError as error:
            early.append(Fault(("model", "predict_data"), error.message))
    line, file = with_model(line, file)
    foreign = [s for s in line.settings if s.flag and is_only_mindformers(s.key)]
    for setting in foreign:
        put(file, setting.key, str(setting.value))
    choices = _choices(line.settings, file, early)
    composed = Composed(compose_groups(choices), early)
    if file:
        named = any(setting.key == "model" for setting in line.settings)
        _lay_file(composed, line, file, model_is_chosen=named)
    for setting in line.settings:
        if setting not in foreign and (setting.key not in GROUPS or setting.prefix):
            _lay(composed, setting)
    _name_weights(composed)
    if _is_mindformers_export(composed, line, file):
        _lay_mindformers_export(composed, line, file)
    return composed


def _name_weights(composed: Composed) -> None:
    """A model's name as load_checkpoint, MindFormers' way to say: its usual weights."""
    name = composed.raw.get("load_checkpoint")
    if name in options_of("model") and not Path(name).exists():
        settings = _section(compose_groups({"model": name}), "model.model_config")
        composed.raw["load_checkpoint"] = settings["checkpoint_name_or_path"]


def _is_mindformers_export(composed: Composed, line: CommandLine, file: Mapping[str, Any]) -> bool:
    """Whether a yaml is exported as run_mindformer does it, with nothing of ours said besides."""
    raw = composed.raw
    ours = (
        *("export_output", "quant", "infer.prefill_model_path", "infer.increment_model_path"),
        *("infer.model_dir", "infer.enc_key", "export.weight_fp16"),
    )
    free: dict[str, tuple[str | None, ...]] = {
        "engine": ("auto",),
        "export.layout": ("auto",),
        "export.target": ("auto", "Ascend"),
        "infer.model_type": (None, "mindir"),
    }
    asked = file.get("run_mode") == "export" or any(
        setting.flag and setting.key == "run_mode" for setting in line.settings
    )
    return (
        line.config_file is not None
        and not is_of_a_run(file)
        and asked
        and raw.get("run_mode") == "export"
        and not any(at(raw, key) for key in ours)
        and all(at(raw, key) in values for key, values in free.items())
    )


def _lay_mindformers_export(composed: Composed, line: CommandLine, file: Mapping[str, Any]) -> None:
    """Its places: a folder for each graph of a pair in output_dir, written over."""
    typed = {setting.key for setting in line.settings}
    output = composed.raw["output_dir"] if "output_dir" in {*typed, *file} else "./output"
    for key, folder in MINDFORMERS_EXPORT.items():
        composed.raw["infer"][key] = f"{output}/{folder}/rank_0"
    if "overwrite" not in typed:
        composed.raw["overwrite"] = True


def _choices(
    settings: Sequence[Setting], file: Mapping[str, Any], faults: list[Fault]
) -> dict[str, str]:
    """The option of each group that is named on the command line or in the file."""
    asked: dict[str, tuple[str, str]] = {}
    base = base_model(file, options_of("model"))
    if arch_of(file) is None and any(s.key == "pretrained_model_dir" for s in settings):
        base = "auto"
    if base:
        asked["model"] = (base, "")
    for group in ("run_mode", "backend"):
        if group in file:
            asked[group] = (str(file[group]), f" (in the file; --{group} overrides it)")
    for setting in settings:
        if setting.key in GROUPS and not setting.prefix:
            value = setting.value if isinstance(setting.value, str) else " ".join(setting.value)
            asked[setting.key] = (value, "")
    choices = {}
    for group, (name, origin) in asked.items():
        options = options_of(group)
        if name in options:
            choices[group] = name
        else:
            near = nearest(name.replace("-", "_"), options, cutoff=0.5)
            text = f"{group}: got {show(name)}{origin}, expected one of {', '.join(options)}"
            if group == "run_mode" and name in _TRAINING:
                near, text = None, f"{text}: nothing is trained here, and predict runs the model"
            # Which options there are depends on the run mode: prompts are not asked for then.
            keys = (group, "predict_data") if group == "run_mode" else (group,)
            faults.append(Fault(keys, text + did_you_mean(near)))
            if near:  # so that the keys of the model that was meant are known
                choices[group] = near
    return choices


def _lay_file(
    composed: Composed, line: CommandLine, file: dict[str, Any], model_is_chosen: bool
) -> None:
    source = line.config_file or ("the flags" if line.config is None else "the config")
    where = f" (in {source})"
    arch = arch_of(file)
    chosen = at(composed.raw, "model.arch.type")
    if arch not in (None, chosen):
        text = f"model.arch.type: got {show(arch)}{where}, but the model chosen is {chosen}"
        composed.fail("model", text)
        return
    if is_of_a_run(file):
        composed.raw = run_again(file, composed.raw, _options_typed(line, composed))
        return
    use_parallel = file.get("use_parallel", composed.raw.get("use_parallel"))
    for setting in line.settings:
        if setting.key == "use_parallel" and isinstance(setting.value, str):
            use_parallel = setting.value.lower() != "false"
    models = options_of("model")
    named = at(file, "trainer.model_name") in models
    sized = model_is_chosen or named or arch is None
    every = leaves(RunConfig, composed.raw)
    # What only another run mode has is MindFormers' own here, and listed as such.
    known = {key for key in every if key not in IGNORED or key in composed.raw}
    result = translate(
        file,
        known,
        models,
        defaults=_section(composed.raw, "model.model_config"),
        use_parallel=bool(use_parallel),
        sized=sized,
    )
    for text in result.faults:
        composed.fail(text.partition(":")[0], text + where)
    typed = {setting.key for setting in line.settings}
    online = composed.raw.get("backend") == "ms" and composed.raw.get("run_mode") != "export"
    for key, value in result.assignments.items():
        if online and key.startswith(OFFLINE_ONLY):
            result.ignored.append(key)  # the documents' yamls have both kinds of a run in one
        elif key not in GROUPS and key not in typed:
            # MindFormers writes "none" of a path as an empty value.
            takes = every[key]
            empty = value is None and accepts(takes, str) and not accepts(takes, types.NoneType)
            _assign(composed, key, "" if empty else value, where)
    if result.ignored:
        composed.notes.append(f"what of {source} has no meaning here: {listed(result.ignored)}")


def _options_typed(line: CommandLine, composed: Composed) -> list[dict[str, Any]]:
    """The files of the groups' options that a command line names."""
    named = [(s.key, str(s.value)) for s in line.settings if s.key in GROUPS and not s.prefix]
    files = [conf_dir() / group / f"{option}.yaml" for group, option in named]
    return [read_yaml(file) for file in files if file.is_file()]


def _lay(composed: Composed, setting: Setting) -> None:
    key, prefix = setting.key, setting.prefix
    known = leaves(RunConfig, composed.raw)
    annotation = annotation_of(key, known)
    if key in GROUPS:
        composed.fail(key, f"{setting}: expected {key}=OPTION, without {prefix}")
    elif annotation is None:
        composed.fail(key, _unknown(composed, setting, list(known)))
    elif prefix == "~":
        composed.fail(key, f"{setting}: a key cannot be left out; {key}=null leaves it open")
    elif prefix == "+":
        composed.fail(key, f"{setting}: the key exists; leave out the +")
    elif isinstance(setting.value, list):
        _assign(composed, key, setting.value, "")
    else:
        try:
            value = value_of(setting.value, annotation)
        except ValueError as error:
            got = show(setting.value)
            composed.fail(key, f"{key}: got {got}, expected {describe(annotation)} ({error})")
        else:
            _assign(composed, key, value, "")


def _unknown(composed: Composed, setting: Setting, known: list[str]) -> str:
    key = setting.key
    everywhere = leaves(RunConfig)
    if key in everywhere:
        parent = key.rpartition(".")[0]
        kind = _section(composed.raw, parent).get("type", "null")
        return f"{setting}: {parent} is {kind} here and has no such key"
    if any(entry.startswith(f"{key}.") for entry in everywhere):
        return f"{setting}: a section; its keys are set one by one, as {key}.NAME=VALUE"
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return f"{setting}: Hydra's own settings are not used here"
    near = nearest_key(key, [*known, *GROUPS])
    flag = "--" if setting.flag else ""
    return f"{setting}: no such key{did_you_mean(near and flag + near)}"


def _section(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    section: Any = raw
    for name in key.split(".") if key else ():
        section = section.get(name) if isinstance(section, Mapping) else None
    return section if isinstance(section, dict) else {}


def _below(composed: Composed, root: str, key: str) -> dict[str, Any] | None:
    """The mapping that holds `key`, inside the free mapping `root`; made where there is none.

    None, and a fault, where the key cannot be there.
    """
    *parents, name = key[len(root) + 1 :].split(".")
    if not all(is_name(part) for part in (*parents, name)):
        composed.fail(key, f"{key}: expected names of letters, digits, _ and - between the dots")
        return None
    above, _, first = root.rpartition(".")
    section, at_key = _section(composed.raw, above), above
    for part in (first, *parents):
        at_key = f"{at_key}.{part}"
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            composed.fail(key, f"{key}: {at_key} has a value, {show(section)}, and is no section")
            return None
    if isinstance(section.get(name), dict):
        composed.fail(key, f"{key}: a section; its keys are set one by one, as {key}.NAME=VALUE")
        return None
    return section


def _assign(composed: Composed, key: str, value: Any, where: str) -> None:
    """Set a known key, unless the value does not fit it."""
    known = leaves(RunConfig, composed.raw)
    annotation = annotation_of(key, known)
    faults: list[Fault] = []
    parent, _, name = key.rpartition(".")
    root = free_mapping(key, known)
    section = _section(composed.raw, parent) if root is None else _below(composed, root, key)
    if section is None:
        return
    read(value, annotation, key, faults)
    if faults:
        composed.faults += [dataclasses.replace(f, text=f.text + where) for f in faults]
    elif key in ("model.arch.type", "model.model_config.type") and section.get(name) != value:
        text = f"{key}: got {show(value)}{where}, but the model chosen has {section.get(name)}"
        composed.fail("model", f"{text}; another one is chosen with model=")
    else:
        section[name] = value
