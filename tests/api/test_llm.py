"""LLM: completions, answers and streams of a model in a program."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lite_runner import LLM, AutoTokenizer, Output, Outputs, pipeline
from lite_runner.errors import ConfigError

PROMPTS = ["I love Beijing, because", "LLaMA is a"]
CHAT = [{"role": "user", "content": "Hello"}]
OPTIONS = {"max_new_tokens": 6, "eos_token_id": []}


TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained("tiny_qwen2").save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with LLM("tiny_qwen2", tokenizer, backend="native") as opened:
        yield opened


def test_completions_equal_a_pipelines(llm: LLM) -> None:
    texts = pipeline("text_generation", "tiny_qwen2", **OPTIONS)(PROMPTS)
    found = llm.generate(PROMPTS, **OPTIONS)
    assert [one.prompt for one in found] == PROMPTS
    assert [one.prompt + one.text for one in found] == [
        entry["text_generation_text"][0] for entry in texts
    ]
    assert [(len(one.token_ids), one.finish_reason) for one in found] == [(6, "length")] * 2
    assert str(found[0]) == found[0].text


def test_one_prompt_is_a_text_or_its_ids(llm: LLM) -> None:
    (of_text,) = llm.generate(PROMPTS[0], **OPTIONS)
    ids = llm.tokenizer.core.encode(PROMPTS[0])
    for same in (ids, np.array(ids), [ids]):
        (of_ids,) = llm.generate(same, **OPTIONS)
        assert of_ids.token_ids == of_text.token_ids and of_ids.prompt_tokens == len(ids)
        assert of_ids.cached_tokens > 0
    several = llm.generate(PROMPTS[0], num_return_sequences=2, temperature=1.0, seed=1, **OPTIONS)
    assert len(several) == 2 and {one.prompt for one in several} == {PROMPTS[0]}


def test_a_stream_is_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], **OPTIONS)
    assert "".join(llm.stream(PROMPTS[0], **OPTIONS)) == whole.text
    stop = whole.text[3:5]
    (cut,) = llm.generate(PROMPTS[0], stop=stop, **OPTIONS)
    assert "".join(llm.stream(PROMPTS[0], stop=stop, **OPTIONS)) == cut.text != whole.text
    (answer,) = llm.chat(CHAT, **OPTIONS)
    assert "".join(llm.stream(CHAT, **OPTIONS)) == answer.text


def test_stop_texts_of_the_model_are_cut(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], **OPTIONS)
    stop = whole.text[3:5]
    with LLM("tiny_qwen2", llm.tokenizer, backend="native", stop=stop) as stopping:
        (cut,) = stopping.generate(PROMPTS[0], **OPTIONS)
        assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
        assert "".join(stopping.stream(PROMPTS[0], **OPTIONS)) == cut.text
        pipe = pipeline("text_generation", stopping._model, llm.tokenizer)
        (text,) = pipe(PROMPTS[0], **OPTIONS)[0]["text_generation_text"]
        assert text == PROMPTS[0] + cut.text
        (other,) = stopping.generate(PROMPTS[0], stop=[], **OPTIONS)
        assert other.text == whole.text


def test_answers_are_texts_alone(llm: LLM) -> None:
    for option in ({"logprobs": 2}, {"output_scores": True}, {"return_dict_in_generate": True}):
        with pytest.raises(ConfigError) as caught:
            llm.generate(PROMPTS[0], **option)
        assert caught.value.hint.startswith("model.generate(ids, "), option


def test_a_stream_that_is_left_ends(llm: LLM) -> None:
    threads = threading.active_count()
    for _ in llm.stream(PROMPTS[0], max_new_tokens=200, eos_token_id=[]):
        break
    assert threading.active_count() == threads
    with pytest.raises(ConfigError, match="foo: no such option"):
        list(llm.stream(PROMPTS[0], foo=1))


def test_a_task_that_is_cancelled_ends_its_stream(llm: LLM) -> None:
    threads = threading.active_count()

    async def read(started: asyncio.Event) -> None:
        async for _ in llm.astream(PROMPTS[0], max_new_tokens=200, eos_token_id=[]):
            started.set()

    async def cancelled() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(read(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [one.name for one in threading.enumerate()].count("stream") == 0

    asyncio.run(cancelled())
    assert threading.active_count() == threads


def test_conversations(llm: LLM) -> None:
    both = llm.chat([CHAT, [*CHAT, {"role": "assistant", "content": "Hi"}, *CHAT]], **OPTIONS)
    (first,) = llm.chat(CHAT, **OPTIONS)
    assert both[0].text == first.text and both[1].prompt_tokens > both[0].prompt_tokens
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    (completion,) = llm.chat(CHAT, guided_json=schema, max_new_tokens=40)
    assert set(json.loads(completion.text)) == {"a"}
    with pytest.raises(ConfigError, match="does not read 'no_such'"):
        llm.chat(CHAT, chat_template_kwargs={"no_such": True})


def test_other_tasks_go_on(llm: LLM) -> None:
    async def ask() -> tuple[Outputs, Outputs, str]:
        found, answered = await asyncio.gather(
            llm.agenerate(PROMPTS, **OPTIONS), llm.achat(CHAT, **OPTIONS)
        )
        return found, answered, "".join([one async for one in llm.astream(CHAT, **OPTIONS)])

    found, answered, streamed = asyncio.run(ask())
    assert [one.text for one in found] == [one.text for one in llm.generate(PROMPTS, **OPTIONS)]
    assert answered[0].text == streamed


@pytest.mark.parametrize("given", [3, [], [3.5], [CHAT], None])
def test_invalid_prompts_are_refused(llm: LLM, given: Any) -> None:
    if given == []:
        assert llm.generate(given) == []
        return
    with pytest.raises((ConfigError, TypeError)):
        llm.generate(given)
    with pytest.raises(ConfigError, match="expected a list of messages"):
        llm.chat("Hello")


def test_a_notebook_shows_a_table() -> None:
    one = Output([{"role": "user", "content": "<b>"}], "a & b", [1, 2], "stop", 3, 0)
    shown = Outputs([one])._repr_html_()
    assert "user: &lt;b&gt;" in shown and "a &amp; b" in shown and "<td>2, stop</td>" in shown
    assert one._repr_html_() == shown
