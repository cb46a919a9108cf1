"""conf/ + file + command line -> one checked `RunConfig`, or one error with every fault.

Hydra composes the groups. The settings are laid over its result here, each checked against
the dataclasses: no key is ever added, and no text is interpolated.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.ascend import KEYS
from lite_runner.config.choices import (
    SEARCHPATH,
    blended,
    is_there,
    options_chosen,
    user_folders,
    with_checkpoint,
)
from lite_runner.config.config_file import ConfigFile, read_config
from lite_runner.config.fields import (
    Fault,
    Note,
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
from lite_runner.config.groups import (
    GROUPS,
    compose_groups,
    files_of,
    keys_by_run_mode,
    options_of,
)
from lite_runner.config.lengths import typed_faults
from lite_runner.config.mindformers import arch_of, listed, translate
from lite_runner.config.mindformers_keys import IGNORED, is_only_mindformers
from lite_runner.config.model_dir import with_model
from lite_runner.config.other_tools import words_meant
from lite_runner.config.repeat import is_of_a_run, run_again
from lite_runner.config.schema import RunConfig
from lite_runner.config.suggest import did_you_mean, nearest_key
from lite_runner.config.yaml_file import at, put
from lite_runner.errors import ConfigError

# Keys of a file that are for exported models only.
OFFLINE_ONLY = ("infer.", "model.model_config.is_sample_acceleration")
FOR_ASCEND = tuple(f"context.{key}" for key in KEYS)
# Where run_mindformer's run_mode=export puts the graphs.
MINDFORMERS_EXPORT = {
    "prefill_model_path": "mindir_full_checkpoint",
    "increment_model_path": "mindir_inc_checkpoint",
}
_HELP = "run_lite.py --help lists the groups and keys"


@dataclass(frozen=True)
class Schemas:
    """What a run may be, by its run mode: config/ knows none of them."""

    config_of: Callable[[str], type[RunConfig]]  # of a run mode
    faults: Callable[[RunConfig], Iterator[Fault]]  # what does not go together in one

    @cached_property
    def keys(self) -> dict[str, frozenset[str]]:
        """The dotted keys of each run mode, besides those that every run has."""
        return keys_by_run_mode()

    @cached_property
    def every_key(self) -> frozenset[str]:
        """The keys of all run modes, besides those that every run has."""
        return frozenset().union(*self.keys.values())

    def having(self, key: str) -> list[str]:
        """The run modes that have a key."""
        return [mode for mode, keys in self.keys.items() if key in keys]


def heads(schemas: Schemas) -> list[str]:
    """The first parts of every key a user may write: groups, our keys, MindFormers'."""
    known = (*GROUPS, *leaves(RunConfig), *schemas.every_key, *IGNORED)
    return sorted({key.partition(".")[0] for key in known})


@dataclass
class Composed:
    """Plain data of one run, and what is wrong with it so far."""

    raw: dict[str, Any]
    schemas: Schemas
    schema: type[RunConfig]  # of the run mode
    choices: dict[str, str] = field(default_factory=dict)  # of groups, named by the user
    folders: tuple[Path, ...] = ()  # of groups, besides conf/
    faults: list[Fault] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def fail(self, key: str, text: str) -> None:
        self.faults.append(Fault((key,), text))


def resolve(line: CommandLine, schemas: Schemas) -> tuple[RunConfig, list[Note]]:
    """The run that a command line asks for, and notes for the user.

    Raises ConfigError with all validation errors: keys, types, ranges, and what does not go
    together.
    """
    composed = compose_line(line, schemas)
    checked: list[Fault] = []
    config = read(composed.raw, composed.schema, "", checked)
    faulty = {key for fault in composed.faults for key in fault.keys}
    # A fault that follows from another one would only distract.
    faults = composed.faults + [f for f in checked if not faulty.intersection(f.keys)]
    if config is not None:
        typed = {setting.key for setting in line.settings}
        found = [*schemas.faults(config), *typed_faults(config, typed)]
        faults += [f for f in found if not faulty.intersection(f.keys)]
    raise_faults(faults)
    assert config is not None
    return config, [*composed.notes, *map(Note, ge_notes(config))]


def raise_faults(faults: Sequence[Fault]) -> None:
    """All `faults` as one ConfigError; nothing where there are none."""
    if faults:
        error = ConfigError.of(list(dict.fromkeys(fault.text for fault in faults)))
        error.hint = _HELP
        raise error


def compose_line(line: CommandLine, schemas: Schemas) -> Composed:
    """Groups, file and settings in one; faults of keys and values are collected, not raised."""
    # A prompt that was given in a wrong way is not missed besides.
    early = [
        Fault(("predict_data",) if "predict_data" in text else (), text) for text in line.faults
    ]
    try:
        file = read_config(line.config_files, line.config)
    except ConfigError as error:
        early.append(Fault(("model", "predict_data"), error.message))
        file = ConfigFile()
    early += [Fault((), text) for text in file.faults]
    try:
        folders = user_folders(line, file)
    except ConfigError as error:
        early.append(Fault(("model",), error.message))
        folders = ()
    models = options_of("model", folders)
    if line.bare:
        early.append(Fault(("predict_data",), _bare_words(line, models)))
    line, file = with_model(line, file)
    line, faults = with_checkpoint(line, file, models)
    early += faults
    foreign = [s for s in line.settings if s.flag and is_only_mindformers(s.key)]
    for setting in foreign:
        put(file.raw, setting.key, str(setting.value))
    choices = options_chosen(line.settings, file, folders, early)
    raw = compose_groups(choices, folders)
    mode = raw.get("run_mode")
    if isinstance(mode, str) and mode not in schemas.keys:
        expected = ", ".join(schemas.keys)
        raise ConfigError(f"conf/: run_mode: got {show(mode)}, expected one of {expected}")
    schema = schemas.config_of(mode) if isinstance(mode, str) else RunConfig
    # A group may set keys that the run mode does not have (ge): they have no meaning then.
    own = {field.name for field in dataclasses.fields(schema)}
    raw = {name: value for name, value in raw.items() if name in own or name != "infer"}
    composed = Composed(raw, schemas, schema, choices, folders, early)
    _check_groups(composed)
    if file.raw:
        _lay_file(composed, line, file)
    for setting in line.settings:
        chosen = setting.key in GROUPS and not setting.prefix
        if setting not in foreign and setting.key != SEARCHPATH and not chosen:
            _lay(composed, setting)
    _name_weights(composed)
    if _is_mindformers_export(composed, line, file.raw):
        _lay_mindformers_export(composed, line, file.raw)
    return composed


def _check_groups(composed: Composed) -> None:
    """A group whose keys the run mode does not have is refused where it was chosen."""
    if "ge" in composed.choices and "infer" not in composed.raw:
        composed.fail("ge", _no_meaning(composed, "ge", "infer.ge_preset"))


def _no_meaning(composed: Composed, name: str, key: str) -> str:
    """What is said of a key that other run modes have."""
    modes = " or ".join(composed.schemas.having(key))
    mode = composed.raw["run_mode"]
    return f"{name} has no meaning with run_mode={mode}, only with run_mode={modes}"


def _bare_words(line: CommandLine, models: Sequence[str]) -> str:
    """What is said of words without a key."""
    typed = [s.value for s in line.settings if s.key == "predict_data"]
    prompt = typed[-1] if typed and isinstance(typed[-1], str) else None
    meant = words_meant(line.bare, prompt, models, options_of("run_mode"))
    alone = "" if line.settings or line.config_files else "run_lite.py "
    words = ", ".join(show(word) for word in line.bare)
    return f"{words}: expected key=value; did you mean: {alone}{meant}"


def _name_weights(composed: Composed) -> None:
    """A model's name as load_checkpoint, MindFormers' way to say: its usual weights."""
    name = composed.raw.get("load_checkpoint")
    if name in options_of("model", composed.folders) and not is_there(name):
        groups = compose_groups({"model": name}, composed.folders)
        settings = _section(groups, "model.model_config")
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
        bool(line.config_files)
        and not is_of_a_run(file, composed.schemas.config_of)
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


def _lay_file(composed: Composed, line: CommandLine, config: ConfigFile) -> None:
    """Lay what a file says over the groups."""
    file, where = config.raw, f" (in {config.source})"
    models = options_of("model", composed.folders)
    arch, typed_model = arch_of(file), any(setting.key == "model" for setting in line.settings)
    chosen = at(composed.raw, "model.arch.type")
    if any("model" in fault.keys for fault in composed.faults):
        return
    if arch not in (None, chosen):
        text = f"model.arch.type: got {show(arch)}{where}, but the model chosen is {chosen}"
        tail = "; leave model= out to run the file's" if typed_model else ""
        composed.fail("model", text + tail)
        return
    if mixed := blended(line.settings, config, composed.raw, models):
        composed.fail("model", mixed)
        return
    if is_of_a_run(file, composed.schemas.config_of):
        options = _options_typed(line, composed)
        composed.raw = run_again(
            file, composed.raw, options, composed.schema, composed.schemas.every_key
        )
        return
    use_parallel = file.get("use_parallel", composed.raw.get("use_parallel"))
    for setting in line.settings:
        if setting.key == "use_parallel" and isinstance(setting.value, str):
            use_parallel = setting.value.lower() != "false"
    named = at(file, "trainer.model_name") in models
    sized = typed_model or "model" in config.choices or named or arch is None
    every = leaves(composed.schema, composed.raw)
    others = composed.schemas.every_key - leaves(composed.schema).keys()
    # What only another run mode has is MindFormers' own here, and listed as such.
    known = {key for key in every if key not in IGNORED or key in composed.raw}
    known |= {key for key in others if key not in IGNORED}
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
    device = result.assignments.get("context.device_target")
    for setting in line.settings:
        if setting.key == "context.device_target":
            device = setting.value
    on_cpu = device == "CPU"
    for key, value in result.assignments.items():
        if online and key.startswith(OFFLINE_ONLY):
            result.ignored.append(key)  # the documents' yamls have both kinds of a run in one
        elif (on_cpu and key in FOR_ASCEND) or key in others:
            result.ignored.append(key)
        elif key not in GROUPS and key not in typed:
            # MindFormers writes "none" of a path as an empty value.
            takes = every[key]
            empty = value is None and accepts(takes, str) and not accepts(takes, types.NoneType)
            _assign(composed, key, "" if empty else value, where)
    if result.ignored:
        found, count = listed(result.ignored), len(set(result.ignored))
        keys, verb = ("1 key", "changes") if count == 1 else (f"{count} keys", "change")
        composed.notes.append(
            Note(
                f"{keys} of {config.source} {verb} nothing here (listed in run.log, and with"
                " verbosity=2)",
                f"of {config.source} these change nothing here: {found}",
            )
        )


def _options_typed(line: CommandLine, composed: Composed) -> list[dict[str, Any]]:
    """The files of the groups' options that a command line names."""
    named = [(s.key, str(s.value)) for s in line.settings if s.key in GROUPS and not s.prefix]
    return [raw for group, name in named for raw in files_of(group, name, composed.folders)]


def _lay(composed: Composed, setting: Setting) -> None:
    key, prefix = setting.key, setting.prefix
    known = leaves(composed.schema, composed.raw)
    annotation = annotation_of(key, known)
    if key in GROUPS:
        composed.fail(key, f"{setting}: expected {key}=OPTION, without {prefix}")
    elif annotation is None:
        composed.fail(key, _unknown(composed, setting, list(known)))
    elif prefix == "~":
        composed.fail(key, f"~{key}: a key cannot be left out; {_left_open(composed, key)}")
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


def _left_open(composed: Composed, key: str) -> str:
    """What to type in place of ~key; it is always accepted."""
    *sections, name = key.split(".")
    value = _section(composed.raw, ".".join(sections)).get(name)
    if accepts(annotation_of(key, leaves(composed.schema, composed.raw)), types.NoneType):
        return f"{key}=null leaves it open"
    shown = json.dumps(value) if not isinstance(value, str) else value
    return f"without it, it is {key}={shown}"


def _unknown(composed: Composed, setting: Setting, known: list[str]) -> str:
    key = setting.key
    own = leaves(composed.schema)
    others = composed.schemas.every_key - own.keys()
    parents = [key[:i] for i, letter in enumerate(key) if letter == "."]
    if found := next((one for one in (key, *parents) if one in others), None):
        return _no_meaning(composed, key, found)
    if key in own:
        parent = key.rpartition(".")[0]
        kind = _section(composed.raw, parent).get("type", "null")
        return f"{setting}: {parent} is {kind} here and has no such key"
    if any(entry.startswith(f"{key}.") for entry in (*own, *others)):
        return f"{setting}: a section; its keys are set one by one, as {key}.NAME=VALUE"
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return f"{setting}: of Hydra's own settings only hydra.searchpath=[DIR] is used here"
    near = nearest_key(key, [*known, *others, *GROUPS])
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
    known = leaves(composed.schema, composed.raw)
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
