"""The command line, in Hydra's style (key=value) and in run_mindformer's (--key value).

Nothing is looked up here but names: what a key is and whether a value fits is compose.py's
concern. Both styles may be mixed; the later of two settings of a key wins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from lite_runner.config.other_tools import equivalent_of
from lite_runner.config.secret import hidden, means_key
from lite_runner.config.suggest import NEAR_NAME, did_you_mean, nearest, nearest_flag
from lite_runner.records import dataclass

Action = Literal["run", "help", "version", "cfg", "info", "multirun", "completion"]

# Flags of run_mindformer.py, of releases 1.0 to 2.1, whose key has another name; most of these
# keys are of training alone.
FLAG_KEYS = {
    "mode": "context.mode",
    "device_id": "context.device_id",
    "device_target": "context.device_target",
    "batch_size": "runner_config.batch_size",
    "epochs": "runner_config.epochs",
    "gradient_accumulation_steps": "runner_config.gradient_accumulation_steps",
    "sink_mode": "runner_config.sink_mode",
    "num_samples": "train_dataset.data_loader.num_samples",
    "train_dataset_dir": "train_dataset.data_loader.dataset_dir",
    "eval_dataset_dir": "eval_dataset.data_loader.dataset_dir",
    "strategy_load_checkpoint": "parallel.strategy_ckpt_load_file",
    "input_data": "predict_data",
    "vocab_file": "processor.tokenizer.tokenizer_file",
}
FLAGS = (
    *("config", "run_mode", "predict_data", "load_checkpoint", "use_parallel", "seed"),
    *("output_dir", "predict_batch_size", "src_strategy_path_or_dir", "auto_trans_ckpt"),
    *("only_save_strategy", "adapter_id", "do_sample", "do_eval", "profile", "options"),
    *("register_path", "modal_type", "transform_process_num", "resume_training", "remote_save_url"),
    *("trust_remote_code", *FLAG_KEYS),
)
# Flags that take several values.
_SEVERAL = ("predict_data", "input_data", "adapter_id", "modal_type", "options")
_OWN_FLAGS = {
    "-h": "--help",
    "--help": "--help",
    "--version": "--version",
    "-c": "--cfg",
    "--cfg": "--cfg",
    "--info": "--info",
    "-i": "--info",
    "--config-dir": "--config-dir",
    "-cd": "--config-dir",
    "-m": "--multirun",
    "--multirun": "--multirun",
    "-sc": "--shell-completion",
    "--shell-completion": "--shell-completion",
}
CFG_PARTS = ("job", "hydra", "all")
_FLAG_NAMES = (*FLAGS, *(flag[2:] for flag in _OWN_FLAGS if flag.startswith("--")))
_INFO_OF_HYDRA = ("all", "config", "defaults", "defaults-tree", "searchpath")
_OVERRIDE = re.compile(r"[~+]{0,2}([A-Za-z_]\w*)[\w.]*=")


@dataclass(frozen=True)
class Setting:
    """One `key=value` (or flag) as typed; a list where a flag had several values."""

    key: str
    value: str | list[str]
    prefix: str = ""  # of Hydra: +, ++ or ~
    flag: bool = False

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else " ".join(self.value)
        value = hidden(value) if means_key(self.key) else value
        return f"--{self.key} {value}" if self.flag else f"{self.prefix}{self.key}={value}"


@dataclass
class CommandLine:
    """What was asked for; `faults` are sentences about what could not be understood."""

    action: Action = "run"
    settings: list[Setting] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)  # each laid over those before
    config: Mapping[str, Any] | None = None  # what such a file holds, from a script
    config_dirs: list[str] = field(default_factory=list)  # with options of the user's own
    shown: str = "job"  # by --cfg: one of CFG_PARTS
    plugins: list[str] = field(default_factory=list)  # Python files to run first; in no yaml
    bare: list[str] = field(default_factory=list)  # words that are no key=value
    faults: list[str] = field(default_factory=list)


class _Words:
    """The arguments still to be read."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._words)

    def next(self) -> str:
        self._at += 1
        return self._words[self._at - 1]

    def peek(self) -> str | None:
        """The next argument, unless there is none or it is a flag."""
        if not self or _is_flag(self._words[self._at]):
            return None
        return self._words[self._at]


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in _OWN_FLAGS


def parse(args: Sequence[str], heads: Collection[str]) -> CommandLine:
    """The arguments after the program's name.

    `heads` are the first parts of known keys: among the values of a flag that takes several,
    a word that starts with (nearly) one of them and has an equals sign is a setting of its own.
    """
    line = CommandLine()
    words = _Words(args)
    while words:
        word = words.next()
        if _is_flag(word):
            _read_flag(word, words, line, heads)
        elif word.startswith("plugins="):
            line.plugins += word.partition("=")[2].split(",")
        elif word.startswith("register_path="):  # run_mindformer's name, of a single path
            line.plugins.append(word.partition("=")[2])
        elif "=" in word or word.startswith("~"):
            line.settings.append(_override(word))
        elif word.startswith("-") and len(word) > 1:
            _unknown_flag(word, words, line, heads)
        else:
            line.bare.append(word)
    return line


def _unknown_flag(word: str, words: _Words, line: CommandLine, heads: Collection[str]) -> None:
    here = equivalent_of(word)
    near = nearest_flag(word, [*_FLAG_NAMES, *heads])
    hint = f"; here it is {here}" if here else did_you_mean(near)
    line.faults.append(f"{word.partition('=')[0]}: no such flag{hint}")
    if words.peek() is not None and not _is_override(words.peek(), heads):
        words.next()  # its value


def _override(word: str) -> Setting:
    key, _, value = word.partition("=")
    bare = key.lstrip("+~")
    return Setting(bare, value, prefix=key[: len(key) - len(bare)])


def _read_flag(word: str, words: _Words, line: CommandLine, heads: Collection[str]) -> None:
    name, has_value, inline = word.partition("=")
    own = _OWN_FLAGS.get(name)
    if own == "--help":
        line.action = "help"
    elif own == "--version" and line.action != "help":
        line.action = "version"
    elif own == "--multirun":
        if line.action == "cfg":
            line.faults.append("--cfg shows one config: leave out --multirun")
        elif line.action == "run":
            line.action = "multirun"
    elif own == "--info":
        line.action = "info"
        if words.peek() in _INFO_OF_HYDRA:
            words.next()  # all of them are shown
    elif own is not None and own not in ("--help", "--version"):
        value = inline if has_value else (words.next() if words.peek() is not None else "")
        if own == "--shell-completion":
            line.action = "completion"
        elif own == "--config-dir":
            _add_folder(value, line)
        elif value not in CFG_PARTS:
            near = "; the length of a context is max_length=N" if value.isdigit() else ""
            line.faults.append(f"{name}: got {value!r}, expected {', '.join(CFG_PARTS)}{near}")
        elif line.action == "multirun":
            line.faults.append("--cfg shows one config: leave out --multirun")
        else:
            line.action, line.shown = "cfg", value
    elif own is None:
        _read_setting(name[2:], inline if has_value else None, words, line, heads)


def _add_folder(value: str, line: CommandLine) -> None:
    if value:
        line.config_dirs.append(value)
    else:
        line.faults.append("--config-dir: expected a folder after it")


def _read_setting(
    name: str, inline: str | None, words: _Words, line: CommandLine, heads: Collection[str]
) -> None:
    """A flag of run_mindformer: a key of its own, or any dotted key of the yaml."""
    known = name in FLAGS or name.partition(".")[0] in heads or "." in name
    if not known:
        if inline is None:
            _unknown_flag(f"--{name}", words, line, heads)
        else:
            _unknown_flag(f"--{name}", _Words([]), line, heads)
        return
    values = [inline] if inline is not None else []
    if not values and words.peek() is not None:
        values = [words.next()]
    several = name in _SEVERAL and inline is None
    while several and words.peek() is not None:
        if name != "options" and _is_override(words.peek(), heads):
            break
        values.append(words.next())
    key = FLAG_KEYS.get(name, name)
    if not values:
        line.faults.append(f"--{name}: expected a value after it")
    elif name == "config":
        line.config_files.append(values[0])
    elif name == "register_path":
        line.plugins += values
    elif name == "options":
        line.settings += [_override(value) for value in values]
    elif name == "modal_type":
        line.faults += [
            f"--modal_type: got {value!r}, expected text: no model here reads anything else"
            for value in values
            if value != "text"
        ]
    elif key == "predict_data":
        # run_mindformer's own reading of a backslash and an n.
        texts = [value.replace("\\n", "\n") for value in values]
        line.settings.append(Setting(key, texts if len(texts) > 1 else texts[0]))
    else:
        line.settings.append(Setting(key, values if len(values) > 1 else values[0], flag=True))


def _is_override(word: str | None, heads: Collection[str]) -> bool:
    match = _OVERRIDE.match(word or "")
    # A misspelt key is a fault to report, not one more prompt.
    return match is not None and nearest(match.group(1), heads, cutoff=NEAR_NAME) is not None
