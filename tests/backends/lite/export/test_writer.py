"""Verification of an exported model before it is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import Row
from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.export import writer as module
from lite_runner.config.backend_checks import EngineName
from lite_runner.errors import ArtifactError
from tests.generation.mock import hashed_logits

VOCAB = 16
Verify = Callable[..., list[int]]


class Fake:
    """Logits of a slot's tokens; those after position `wrong` are off by `error`."""

    def __init__(self, limit: int, error: float = 0.0, wrong: int = 0) -> None:
        self.limit, self.error, self.wrong = limit, error, wrong
        self.tokens: list[int] = []
        self.longest = 0

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        (row,) = rows
        self.tokens = [*self.tokens[: row.position], *row.tokens.tolist()]
        assert row.position < row.position + len(row.tokens) == len(self.tokens) <= self.limit
        self.longest = max(self.longest, len(self.tokens))
        logits = hashed_logits(self.tokens, 0)
        logits[3] += self.error * (len(self.tokens) > self.wrong)
        return logits[None]

    def close(self) -> None: ...


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch) -> Verify:
    """`verify(limit, ...)` with a limit of positions and the exported model's error: the longest
    sequence of the exported model, with each number of threads."""

    def run(
        limit: int, error: float = 0.0, wrong: int = 0, engine: EngineName = "lite-worker"
    ) -> list[int]:
        exported: list[Fake] = []

        def opened(graphs: object, manifest: object, options: object, slots: int) -> Fake:
            exported.append(Fake(limit, error, wrong))
            return exported[-1]

        monkeypatch.setattr(module, "reference_backend", lambda job, length: Fake(length))
        monkeypatch.setattr(module, "open_exported", opened)
        manifest = SimpleNamespace(
            seq_length=limit,
            model=SimpleNamespace(vocab_size=VOCAB),
            model_name="fake",
            layout="resizable",
            precision="float32",
            sampled=False,
            paths=lambda folder, rank: {},
        )
        options = EngineOptions(name=engine)
        job = SimpleNamespace(engine=options, ranks=SimpleNamespace(tensor_index=0))
        module.verify(Path(), manifest, job)  # type: ignore[arg-type]
        return [one.longest for one in exported]

    return run


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8, 20, 21, 22, 64])
def test_the_prompts_fit_the_model(verify: Verify, limit: int) -> None:
    """Of 18 tokens and 3 steps, or as many as there is room for."""
    assert verify(limit) == [min(limit, 21)] * 2  # with one thread, and with two
    assert verify(limit, engine="graph-cell") == [min(limit, 21)]  # which cannot change them


@pytest.mark.parametrize("wrong", [0, 5, 20])
def test_one_wrong_logit_is_enough(verify: Verify, wrong: int) -> None:
    """Wherever it is, up to the last step of the longest prompt."""
    verify(64, 1e-4, wrong)
    for error in (0.01, float("nan")):
        with pytest.raises(ArtifactError, match=r"differs in .* it is not kept"):
            verify(64, error, wrong)
