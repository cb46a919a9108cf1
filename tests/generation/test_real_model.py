"""Tiny real models: each of many requests gets the same result in a batch as alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import Backend
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.backends.native.backend import NativeBackend, state_bytes
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Completion, Engine, Finished, Request
from lite_runner.generation.draft_model import DraftModel
from lite_runner.generation.speculation import MOST_DRAFTED, StepCost
from lite_runner.native.model import BLOCK, NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights.lora.adapter import Adapter, LoraSize, pool_size
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from tests.generation.scenarios import begins, same
from tests.next_token import CASES, with_layer, write_with_layer
from tests.paths import FIXTURES

REQUESTS, SLOTS, LENGTH, VOCAB = 40, 5, 64, 96
# Of MindSpore's operators a text's logits differ with its company by float32 rounding: by this part
# of the largest logit at most. Tokens are the same wherever the two largest differ by more.
TOLERANCE = 1e-4
Key = tuple[int, int]


def adapters_of(case: str, config: Any, of: str = "") -> tuple[list[Adapter], LoraSize | None]:
    """One more than there is a slot for, where there are any for a model: of the weights with `of`
    in their names."""
    listing = FIXTURES / "adapters" / case / "lora_adapter.json"
    if not listing.exists():
        return [], None
    adapters = [
        replace(one, pairs={name: pair for name, pair in one.pairs.items() if of in name})
        for one in list(open_adapters(listing, config).values())[:3]
    ]
    return adapters, pool_size(adapters, len(adapters) - 1)


def random_requests(
    random: np.random.Generator, names: Sequence[str | None], *, greedy: bool = False
) -> Iterator[Request]:
    """Prompts that begin alike in part, with all that can be asked for; or greedy ones."""
    stems = random.integers(0, VOCAB, (3, 50)).astype(np.int32)
    stems[1, :20] = stems[0, :20]

    def one_of(*values: Any) -> Any:
        return values[random.integers(len(values))]

    for number in range(REQUESTS):
        tail = random.integers(0, VOCAB, random.integers(1, 8)).astype(np.int32)
        prompt = np.concatenate([one_of(*stems)[: random.integers(0, 50)], tail])
        options = GenerationConfig(max_new_tokens=int(random.integers(1, 8)), eos_token_id=(7, 8))
        if not greedy and random.random() < 0.15:
            options = replace(options, num_beams=one_of(2, 3), num_return_sequences=2)
        elif not greedy:
            options = replace(
                options,
                do_sample=one_of(True, True, False),
                temperature=one_of(0.7, 1.5),
                top_k=one_of(0, 20),
                top_p=one_of(1.0, 0.9),
                repetition_penalty=one_of(1.0, 1.2),
                num_return_sequences=one_of(1, 1, 2, 3, 6),
                logprobs=one_of(None, 2),
                prompt_logprobs=one_of(None, None, None, 2),
            )
        seed_key = int(random.integers(1000)), number
        yield Request(prompt, options, one_of(*names), seed_key, keep_logits=greedy)


class Heard:
    """The events of an engine: completions and logits by sequence of each request."""

    def __init__(self, backend: Backend, budget: int | None, *, prefix_cache: bool) -> None:
        self.engine = Engine(backend, budget, prefix_cache=prefix_cache)
        self.requests: dict[int, Request] = {}
        self.completions: dict[Key, Completion] = {}
        self.logits: dict[Key, list[NDArray[np.float32]]] = {}

    def add(self, request: Request) -> None:
        self.requests[self.engine.add(request)] = request

    def step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, Finished):
                self._finished(event)
            elif event.logits is not None:
                self.logits.setdefault((event.id, event.index), []).append(event.logits)

    def cancel(self, id: int) -> None:
        for event in self.engine.finish(id):
            self._finished(event)

    def _finished(self, event: Finished) -> None:
        self.completions[event.id, event.completion.return_index] = event.completion


def in_company(
    backend: Backend,
    requests: Sequence[Request],
    random: np.random.Generator,
    *,
    drafting: bool = False,
) -> Heard:
    """All of them in random order, a few at a time, some cancelled; prompts come in pieces.
    `drafting`: none comes while others run, since then no tokens are drafted."""
    info = backend.info
    heard = Heard(backend, info.slots + info.chunk + 8, prefix_cache=True)
    waiting = [requests[index] for index in random.permutation(len(requests))]
    while waiting or not heard.engine.idle:
        for _ in range(random.integers(0, 3) if heard.engine.idle or not drafting else 0):
            if waiting:
                heard.add(waiting.pop())
        if heard.requests and random.random() < 0.03:
            heard.cancel(int(random.integers(len(heard.requests))))
        heard.step()
    return heard


def alone(backend: Backend, request: Request) -> Heard:
    heard = Heard(backend, None, prefix_cache=False)
    heard.add(request)
    while not heard.engine.idle:
        heard.step()
    return heard


@pytest.mark.parametrize(
    ("case", "quant", "cache"),
    [
        ("llama", "none", "fp32"),  # with adapters
        ("qwen2", "none", "fp16"),  # with adapters
        ("bloom", "a16w8", "fp32"),  # with adapters
        ("qwen3", "a16w4", "int8"),  # with adapters
        ("mistral", "a8w8", "int8"),  # with adapters, a window
        ("gpt2", "a16w8", "int8"),  # with adapters
        ("mistral_long", "none", "fp32"),
        ("qwen2_window", "a16w8", "fp16"),
        ("llama_rope_dynamic", "a16w8", "fp32"),  # what is cached tells of its text's length
        ("llama_rope_yarn", "a16w8", "int8"),
        ("phi3_long", "a16w8", "fp32"),  # what is cached is another one beyond a length
        ("qwen3_next", "none", "fp32"),  # recurrent states
        ("granitemoehybrid", "a16w8", "fp16"),
    ],
)
def test_own_operators_to_the_bit(
    case: str,
    quant: Any,
    cache: Any,
    reference: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lite_runner.backends.native.slot_states.SPACING", 4)
    backend, adapters = own_operators(case, quant, cache, reference)
    together = check_to_the_bit(backend, adapters)
    shared = sum(one.cached_tokens > 0 for one in together.completions.values())
    assert (shared > 10) == backend.info.can_continue
    assert together.engine.scheduler.timing.preemptions == 0


@pytest.mark.parametrize(
    ("case", "quant", "cache"),
    [
        ("llama", "none", "fp16"),  # with adapters
        ("mistral", "a16w8", "int8"),  # with adapters, a window
        ("llama_rope_dynamic", "a16w8", "fp32"),  # what is cached tells of its text's length
        ("phi3_long", "none", "fp32"),  # what is cached is another one beyond a length
        ("qwen3_next_dense", "a16w8", "fp16"),  # recurrent states
    ],
)
def test_with_little_memory_to_the_bit(
    case: str,
    quant: Any,
    cache: Any,
    reference: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Enough for some of five sequences, all of which begin at once."""
    backend, adapters = own_operators(case, quant, cache, reference)
    assert backend._model is not None
    if backend.info.can_continue:
        monkeypatch.setattr("lite_runner.generation.slots.GroupMemory.fits", lambda *_: True)
    keys = 8 * backend._model.block_bytes(cache)
    backend.grow(SLOTS, 4 * BLOCK, keys + SLOTS * state_bytes(reference(case).config))
    together = check_to_the_bit(backend, adapters, times_prompt=7, times_new=4)
    preempted = together.engine.scheduler.timing.preemptions
    assert (preempted > 0) == backend.info.can_continue


def test_with_drafts_to_the_bit(
    reference: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model drafts for itself, in other bits: some drafts are refused, also by sampling."""
    monkeypatch.setattr(StepCost, "worth", lambda *_: MOST_DRAFTED)
    monkeypatch.setattr(DraftModel, "took", lambda *_: None)
    for case in ("llama", "qwen3_next", "granitemoehybrid"):  # adapters; recurrent states
        backend, adapters = own_operators(case, "none", "fp32", reference)
        backend.draft = own_operators(case, "a16w8", "int8", reference)[0]
        backend.grow(SLOTS, LENGTH)
        heard = check_to_the_bit(backend, adapters, longest_prompt=40, times_new=3)
        timing = heard.engine.scheduler.timing
        assert timing.drafted_tokens > 2 * timing.accepted_tokens > 60, case


def test_with_a_layer_that_predicts_a_further_token_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is wrong, one that is right in part, and one that always is: `agreeing_tensors`."""
    monkeypatch.setattr(StepCost, "most", lambda *_: MOST_DRAFTED)
    monkeypatch.setattr("lite_runner.backends.native.next_token.LATE", 6)
    for case in CASES:
        for share, least in ((None, 0), (0.02, 20), (0.0, 30)):
            folder = write_with_layer(case, tmp_path / f"{case}{share}", share)
            backend = with_layer(folder, SLOTS, LENGTH)
            heard = check_to_the_bit(backend, [], longest_prompt=40, times_new=3)
            timing = heard.engine.scheduler.timing
            assert timing.drafted_tokens > 100
            assert timing.drafted_tokens > timing.accepted_tokens >= least, (case, share)


def own_operators(
    case: str, quant: Any, cache: Any, reference: Callable[[str], Any]
) -> tuple[NativeBackend, list[Adapter]]:
    known = reference(case)
    adapters, lora = adapters_of(case, known.config)
    options = NativeOptions(SLOTS, LENGTH, cache=cache, lora=lora)
    weights = QuantizedWeights(known.tensors(quant), known.config)
    layers = pack(known.config, weights, lora, rounded_input=quant == "a8w8")
    return NativeBackend(known.config, layers, options, adapters), adapters


def check_to_the_bit(
    backend: NativeBackend,
    adapters: Sequence[Adapter],
    *,
    longest_prompt: int = LENGTH,
    times_prompt: int = 1,
    times_new: int = 1,
) -> Heard:
    """In company each request gets what it gets alone. `longest_prompt`: others are cut; then a
    request has as many times the tokens of `random_requests`."""
    random = np.random.default_rng(len(adapters))
    requests = list(random_requests(random, [None, *(one.name for one in adapters)]))
    requests = [
        replace(
            one,
            prompt=one.prompt[:longest_prompt].repeat(times_prompt) % backend.info.vocab_size,
            options=replace(one.options, max_new_tokens=times_new * one.options.max_new_tokens),
        )
        for one in requests
    ]
    drafts = backend.draft is not None or backend.next_token is not None
    together = in_company(backend, requests, random, drafting=drafts)
    backend.draft = backend.next_token = None
    assert backend.adapters is None or backend.adapters.loads >= len(adapters) > 1
    whole = 0
    for id, request in together.requests.items():
        wanted = alone(backend, request).completions
        for index in range(request.options.num_return_sequences):
            got = together.completions.get((id, index))
            if got is None or got.finish_reason == "interrupted":
                assert request.options.num_beams > 1 or (
                    got is not None and begins(got, wanted[0, index])
                )
                continue
            assert same(got, wanted[0, index])
            whole += 1
    assert whole > REQUESTS
    return together


@pytest.mark.parametrize("case", ["llama", "llama_rope_dynamic"])
def test_operators_of_mindspore(
    case: str, reference: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy tokens, as far as none before was a matter of rounding. Of one layer: half as much to
    compile, and to compute forty times."""
    monkeypatch.setattr("lite_runner.backends.LONGEST_CHUNK", 16)
    known = reference(case)
    config = replace(known.config, blocks=known.config.blocks[:1])
    adapters, lora = adapters_of(case, known.config, of=".layers.0.")
    options = MindSporeOptions(slots=SLOTS, length=LENGTH, lora=lora)
    backend = MindSporeBackend(config, ReadAhead(known.tensors()), options, adapters)
    assert backend.info.chunk == 16
    random = np.random.default_rng(len(case))
    names = [None, *(one.name for one in adapters)]
    together = in_company(backend, list(random_requests(random, names, greedy=True)), random)
    shared = sum(one.cached_tokens > 0 for one in together.completions.values())
    assert (shared > 3) == backend.info.can_continue
    checked = 0
    for id, request in together.requests.items():
        single = alone(backend, request)
        got, wanted = together.logits.get((id, 0), []), single.logits[0, 0]
        tokens, expected = together.completions[id, 0].drawn, single.completions[0, 0].drawn
        for place, logits in enumerate(got):
            allowed = TOLERANCE * np.abs(wanted[place]).max()
            assert np.abs(logits - wanted[place]).max() <= allowed
            second, first = np.sort(wanted[place])[-2:]
            if first - second <= 2 * allowed:
                break
            assert tokens[place] == expected[place]
            checked += 1
    assert checked > 2 * REQUESTS
