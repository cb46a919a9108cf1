"""The seat that each backend folder defines: unsupported runs, memory estimate, opening it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from lite_runner.backends.base import Backend
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.parallel import Ranks
from lite_runner.config.schema import BACKENDS, ComputeOptions
from lite_runner.model.files import ModelFiles
from lite_runner.records import dataclass
from lite_runner.sizing.memory import Memory
from lite_runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lite_runner.model.adapters import AdapterJob


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run for a backend, besides the model."""

    config: ComputeOptions
    device: str  # "CPU" or "Ascend"
    slots: int  # rows computed together
    length: int  # tokens of a row, prompt and generated
    ranks: Ranks = Ranks()
    width: int = 1  # rows of one prompt: its beams, or its texts
    generation: Sequence[GenerationConfig] = ()  # of each prompt
    prompts: Sequence[Sequence[int]] = ()  # their token ids
    prompt_logits: bool = False  # logits of every prompt token are needed, not only of the last
    adapters: AdapterJob | None = None  # None: the base model alone
    tokenizer: Tokenizer | None = None  # None: the checkpoint has none, or nobody opened it yet


class Seat(Protocol):
    """A backend as runs choose it. Its folder's package has one as SEAT."""

    elastic: bool  # its memory is checked first, and rows and lengths may be reduced to what fits

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        """Reasons why it cannot compute a run, each with a remedy; empty: it can."""
        ...

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        """Memory of one rank, estimated from sizes: on CPU of its process, else on its device."""
        ...

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        """Description of the engine, for people."""
        ...

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        """The type of the weights in memory, or their quantization, for people."""
        ...

    def open(self, files: ModelFiles, options: RunOptions) -> Backend:
        """The backend with its weights. Several ranks must have joined. Raises RunnerError."""
        ...


def seat(name: str) -> Seat:
    """The seat of a backend that `config.backend` names."""
    return cast(Seat, import_module(f"lite_runner.backends.{BACKENDS[name]}").SEAT)
