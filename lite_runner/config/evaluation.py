"""What run_mode=eval is asked for: the text, and the windows it is cut into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import Fault, fault, show
from lite_runner.config.prompts import MAX_PROMPT_BYTES, decoded, is_file
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError

# As long as one chunk of a prompt, so that it costs no more than shorter ones, and what other
# tools print perplexities for by default: figures can be compared.
DEFAULT_WINDOW = 512
# Of prompts, with the values that ask for nothing.
_OF_PROMPTS = {"predict_batch_size": None, "chat": False, "truncate": "none"}


def text_file(config: RunConfig) -> Path:
    """The file that eval_data names."""
    return Path(config.eval_data or "").expanduser()


def window_of(config: RunConfig, model: Decoder) -> tuple[int, int]:
    """Tokens in a window, and from one window's start to the next one's."""
    window = config.eval_window or min(model.seq_length, DEFAULT_WINDOW)
    return window, config.eval_stride or window


def read_text(config: RunConfig) -> str:
    """The text of eval_data. Raises ConfigError where it cannot be read or is not UTF-8."""
    path = text_file(config)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"eval_data: {path}: {error.strerror}") from None
    return decoded(raw, f"eval_data: {path}").removeprefix("\ufeff")


def evaluation_faults(config: RunConfig) -> Iterator[Fault]:
    """What stands against an evaluation, as far as the config shows it."""
    if not config.eval_data:
        yield fault(
            "eval_data", "eval_data is empty; give a text file (no MindRecord): eval_data=TEXT.txt"
        )
    elif "\0" not in config.eval_data and not is_file(text_file(config)):
        yield fault("eval_data", f"eval_data: no file {config.eval_data}")
    for key, off in _OF_PROMPTS.items():
        if (value := getattr(config, key)) != off:
            shown = value if isinstance(value, str) else show(value)
            yield fault(key, f"{key}={shown} has no meaning with run_mode=eval")
    if config.backend == "mslite":
        yield fault(
            ("backend", "run_mode"),
            "backend=mslite is not available with run_mode=eval: an exported graph gives the"
            " logits of the last token alone; expected backend=ms",
        )


def window_faults(config: RunConfig, model: Decoder) -> Iterator[Fault]:
    """Windows that do not fit the model, or each other."""
    window, stride = window_of(config, model)
    if window > model.seq_length:
        yield fault(
            ("eval_window", "model"),
            f"eval_window: got {window}, expected at most the model's context of"
            f" {model.seq_length} tokens",
        )
    if stride > window:
        yield fault(
            ("eval_stride", "eval_window"),
            f"eval_stride: got {stride}, expected at most the window of {window} tokens:"
            " those between two windows would be left out",
        )
