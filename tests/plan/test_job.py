"""Jobs: prompts with all that each has of its own, as the scheduler takes them."""

from __future__ import annotations

from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import Request
from lite_runner.plan.job import Job

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
