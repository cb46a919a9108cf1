"""The keys of an evaluation, its windows, and the text to score."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from lite_runner.architectures.spec import Decoder
from lite_runner.config.checks import fits_model
from lite_runner.config.fields import Fault, Range, fault, raise_faults
from lite_runner.config.lengths import beyond_context
from lite_runner.config.options import (
    AdapterOptions,
    CompareOptions,
    ExportedOptions,
    MindFormersOptions,
)
from lite_runner.config.prefixes import no_likelihood
from lite_runner.config.prompts import MAX_PROMPT_BYTES, decoded
from lite_runner.config.ranges import Count
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass

# One prefill chunk, and the default of other tools: perplexities are comparable.
DEFAULT_WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class EvalOptions(AdapterOptions, ExportedOptions, MindFormersOptions, CompareOptions):
    """The text, and how it is cut into windows."""

    computes_here: ClassVar[bool] = True
    on_ranks: ClassVar[bool] = False
    takes_parallel: ClassVar[bool] = False

    eval_data: str
    eval_window: Annotated[int, Range(2)] | None  # of one token there is nothing to predict
    eval_stride: Count | None

    @property
    def caches(self) -> bool:
        return False  # a window is scored at once

    @property
    def text_file(self) -> Path:
        """The file that eval_data names."""
        return Path(self.eval_data).expanduser()

    def window_of(self, model: Decoder) -> tuple[int, int]:
        """Tokens of a window, and from the start of one window to that of the next."""
        window = self.eval_window or min(model.seq_length, DEFAULT_WINDOW)
        return window, self.eval_stride or window


def window_faults(config: EvalOptions, model: Decoder) -> Iterator[Fault]:
    """Windows that do not fit the model, or each other; and a model without likelihoods."""
    if model.prefix is not None:
        said, hint = no_likelihood("run_mode=eval")
        yield fault(("run_mode", "model"), f"{said}; {hint}")
    window, stride = config.window_of(model)
    if window > model.seq_length:
        yield beyond_context("eval_window", window, model)
    if stride > window:
        yield fault(
            ("eval_stride", "eval_window"),
            f"eval_stride: got {stride}, expected at most the window of {window} tokens:"
            " those between two windows would be left out",
        )


def check_model(config: EvalOptions, model: Decoder) -> None:
    """Raises ConfigError with what of the config does not fit the model."""
    raise_faults([*fits_model(config, model), *window_faults(config, model)])


def read_text(config: EvalOptions) -> str:
    """The text of eval_data. Raises ConfigError where it cannot be read or is not UTF-8."""
    path = config.text_file
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"eval_data: {path}: {error.strerror}") from None
    return decoded(raw, f"eval_data: {path}").removeprefix("\ufeff")
