"""Perplexity, KL divergence and top-1 agreement of quantized weights with their source."""

from __future__ import annotations

from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.backends.native.packed_cache import packed_model
from lite_runner.config.sections import Ranks
from lite_runner.model import ModelFiles
from lite_runner.records import dataclass

WINDOW = 128  # tokens of a text that are scored together


@dataclass(frozen=True)
class Fidelity:
    """Figures of quantized weights over the tokens of a text."""

    tokens: int
    source_perplexity: float
    perplexity: float
    mean_kl: float  # of the distribution over the vocabulary from the source's, in nats
    top1_agreement: float  # share of tokens at which both find the same token likeliest

    def __str__(self) -> str:
        more = self.perplexity / self.source_perplexity - 1
        return (
            f"perplexity {self.perplexity:.4f} against {self.source_perplexity:.4f} ({more:+.1%}),"
            f" mean KL divergence {self.mean_kl:.4f}, top-1 agreement {self.top1_agreement:.1%}"
            f" over {self.tokens:,} tokens"
        )


def fidelity(source: ModelFiles, quantized: ModelFiles, windows: NDArray[np.int32]) -> Fidelity:
    """Over windows of token ids [n, WINDOW]. Raises RunnerError."""
    sums = np.zeros(4)
    count = len(windows) * (WINDOW - 1)
    with (
        closing(_opened(source)) as one,
        closing(_opened(quantized)) as other,
        progress.step("measure", total=len(windows), unit="windows") as step,
    ):
        for window in windows:
            expected, found = (_log_probabilities(model, window) for model in (one, other))
            kl = (np.exp(expected) * (expected - found)).sum(-1)
            same = expected.argmax(-1) == found.argmax(-1)
            nll = [-each[np.arange(WINDOW - 1), window[1:]] for each in (expected, found)]
            sums += [*(each.sum() for each in nll), kl.sum(), same.sum()]
            step.advance()
    means = sums / count
    perplexities = np.exp(means[:2])
    return Fidelity(count, float(perplexities[0]), float(perplexities[1]), *map(float, means[2:]))


def _opened(files: ModelFiles) -> NativeBackend:
    layers = packed_model(files, None, name=files.source, cached=False, ranks=Ranks())
    return NativeBackend(files.model, layers, NativeOptions(slots=1, length=WINDOW))


def _log_probabilities(backend: NativeBackend, window: NDArray[np.int32]) -> NDArray[np.float32]:
    """Of each next token [WINDOW - 1, vocab]."""
    logits = backend.forward([Row(0, window, 0, logits=WINDOW)])[:-1]
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits
