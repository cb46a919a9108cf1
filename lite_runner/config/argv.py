"""The command line, in Hydra's style (key=value) and in run_mindformer's (--key value).

Nothing is looked up here but names: what a key is and whether a value fits is compose.py's
concern. Both styles may be mixed; the later of two settings of a key wins.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from lite_runner.config import NEAR_NAME, Invalid, accepts, at, did_you_mean, nearest, nearest_flag
from lite_runner.records import dataclass
from lite_runner.system.files import parse_json

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
    "--config-name": "--config-name",
    "-cn": "--config-name",
    "--config-path": "--config-path",
    "-cp": "--config-path",
    "-m": "--multirun",
    "--multirun": "--multirun",
    "-sc": "--shell-completion",
    "--shell-completion": "--shell-completion",
}
SEARCHPATH = "hydra.searchpath"
CFG_PARTS = ("job", "hydra", "all", "schema")
_FLAG_NAMES = (*FLAGS, *(flag[2:] for flag in _OWN_FLAGS if flag.startswith("--")))
_INFO_OF_HYDRA = ("all", "config", "defaults", "defaults-tree", "searchpath")
_OVERRIDE = re.compile(r"[~+]{0,2}([A-Za-z_]\w*)[\w.]*=")
_LEFT_OUT = re.compile(r"~[A-Za-z_]\w*(\.\w+)*")


@dataclass(frozen=True)
class Setting:
    """One `key=value` (or flag) as typed; a list where a flag had several values."""

    key: str
    value: str | list[str]
    prefix: str = ""  # Hydra's +, ++ or ~
    flag: bool = False

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else " ".join(self.value)
        if _means_key(self.key):
            from lite_runner.system.secret import hidden

            value = hidden(value)
        return f"--{self.key} {value}" if self.flag else f"{self.prefix}{self.key}={value}"


def _means_key(name: str) -> bool:
    """True if a dotted key is `infer.enc_key`, or that misspelt: its value may be a key."""
    return nearest(name.rpartition(".")[2], ["enc_key"], NEAR_NAME) is not None


@dataclass
class CommandLine:
    """A parsed command line; `errors` are sentences about words that could not be understood."""

    action: Action = "run"
    topic: str = ""  # the word after --help
    settings: list[Setting] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)  # each overrides those before it
    config_name: str = ""  # of NAME.yaml in config_path, config_dirs or the current folder
    config_path: str = ""
    config: Mapping[str, Any] | None = None  # the content of such a file, from a script
    mindformer: bool = False  # typed to run_mindformer.py
    config_dirs: list[str] = field(default_factory=list)  # folders of the user's own options
    shown: str = "job"  # by --cfg: one of CFG_PARTS
    metric: str = ""  # field of result.json that a sweeper of --multirun optimizes
    plugins: list[str] = field(default_factory=list)  # Python files to run first; in no yaml
    bare: list[str] = field(default_factory=list)  # words without key=
    errors: list[str] = field(default_factory=list)

    def values(self, key: str) -> list[str | list[str]]:
        return [setting.value for setting in self.settings if setting.key == key]

    def last(self, key: str) -> str | None:
        """The last value of a key; None if it is not given."""
        texts = [value for value in self.values(key) if isinstance(value, str)]
        return texts[-1] if texts else None


# Keys that identify a file's model.
MODEL_KEYS = ("model.arch.type", "model.model_config.type", "trainer.model_name")


@dataclass
class ConfigFile:
    """The merged yaml files of --config without `defaults` and `hydra`; empty without --config."""

    source: str = ""  # its files, for messages
    raw: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)  # group -> option
    searchpath: list[str] = field(default_factory=list)
    errors: list[Invalid] = field(default_factory=list)
    flags: frozenset[str] = frozenset()  # keys in `raw` that come from the command line
    hydra: dict[str, Any] = field(default_factory=dict)  # of --multirun, not interpolated
    hydra_choices: dict[str, str] = field(default_factory=dict)  # hydra/launcher -> option

    def fail(self, text: str) -> None:
        """Add a validation error."""
        self.errors.append(Invalid((), text))

    def names_model(self, models: Collection[str]) -> bool:
        """True if the file identifies its model; a user's own name does not."""
        if any(at(self.raw, key) is not None for key in MODEL_KEYS[:2]):
            return True
        return bool(at(self.raw, "pretrained_model_dir")) or at(self.raw, MODEL_KEYS[2]) in models


class _Words:
    """The arguments that are still to be read."""

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
    return word.startswith("--") or word.partition("=")[0] in _OWN_FLAGS


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
        elif word.startswith("sweep_metric="):
            line.metric = word.partition("=")[2]
        elif word.startswith("register_path="):  # run_mindformer's name, for a single path
            line.plugins.append(word.partition("=")[2])
        elif "=" in word or word.startswith("~"):
            line.settings.append(override(word))
        elif word.startswith("-") and len(word) > 1:
            _unknown_flag(word, words, line, heads)
        else:
            line.bare.append(word)
    if line.config_name:
        line.config_files.insert(0, _named_config(line))
    elif line.config_path:
        line.errors.append("--config-path: expected --config-name NAME beside it")
    if line.metric and line.action == "run":
        line.errors.append("sweep_metric has no effect without --multirun")
    return line


def _named_config(line: CommandLine) -> str:
    """The file that --config-name means, as Hydra's: without .yaml, in the first folder with it."""
    name = line.config_name.removesuffix(".yaml") + ".yaml"
    folders = [line.config_path] if line.config_path else [*line.config_dirs, "."]
    found = [str(Path(folder) / name) for folder in folders]
    return next((path for path in found if Path(path).is_file()), found[0])


def is_of_hydra(setting: Setting) -> bool:
    """True for settings of Hydra's launchers, sweepers and callbacks, which --multirun takes."""
    return setting.key.startswith(("hydra/", "hydra.")) and setting.key != SEARCHPATH


def _unknown_flag(word: str, words: _Words, line: CommandLine, heads: Collection[str]) -> None:
    here = equivalent_of(word)
    near = nearest_flag(word, [*_FLAG_NAMES, *heads])
    hint = f"; here it is {here}" if here else did_you_mean(near)
    line.errors.append(f"{word.partition('=')[0]}: no such flag{hint}")
    if words.peek() is not None and not _is_override(words.peek(), heads):
        words.next()  # its value


def override(word: str) -> Setting:
    """A `key=value` with Hydra's prefix, if it has one."""
    key, _, value = word.partition("=")
    bare = key.lstrip("+~")
    return Setting(bare, value, prefix=key[: len(key) - len(bare)])


def _read_flag(word: str, words: _Words, line: CommandLine, heads: Collection[str]) -> None:
    name, has_value, inline = word.partition("=")
    own = _OWN_FLAGS.get(name)
    if own == "--help":
        line.action = "help"
        if inline or "=" not in (words.peek() or "="):
            line.topic = inline or words.next()
    elif own == "--version" and line.action != "help":
        line.action = "version"
    elif own == "--multirun":
        if line.action == "cfg":
            line.errors.append("--cfg shows one config: leave out --multirun")
        elif line.action == "run":
            line.action = "multirun"
    elif own == "--info":
        line.action = "info"
        if words.peek() in _INFO_OF_HYDRA:
            words.next()  # whichever it is: all are shown
    elif own is not None and own not in ("--help", "--version"):
        value = inline if has_value else (words.next() if words.peek() is not None else "")
        if own == "--shell-completion":
            line.action = "completion"
        elif own == "--config-dir":
            line.config_dirs += [value] if _needed(value, own, "a folder", line) else []
        elif own == "--config-name":
            line.config_name = _needed(value, own, "a name", line)
        elif own == "--config-path":
            line.config_path = _needed(value, own, "a folder", line)
        elif value not in CFG_PARTS:
            near = "; the length of a context is max_length=N" if value.isdigit() else ""
            line.errors.append(f"{name}: got {value!r}, expected {', '.join(CFG_PARTS)}{near}")
        elif line.action == "multirun":
            line.errors.append("--cfg shows one config: leave out --multirun")
        else:
            line.action, line.shown = "cfg", value
    elif own is None:
        _read_setting(name[2:], inline if has_value else None, words, line, heads)


def _needed(value: str, flag: str, what: str, line: CommandLine) -> str:
    if not value:
        line.errors.append(f"{flag}: expected {what} after it")
    return value


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
        line.errors.append(f"--{name}: expected a value after it")
    elif name == "config":
        line.config_files.append(values[0])
    elif name == "register_path":
        line.plugins += values
    elif name == "options":
        line.settings += [override(value) for value in values]
    elif name == "modal_type":
        line.errors += [
            f"--modal_type: got {value!r}, expected text: no model here reads anything else"
            for value in values
            if value != "text"
        ]
    elif key == "predict_data":
        # As run_mindformer, a backslash and an n become a line break.
        texts = [value.replace("\\n", "\n") for value in values]
        line.settings.append(Setting(key, texts if len(texts) > 1 else texts[0]))
    else:
        line.settings.append(Setting(key, values if len(values) > 1 else values[0], flag=True))


# Values that Hydra's grammar and JSON read alike, and those that the grammar reads as a text.
_PLAIN = re.compile(r"-?(?:0|[1-9]\d{0,17})(?:\.\d{1,17})?|true|false|null")
_NAME = re.compile(r"(?!(?:true|false|null|nan|inf)\Z)[a-z_][a-z0-9_-]*", re.ASCII | re.IGNORECASE)


def value_of(text: str, annotation: Any) -> Any:
    """The value that `text` means for a key of this annotation.

    Raises ValueError where Hydra's grammar cannot read it, or where it is a sweep.
    """
    if accepts(annotation, str):
        if text == "null" and accepts(annotation, NoneType):
            return None
        if not (accepts(annotation, tuple) and text.startswith("[") and text.endswith("]")):
            return text
        from lite_runner.config.grammar import list_of

        found = list_of(text, annotation)
        return text if found is None else found
    if _PLAIN.fullmatch(text):  # most values; Hydra's parser takes a tenth of a second to import
        return parse_json(text)
    if _NAME.fullmatch(text):  # quant=a16w8
        return text
    from lite_runner.config.grammar import single_value

    return single_value(text)


def _is_override(word: str | None, heads: Collection[str]) -> bool:
    if _LEFT_OUT.fullmatch(word or ""):
        return True
    match = _OVERRIDE.match(word or "")
    # A misspelt key is an error, not another prompt.
    return match is not None and nearest(match.group(1), heads, cutoff=NEAR_NAME) is not None


_PROMPT = "predict_data='TEXT'"
_TOKENS = "max_new_tokens=N"
_CHECKPOINT = "model=PATH (a folder or file; model=hf://REPO for the hub)"
_THREADS = "context.threads=N"
_DEVICE = "context.device_target=CPU (or Ascend)"
_DTYPE = "model.model_config.compute_dtype=float16 (or bfloat16, float32)"
_RANKS = "parallel=tp2 (or tp4, tp8)"
_CHAT = "chat=true"
_BATCH = "predict_batch_size=N"
# Flags and keys of llama.cpp, transformers, vLLM, mlx-lm and Hydra, without dashes in front.
_HERE = {
    **dict.fromkeys(("p", "prompt", "text", "input"), _PROMPT),
    **dict.fromkeys(("f", "file", "prompt_file"), "predict_data=FILE.txt (one prompt per line)"),
    **dict.fromkeys(
        ("model_path", "model_name_or_path", "model_id", "pretrained", "checkpoint", "ckpt"),
        _CHECKPOINT,
    ),
    **dict.fromkeys(("hf", "hfr", "hf_repo", "repo", "repo_id"), "model=hf://REPO"),
    **dict.fromkeys(("n", "n_predict", "predict", "max_tokens", "num_predict"), _TOKENS),
    **dict.fromkeys(
        ("ctx_size", "max_model_len", "n_ctx", "num_ctx", "max_seq_len"), "max_length=N"
    ),
    **dict.fromkeys(("t", "threads", "n_threads", "num_threads"), _THREADS),
    **dict.fromkeys(("best_of",), "num_return_sequences=N"),
    **dict.fromkeys(("s",), "seed=N"),
    **dict.fromkeys(("temp",), "temperature=X"),
    **dict.fromkeys(("repeat_penalty",), "repetition_penalty=X"),
    **dict.fromkeys(("cnv", "conversation", "chat_template", "interactive"), _CHAT),
    **dict.fromkeys(("ngl", "gpu_layers", "n_gpu_layers", "device", "device_map", "gpu"), _DEVICE),
    **dict.fromkeys(("dtype", "torch_dtype", "precision"), _DTYPE),
    **dict.fromkeys(("tp", "tensor_parallel_size", "num_gpus"), _RANKS),
    **dict.fromkeys(("b", "bs", "batch", "ubatch_size"), _BATCH),
    **dict.fromkeys(("lora", "adapter", "adapter_file", "lora_path"), "adapter_path=FOLDER"),
    **dict.fromkeys(("load_in_8bit", "w8"), "quant=a16w8"),
    **dict.fromkeys(("load_in_4bit", "w4"), "quant=a16w4"),
    **dict.fromkeys(("quantize", "quantization"), "quant=a16w8 (or a16w4, a8w8)"),
    **dict.fromkeys(
        ("ctk", "ctv", "cache_type_k", "cache_type_v", "kv_cache_dtype"), "kv_cache=fp16"
    ),
    **dict.fromkeys(("o", "out", "output", "save_dir"), "output_dir=FOLDER"),
    **dict.fromkeys(("json", "jsonl", "format", "output_json"), "output_format=jsonl"),
    **dict.fromkeys(("sys", "system_prompt"), "system='TEXT' chat=true"),
    **dict.fromkeys(("v", "verbose", "debug"), "verbosity=2"),
    **dict.fromkeys(("q", "quiet", "silent", "log_disable"), "verbosity=0"),
    **dict.fromkeys(("no_stream",), "stream=false"),
    **dict.fromkeys(("reverse_prompt", "r", "stop_sequence"), "stop='TEXT'"),
    **dict.fromkeys(("package", "resolve"), "--cfg job, which prints all, resolved"),
    **dict.fromkeys(("hydra_help",), "--help"),
    **dict.fromkeys(("np", "max_num_seqs"), "run_mode=serve serve.max_running=N"),
    **dict.fromkeys(("host",), "run_mode=serve serve.host=ADDRESS"),
    **dict.fromkeys(("port",), "run_mode=serve serve.port=N"),
    **dict.fromkeys(("api_key", "api_key_file"), "run_mode=serve serve.api_key=env:NAME"),
    **dict.fromkeys(("a", "alias", "served_model_name"), "run_mode=serve serve.model_name=NAME"),
    **dict.fromkeys(("chat_template_file",), "processor.tokenizer.chat_template=FILE"),
    **dict.fromkeys(("run",), "run_mode=predict"),
    **dict.fromkeys(("experimental_rerun",), "--config outputs/latest/config.yaml"),
    "context.kernels": "backend=ms for false, backend=native for true",  # our own, of before
}
CHECKPOINTS = (".gguf", ".safetensors", ".ckpt", ".bin")


def equivalent_of(flag: str) -> str:
    """The equivalent here of a flag or key of another program; "" for an unknown one."""
    return _HERE.get(flag.lstrip("-").replace("-", "_").lower(), "")


def command_meant(
    words: Sequence[str], prompt: str | None, models: Collection[str], run_modes: Collection[str]
) -> str:
    """The arguments that words without a key stand for: a checkpoint, a yaml, a model, a text.

    `prompt` is predict_data as typed before them, which they then go on with; None: it was not.
    """
    meant, texts = [], [] if prompt is None else [prompt]
    for word in words:
        path = Path(word)
        if word in models or word.endswith(CHECKPOINTS) or "://" in word or _is_folder(path):
            meant.append(f"model={shlex.quote(word)}")
        elif word in run_modes:
            meant.append(f"run_mode={word}")
        elif path.suffix in (".yaml", ".yml"):
            meant.append(f"--config {shlex.quote(word)}")
        else:
            texts.append(word)
    if texts or not meant[0].startswith("run_mode="):
        text = " ".join(texts)
        meant.append(f"predict_data={shlex.quote(text)}" if text else _PROMPT)
    return " ".join(meant)


def _is_folder(path: Path) -> bool:
    try:
        return path.expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return False
