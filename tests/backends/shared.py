"""Tests that several backends pass. A module with fixtures `model` or `make` derives from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import Backend, Row
from lite_runner.config.argv import parse
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompts import read_requests
from lite_runner.config.schema import GenerateOptions
from lite_runner.generation import Engine, Request
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate_cached
from lite_runner.plan import Job, estimate
from lite_runner.plan.resources import job_memory, memory_hints, run_options
from lite_runner.run_modes import heads, resolve
from lite_runner.sizing import Memory
from tests import references
from tests.generation.mock import served
from tests.models import reference_model

TOLERANCE = 1e-4  # of the largest logit: rounding; a wrong scale or position is off by 1e-2
Error = Callable[[NDArray, NDArray], float]
LONGROPE = ("phi3_long", "phi3_longrope")  # of their prompts some outgrow the short factors


def check_generated(known: Any, backend: Backend, beams: int = 1) -> None:
    """All prompts at once are continued as transformers' `generate` does it."""
    wanted = (known.generated if beams == 1 else known.beams).tolist()
    options = GenerationConfig(max_new_tokens=len(wanted[0]), num_beams=beams)
    found = served(Engine(backend), [Request(prompt, options) for prompt in known.prompts])
    assert [found[index].token_ids for index in range(len(wanted))] == wanted


class RowsKeepApart:
    """Of `model`, with 3 slots of 200 tokens or more; each test writes what it needs in them."""

    def test_prefill_does_not_depend_on_the_other_rows(
        self, model: Backend, tokens: NDArray
    ) -> None:
        alone = model.forward([Row(1, tokens[:30], 0)])
        others = [Row(0, tokens[:7], 0), Row(1, tokens[:30], 0), Row(2, tokens[3:60], 0)]
        assert np.array_equal(model.forward(others)[1], alone[0])

    @pytest.mark.parametrize("other", [12, 61, 62, 63, 140])  # `resizable` resizes beyond 62
    def test_decode_does_not_depend_on_the_other_rows(
        self, model: Backend, tokens: NDArray, other: int
    ) -> None:
        model.forward([Row(0, tokens[:10], 0), Row(1, tokens[:11], 0)])
        one = Row(1, tokens[20:21], 11)
        alone = model.forward([one])
        model.forward([Row(2, tokens[:other], 0)])
        together = model.forward([Row(0, tokens[3:4], 10), one, Row(2, tokens[9:10], other)])
        assert np.array_equal(together[1], alone[0])

    def test_a_slot_that_sits_out_keeps_its_cache(self, model: Backend, tokens: NDArray) -> None:
        model.forward([Row(0, tokens[:20], 0), Row(1, tokens[:9], 0)])
        before = model.forward([Row(0, tokens[20:21], 20)])
        model.forward([Row(1, tokens[9:10], 9)])
        assert np.array_equal(model.forward([Row(0, tokens[20:21], 20)]), before)

    def test_rows_may_come_in_any_order(self, model: Backend, tokens: NDArray) -> None:
        model.forward([Row(slot, tokens[: 10 + slot], 0) for slot in range(3)])
        rows = [Row(slot, tokens[20 + slot : 21 + slot], 10 + slot) for slot in range(3)]
        forward, backward = model.forward(rows), model.forward(rows[::-1])
        assert np.array_equal(forward, backward[::-1])

    def test_a_prompt_in_chunks_equals_the_whole(
        self, model: Backend, tokens: NDArray, relative_error: Error
    ) -> None:
        whole = model.forward([Row(0, tokens[:80], 0)])
        model.forward([Row(2, tokens[:33], 0)])
        assert relative_error(model.forward([Row(2, tokens[33:80], 33)]), whole) < 1e-5

    @pytest.mark.parametrize("decoded", [False, True], ids=["after_prefill", "while_decoding"])
    def test_copy_reads_all_slots_before_it_writes(
        self, model: Backend, tokens: NDArray, decoded: bool
    ) -> None:
        model.forward([Row(0, tokens[:20], 0), Row(1, tokens[30:50], 0)])
        rows = [Row(slot, tokens[60:61], 20) for slot in (0, 1)]
        before = model.forward(rows)
        if not decoded:
            model.forward([Row(2, tokens[:5], 0)])
        model.copy([1, 0], [0, 1])
        assert np.array_equal(model.forward(rows), before[::-1])

    def test_rows_beyond_the_backend_are_errors(self, model: Backend, tokens: NDArray) -> None:
        length, vocab = model.info.max_length, model.info.vocab_size
        one = tokens[:1]
        beyond = {
            "positions": [Row(0, np.resize(tokens, length + 1), 0), Row(0, one, length)],
            "slot": [Row(model.info.slots, one, 0), Row(-1, one, 0)],
            "logits": [Row(0, one, 0, logits=2), Row(0, one, 0, logits=-1)],
            "token ids": [Row(0, np.array([vocab], np.int32), 0), Row(0, one - vocab, 0)],
            "adapter_slot": [Row(0, one, 0, adapter_slot=0)],
        }
        beyond["positions"] += [Row(0, one, -1), Row(0, tokens[:0], 0)]
        for what, rows in beyond.items():
            for row in rows:
                with pytest.raises(ValueError, match=f"^{what}: got "):
                    model.forward([row])
        with pytest.raises(ValueError, match="each at most once"):
            model.forward([Row(1, one, 0), Row(1, one, 0)])


class LikeTransformers:
    """Of `make(case)`, a model that is exported for graph-cell: of the cells that
    mindspore/test_backend.py has compiled, so that only the inputs of the graphs are new."""

    CASES = references.covering(
        references.of_graphs(), *references.INPUTS, beside=[reference_model("phi3_longrope")]
    )

    @pytest.mark.parametrize("case", CASES)
    def test_logits_and_tokens_equal_transformers(
        self, case: str, make: Callable[[str], Any], reference: Callable[[str], Any]
    ) -> None:
        known, backend = reference(case), make(case)
        logits, wanted = known.run(backend), known.logits
        assert np.abs(logits - wanted).max() <= TOLERANCE * np.abs(wanted).max()
        assert np.array_equal(logits.argmax(-1), wanted.argmax(-1))
        assert backend.compile_s > 0 and backend.info.engine == "graph-cell"

    def test_texts_outgrow_longropes_short_factors(
        self, make: Callable[[str], Any], reference: Callable[[str], Any]
    ) -> None:
        check_generated(reference("phi3_longrope"), make("phi3_longrope"))


# A job's memory, estimated from its sizes alone.


def estimated(*settings: str) -> tuple[GenerateOptions, ModelFiles, Job]:
    """Two prompts for SmolLM2-135M's sizes, counted by their bytes."""
    line = ["model=smollm2_135m", "load_checkpoint=random", "predict_data=[x,y]", *settings]
    config = resolve(parse(line, heads()))[0]
    assert isinstance(config, GenerateOptions)
    files = locate_cached(config.source)
    generation, requests = config.generation(files.model), read_requests(config)
    batch = config.predict_batch_size
    return config, files, estimate(generation, files.model, requests, batch=batch)


def need_of(*settings: str, device: str = "CPU") -> Memory:
    config, files, job = estimated(*settings)
    ranks = config.ranks
    return job_memory(files, run_options(config.settings, job.share(ranks), device, ranks))


def hints_of(*settings: str) -> dict[str, int]:
    """The settings that would help, and the bytes that the job needs with each."""
    config, files, job = estimated(*settings)
    found = memory_hints(files, run_options(config.settings, job, "CPU", config.ranks))
    return {hint.setting: hint.need.total for hint in found}
