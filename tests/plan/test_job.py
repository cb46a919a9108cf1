"""Jobs: prompts with all that each has of its own, as the scheduler takes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.parallel import Ranks
from lite_runner.config.prompt import Request
from lite_runner.model.adapters import AdapterJob
from lite_runner.plan import Job, fit
from lite_runner.run_modes import heads, resolve
from tests.models import model_named

SHARED = GenerationConfig(max_new_tokens=4, seed=7)


def test_each_prompt_is_asked_with_its_own_options() -> None:
    requests = [
        Request("a", priority=-1),
        Request("b", seed=3, do_sample=True, top_k=2, stop="x"),
        Request("c", logprobs=1, prompt_logprobs=0),
    ]
    asked = Job(
        requests, [[1], [2], [3]], SHARED, slots=3, length=9, first_index=5
    ).scheduler_requests()
    assert [one.priority for one in asked] == [-1, 0, 0]
    assert [one.seed_key for one in asked] == [(7, 5), (3, 0), (7, 7)]
    drawn = GenerationConfig(max_new_tokens=4, seed=3, do_sample=True, top_k=2, stop=("x",))
    needs_prompt_logits = GenerationConfig(max_new_tokens=4, seed=7, logprobs=1, prompt_logprobs=0)
    assert [one.options for one in asked] == [SHARED, drawn, needs_prompt_logits]


def test_a_job_is_scored_where_one_prompt_asks_for_it() -> None:
    def job(*requests: Request) -> Job:
        return Job(requests, [[1]] * len(requests), SHARED, slots=2, length=9)

    assert not job(Request("a"), Request("b", logprobs=5)).needs_prompt_logits
    assert job(Request("a"), Request("b", prompt_logprobs=0)).needs_prompt_logits
    assert Job((), (), SHARED, slots=1, length=9, all_logits=True).needs_prompt_logits


@pytest.mark.parametrize(("tokenizers", "kept"), [(9, 9), (None, None), ("none", 256)])
def test_a_prompt_that_is_cut_keeps_the_tokenizers_bos(
    tokenizers: object, kept: int | None
) -> None:
    """Which may be another than the model's, or none; only without a tokenizer the model knows."""
    model = replace(model_named("tiny_llama"), bos_token_id=256)
    tokenizer = None
    if tokenizers != "none":
        tokenizer = SimpleNamespace(bos_token_id=tokenizers, eos_token_ids=(7,))
    start = 256 if kept is None else kept
    long = [start, *(number % 250 for number in range(400))]
    options, files = GenerationConfig(max_new_tokens=6), SimpleNamespace(model=model)
    tokens = [long, [start, 1]]
    job = fit(options, files, tokenizer, tokens, truncate="left", structured={})  # type: ignore[arg-type]
    longest = model.seq_length - 6
    assert len(job.tokens[0]) == longest and job.tokens[1] == [start, 1]
    if kept is None:
        assert job.tokens[0] == long[-longest:]
    else:
        assert job.tokens[0] == [kept, *long[-longest + 1 :]]


@pytest.mark.parametrize(("prompts", "cuts"), [(3, [0, 2, 3]), (4, [0, 2, 4]), (1, [0, 1, 1])])
def test_a_replicas_prompts_have_their_own_adapters(prompts: int, cuts: list[int]) -> None:
    names = ["en", None, "zh", "en"][:prompts]
    requests = [Request(str(number)) for number in range(prompts)]
    tokens = [[number + 1] for number in range(prompts)]
    whole = Job(requests, tokens, SHARED, slots=2, length=9, adapters=AdapterJob((), names))
    for replica, (first, end) in enumerate(pairwise(cuts)):
        mine = whole.share(Ranks(replica, 2, 1))
        assert mine.tokens == tokens[first:end] and mine.requests == requests[first:end]
        assert mine.first_index == first and mine.length == 9
        found = [mine.adapter_name(first + place) for place in range(end - first)]
        assert found == names[first:end]
        assert mine.adapters is not None and mine.adapters.of_prompts == names[first:end]
        assert [one.adapter for one in mine.scheduler_requests()] == names[first:end]
        drawn = [one.seed_key for one in mine.scheduler_requests()]
        assert drawn == [(SHARED.seed, number) for number in range(first, end)]


@pytest.mark.parametrize(("prompts", "copies"), [(7, 3), (2, 4), (4, 2), (1, 1)])
def test_prompts_are_shared_evenly_and_in_order(prompts: int, copies: int) -> None:
    config, _ = resolve(parse(["model=tiny_llama", "predict_data=hi"], heads()))
    every = [Request(str(index)) for index in range(prompts)]
    whole = Job(every, [[index] for index in range(prompts)], config.generation(), prompts, 9)
    parts = [whole.share(Ranks(rank, copies)) for rank in range(copies)]
    assert [one for part in parts for one in part.requests] == every
    assert max(len(part.tokens) for part in parts) - min(len(part.tokens) for part in parts) <= 1
    assert [part.first_index for part in parts if part.requests] == [
        int(part.requests[0].text) for part in parts if part.requests
    ]
    assert len(parts[0].tokens) >= 1  # rank 0, which writes the results, always has work
