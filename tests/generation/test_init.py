from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.backends import Row
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.generation import Engine, check_lengths
from lite_runner.text import byte_tokenizer
from lite_runner.text.spelling import StopChecker
from tests.generation.mock import generated, requests_of

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12], [13], [1, 2, 3], [15, 0]]
SAMPLED = GenerationConfig(
    do_sample=True, temperature=0.9, top_p=0.9, repetition_penalty=1.2, max_new_tokens=12,
    eos_token_id=(3, 9), seed=5,
)  # fmt: skip
PROMPT = np.array([1, 2, 3], np.int32)
Backends = Callable[..., Any]


def texts(result: Any) -> list[tuple[list[int], str]]:
    return [(c.token_ids, c.finish_reason) for c in result.completions]


def test_greedy_follows_the_best_token(backend: Backends) -> None:
    result = generated(backend(), [[1, 2]], GenerationConfig(max_new_tokens=5))
    history, make = [1, 2], backend()
    for token in result.completions[0].token_ids:
        assert token == int(make._logits(history, 0).argmax())
        history.append(token)
    assert len(history) == 7
    assert result.completions[0].finish_reason == "length"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 9),
    st.lists(st.integers(0, 6), min_size=1, max_size=7),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_row_depends_on_nothing_else(
    backend: Backends, slots: int, chosen: list[int], returns: int, do_sample: bool
) -> None:
    """Neither on the other rows nor on the number of slots; greedy also not on its index."""
    config = GenerationConfig(
        do_sample=do_sample, max_new_tokens=8, eos_token_id=(3, 9), seed=5,
        num_return_sequences=returns,
    )  # fmt: skip
    prompts = [PROMPTS[index] for index in chosen]
    reference = texts(generated(backend(slots=1), prompts, config))
    assert texts(generated(backend(slots=slots), prompts, config)) == reference
    if not do_sample:
        alone = [texts(generated(backend(slots=slots), [p], config)) for p in prompts]
        assert [row for part in alone for row in part] == reference


def test_a_prefix_of_the_prompts_gives_the_same_texts(backend: Backends) -> None:
    every = texts(generated(backend(), PROMPTS, SAMPLED))
    assert texts(generated(backend(), PROMPTS[:3], SAMPLED)) == every[:3]


def test_same_seed_same_tokens_another_seed_others(backend: Backends) -> None:
    from dataclasses import replace

    first = texts(generated(backend(), PROMPTS, SAMPLED))
    assert texts(generated(backend(), PROMPTS, SAMPLED)) == first
    assert texts(generated(backend(), PROMPTS, replace(SAMPLED, seed=6))) != first


def test_a_free_slot_is_refilled_at_once(backend: Backends) -> None:
    """Row counts: the slot of a short sequence does not idle until the longest is done."""

    def logits(history: list[int], adapter: int) -> np.ndarray:
        # eos once as many tokens follow as the first one says
        row = np.zeros(16, dtype=np.float32)
        row[0 if len(history) > history[0] else 1] = 1.0
        return row

    mock = backend(logits, slots=2)
    prompts = [[10], [2], [2], [2], [2]]
    result = generated(mock, prompts, GenerationConfig(max_new_tokens=20, eos_token_id=(0,)))
    assert [len(c.token_ids) for c in result.completions] == [10, 2, 2, 2, 2]
    assert len(mock.prefilled) == 5
    # 10 steps of the long one; the others run beside it.
    assert sum(len(rows) == 2 for rows in mock.steps) >= 8
    assert len(mock.steps) <= 10 + 5


def test_return_sequences_share_one_prefill(backend: Backends) -> None:
    config = GenerationConfig(
        do_sample=True, temperature=2.0, max_new_tokens=6, num_return_sequences=3
    )
    mock = backend(slots=4)
    result = generated(mock, [[1, 2], [3]], config)
    assert mock.prefilled == [[1, 2], [3]]
    assert [(c.prompt_index, c.return_index) for c in result.completions] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert len({tuple(c.token_ids) for c in result.completions}) == 6


def test_more_return_sequences_than_slots(backend: Backends) -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=6, num_return_sequences=5)
    mock = backend(slots=2)
    assert texts(generated(mock, [[1]], config)) == texts(
        generated(backend(slots=8), [[1]], config)
    )
    assert mock.prefilled == [[1]] * 3


@pytest.mark.parametrize("eos", [(), (4,), (4, 7)])
def test_any_eos_ends_and_is_left_out(backend: Backends, eos: tuple[int, ...]) -> None:
    script = [2, 7, 5, 4, 6, 1]

    def logits(history: list[int], adapter: int) -> np.ndarray:
        return np.eye(16, dtype=np.float32)[script[len(history) - 1]]

    config = GenerationConfig(max_new_tokens=6, eos_token_id=eos)
    expected = {(): (script, "length"), (4,): ([2, 7, 5], "stop"), (4, 7): ([2], "stop")}
    result = generated(backend(logits), [[0]], config)
    assert texts(result) == [expected[eos]]
    assert result.completions[0].end_token == {(): None, (4,): 4, (4, 7): 7}[eos]


def test_eos_at_once_gives_an_empty_completion(backend: Backends) -> None:
    config = GenerationConfig(max_new_tokens=6, eos_token_id=tuple(range(16)))
    assert texts(generated(backend(), [[0], [1]], config)) == [([], "stop")] * 2


def test_min_new_tokens_holds_eos_off(backend: Backends) -> None:
    def logits(history: list[int], adapter: int) -> np.ndarray:
        return np.arange(16, dtype=np.float32)

    config = GenerationConfig(max_new_tokens=6, min_new_tokens=3, eos_token_id=(15, 14))
    assert texts(generated(backend(logits), [[0]], config)) == [([13, 13, 13], "stop")]


def test_requests_have_options_of_their_own(backend: Backends) -> None:
    config = GenerationConfig(do_sample=True, temperature=2.0, max_new_tokens=6, seed=1)
    usual = generated(backend(slots=2), PROMPTS[:3], config).completions
    requests = requests_of(PROMPTS[:3], config)
    requests[1] = replace(requests[1], options=replace(config, max_new_tokens=3))
    requests[2] = replace(requests[2], seed_key=(9, 0))
    result = Engine(backend(slots=2)).generate(requests).completions
    alone = generated(backend(), PROMPTS[2:3], replace(config, seed=9)).completions
    tokens = [one.token_ids for one in result]
    assert tokens == [usual[0].token_ids, usual[1].token_ids[:3], alone[0].token_ids]
    assert tokens[2] != usual[2].token_ids and result[1].finish_reason == "length"
    with pytest.raises(ConfigError, match="prompt 1 does not fit: 1 tokens and 900 new"):
        check_lengths([1, 1], [config, replace(config, max_new_tokens=900)], 10)


def test_on_token_sees_all_and_can_end_a_sequence(backend: Backends) -> None:
    seen: dict[int, list[int]] = {}
    finished: list[tuple[int, int]] = []

    def on_token(prompt: int, ret: int, token: int) -> bool:
        seen.setdefault(prompt, []).append(token)
        return prompt == 1 and len(seen[1]) == 2

    result = generated(
        backend(slots=2),
        PROMPTS[:3],
        GenerationConfig(max_new_tokens=4),
        on_token=on_token,
        on_finish=lambda one: finished.append((one.prompt_index, one.return_index)),
    )
    assert [len(c.token_ids) for c in result.completions] == [4, 2, 4]
    assert [c.finish_reason for c in result.completions] == ["length", "stop", "length"]
    assert [seen[index] for index in range(3)] == [c.token_ids for c in result.completions]
    assert finished == [(1, 0), (0, 0), (2, 0)]


@pytest.mark.parametrize("stop, text", [((), "Hello. World"), ((". W",), "Hello")])
def test_texts_through_the_hooks(backend: Backends, stop: tuple[str, ...], text: str) -> None:
    script = b"?Hello. World"

    def logits(history: list[int], adapter: int) -> np.ndarray:
        return np.eye(259, dtype=np.float32)[script[len(history)]]

    checker = StopChecker(byte_tokenizer(), stop)

    def on_token(prompt: int, ret: int, token: int) -> bool:
        checker.put(token)
        return checker.stopped

    config = GenerationConfig(max_new_tokens=len(script) - 1, stop=stop)
    result = generated(backend(logits), [[0]], config, on_token=on_token)
    checker.finish()
    assert checker.text == text
    assert result.completions[0].finish_reason == ("stop" if stop else "length")


def test_adapters_go_with_their_prompts(backend: Backends) -> None:
    config = GenerationConfig(max_new_tokens=6)
    mixed = generated(backend(slots=2), [[1], [1], [1]], config, adapters=[None, "b", None])
    base = generated(backend(), [[1]], config)
    other = generated(backend(), [[1]], config, adapters=["b"])
    assert texts(mixed) == [*texts(base), *texts(other), *texts(base)]
    assert texts(base) != texts(other)


def test_no_prompts(backend: Backends) -> None:
    assert generated(backend(), [], GenerationConfig()).completions == []


@pytest.mark.parametrize(
    "options, new",
    [
        ({"max_new_tokens": 3, "max_length": 4}, 2),
        ({"max_new_tokens": 3, "max_length": 9}, 3),
        ({"max_length": 7}, 5),
        ({}, 8),
        ({"max_new_tokens": 8}, 8),
    ],
)
def test_number_of_new_tokens(backend: Backends, options: dict[str, int], new: int) -> None:
    result = generated(backend(max_length=10), [[1, 2]], GenerationConfig(**options))
    assert texts(result)[0][1] == "length"
    assert len(texts(result)[0][0]) == new


@pytest.mark.parametrize(
    "options, lengths, message",
    [
        ({"max_new_tokens": 4}, [3, 7], "prompt 1 does not fit: 7 tokens and 4 new, 11 together"),
        ({"max_new_tokens": 4}, [7], "at most 10 fit"),
        ({"max_length": 5}, [5], "prompt 0 does not fit: 5 tokens and 1 new, 6 .* at most 5 fit"),
        ({"max_length": 50}, [10], "10 tokens and 1 new, 11 together, but at most 10 fit"),
        ({}, [10], "at most 10 fit"),
        ({}, [1, 0], "prompt 1 is empty"),
        ({"max_new_tokens": 99}, [1], "1 tokens and 99 new, 100 together, but at most 10 fit"),
        ({"max_new_tokens": 1}, [11, 0, 12], "3 errors"),
    ],
)
def test_prompts_that_do_not_fit(
    backend: Backends, options: dict[str, int], lengths: list[int], message: str
) -> None:
    config = GenerationConfig(**options)
    with pytest.raises(ConfigError, match=message) as error:
        check_lengths(lengths, [config] * len(lengths), 10)
    remedy = "at least one token" if message.endswith("empty") else "truncate=left"
    assert remedy in (error.value.hint or "")
    with pytest.raises(ConfigError):
        generated(backend(max_length=10), [[1] * length for length in lengths], config)


def test_the_longest_prompt_just_fits(backend: Backends) -> None:
    for config in (GenerationConfig(max_new_tokens=4), GenerationConfig(max_length=8)):
        longest = config.max_prompt(10)
        check_lengths([longest], [config], 10)
        with pytest.raises(ConfigError):
            check_lengths([longest + 1], [config], 10)
        generated(backend(max_length=10), [[1] * longest], config)


@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_interrupt_gives_what_there_is(backend: Backends, after: int) -> None:
    mock = backend(slots=2)
    forward = mock.forward

    def interrupted(rows: Any) -> Any:
        if len(mock.steps) == after:
            raise KeyboardInterrupt
        return forward(rows)

    whole = texts(generated(backend(), PROMPTS[:3], GenerationConfig(max_new_tokens=5)))
    mock.forward = interrupted
    result = generated(mock, PROMPTS[:3], GenerationConfig(max_new_tokens=5))
    assert result.interrupted
    done = [len(c.token_ids) for c in result.completions]
    assert done == {0: [0, 0, 0], 1: [1, 1, 0], 3: [3, 3, 0], 6: [5, 5, 1]}[after]
    for completion, (tokens, _) in zip(result.completions, whole, strict=True):
        assert completion.token_ids == tokens[: len(completion.token_ids)]
        assert completion.finish_reason == (
            "length" if len(completion.token_ids) == 5 else "interrupted"
        )


def test_interrupt_in_a_hook(backend: Backends) -> None:
    def on_token(prompt: int, ret: int, token: int) -> None:
        raise KeyboardInterrupt

    result = generated(backend(), [[1]], GenerationConfig(max_new_tokens=5), on_token=on_token)
    assert result.interrupted and len(result.completions[0].token_ids) == 1


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_interrupted_ends_the_run(backend: Backends, steps: int) -> None:
    mock = backend()
    result = generated(
        mock,
        [[1]],
        GenerationConfig(max_new_tokens=5),
        interrupted=lambda: len(mock.steps) == steps,
    )
    assert result.interrupted and len(mock.steps) == steps
    (completion,) = result.completions
    assert (len(completion.token_ids), completion.finish_reason) == (steps, "interrupted")


def test_a_rank_alone_does_not_end_the_run(backend: Backends) -> None:
    def on_token(prompt: int, ret: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generated(
            backend(),
            [[1]],
            GenerationConfig(max_new_tokens=5),
            on_token=on_token,
            interrupted=lambda: False,
        )


@pytest.fixture
def heeded() -> Iterator[None]:
    """A process that a shell starts in the background would ignore Ctrl-C otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
def test_ctrl_c_at_any_call(backend: Backends) -> None:
    """Each sequence is there as far as it is, the engine is idle, and what it does next is as if
    nothing had been. Where a function begins, and after one of C, Python looks for signals."""
    config = replace(SAMPLED, max_new_tokens=3, num_return_sequences=2)
    requests = requests_of([*PROMPTS[:3], PROMPTS[0]], config, ["a", None, "b", "a"])
    whole = texts(Engine(backend(slots=3)).generate(requests))
    keys = list(itertools.product(range(4), range(2)))

    def interrupted(place: int) -> bool:
        """True if there is such a place."""
        mock, places = backend(slots=3), itertools.count()
        engine = Engine(mock, 4)
        reached = False

        def trace(frame: FrameType, event: str, _: object) -> None:
            nonlocal reached
            inside = "lite_runner/generation/" in frame.f_code.co_filename
            if inside and event in ("call", "c_return") and next(places) == place:
                reached = True
                signal.raise_signal(signal.SIGINT)

        sys.setprofile(trace)
        try:
            result = engine.generate(requests, on_token=lambda prompt, *_: prompt == 1)
        except KeyboardInterrupt:  # before the first request, or after the last token
            result = None
        finally:
            sys.setprofile(None)
        assert engine.idle and not any(mock.adapters.pins.values())
        if result is not None:
            found = [(one.prompt_index, one.return_index) for one in result.completions]
            assert found == keys[: len(found)] and len(found) % 2 == 0
            assert len(found) == 8 or (reached and not mock.steps)
            assert result.interrupted == reached
            for one, (tokens, _) in zip(result.completions, whole, strict=False):
                assert one.token_ids == tokens[: len(one.token_ids)]
        assert texts(engine.generate(requests)) == whole
        return reached

    place = 0
    while interrupted(place):
        place += 17
    assert place > 1000


@pytest.mark.parametrize("hooks", [("on_token",), ("on_finish",), ("on_token", "on_finish")])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_hook_that_raises_leaves_an_idle_scheduler(
    backend: Backends, after: int, hooks: tuple[str, ...]
) -> None:
    mock, calls = backend(slots=2), itertools.count()
    engine = Engine(mock)
    requests = requests_of(PROMPTS[:3], GenerationConfig(max_new_tokens=3), ["a", None, "b"])

    def hook(*_: object) -> None:
        if next(calls) == after:
            raise ValueError("of the hook")

    with pytest.raises(ValueError, match="of the hook"):
        engine.generate(requests, **dict.fromkeys(hooks, hook))
    assert engine.idle and not any(mock.adapters.pins.values())
    assert texts(engine.generate(requests)) == texts(Engine(backend()).generate(requests))


def test_a_stop_at_the_last_token_is_a_stop(backend: Backends) -> None:
    """Though the sequence is over anyway; and each is reported once, as it is."""
    finished: list[Any] = []
    config = GenerationConfig(max_new_tokens=2)
    result = generated(
        backend(slots=2),
        PROMPTS[:3],
        config,
        on_token=lambda prompt, ret, token: prompt == 1,
        on_finish=finished.append,
    )
    assert texts(result)[1][1] == "stop" and len(texts(result)[1][0]) == 1
    seen: list[int] = []

    def at_the_second(prompt: int, ret: int, token: int) -> bool:
        seen.append(prompt)
        return prompt == 1 and seen.count(1) == 2

    last = generated(
        backend(slots=2), PROMPTS[:3], config, on_token=at_the_second, on_finish=finished.append
    )
    assert [reason for _, reason in texts(last)] == ["length", "stop", "length"]
    assert len(last.completions[1].token_ids) == 2
    assert sorted(finished[3:], key=lambda one: one.prompt_index) == last.completions


def test_nan_names_step_and_prompt(backend: Backends) -> None:
    def logits(history: list[int], adapter: int) -> np.ndarray:
        bad = history[0] == 8 and len(history) == 4
        return np.full(16, np.nan if bad else 0.0, dtype=np.float32)

    with pytest.raises(RunnerError, match="NaN at step 3 of prompt 2") as error:
        generated(backend(logits), [[1], [2], [8]], GenerationConfig(max_new_tokens=9))
    assert error.value.exit_code == 1


def test_timing_counts_tokens(backend: Backends) -> None:
    config = GenerationConfig(max_new_tokens=4)
    timing = generated(backend(slots=2), PROMPTS[:3], config).timing
    assert timing.prefill_tokens == 10
    assert timing.decode_tokens == 3 * 3
    assert timing.prefill_s > 0 and timing.decode_s > 0
    assert timing.prefill_tok_s is not None and timing.decode_tok_s is not None
    assert timing.time_to_first_token_s is not None
    empty = generated(backend(), [], config).timing
    assert empty.prefill_tok_s is None and empty.decode_tok_s is None
    assert empty.time_to_first_token_s is None


def test_times_are_those_of_the_steps(backend: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second a token, shared equally; compiling counts for the first token alone."""
    now, mock = 100.0, backend(slots=2)
    forward = mock.forward

    def slow(rows: Sequence[Row]) -> NDArray[np.float32]:
        nonlocal now
        now += 0.25 + sum(len(row.tokens) for row in rows)
        mock.compile_s += 0.25
        logits: NDArray[np.float32] = forward(rows)
        return logits

    monkeypatch.setattr(mock, "forward", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    names = ["a", None, "a"]
    result = generated(mock, PROMPTS[:3], GenerationConfig(max_new_tokens=4), names)
    timing = result.timing
    assert (timing.prefill_s, timing.decode_s) == pytest.approx((10, 9))
    assert (timing.prefill_tok_s, timing.decode_tok_s) == pytest.approx((1, 1))
    first = sum(len(row.tokens) for row in mock.steps[0])
    assert timing.time_to_first_token_s == pytest.approx(first + 0.25)
    assert result.adapter_s == pytest.approx({"a": 3 + 6 + 2 * 3, None: 1 + 3})


@pytest.mark.parametrize("adapter_slots", [1, 2])
def test_no_more_adapters_run_together_than_there_are_slots(
    backend: Backends, adapter_slots: int
) -> None:
    prompts = [[number] for number in range(1, 9)]
    adapters = ["a", None, "b", "a", "c", "c", None, "b"]
    config = GenerationConfig(max_new_tokens=5, num_return_sequences=2, do_sample=True, seed=1)
    free = generated(backend(slots=6), prompts, config, adapters)
    mock = backend(slots=6, adapter_slots=adapter_slots)
    bound = generated(mock, prompts, config, adapters)
    assert texts(bound) == texts(free)
    assert mock.adapters.most == adapter_slots
    assert not any(mock.adapters.pins.values())
