"""LLM: a model to ask from a program or a notebook, without MindFormers' names."""

from __future__ import annotations

import asyncio
import html
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lite_runner.api.auto_model import AutoModel
from lite_runner.api.loaded_model import AdapterIds
from lite_runner.api.model import texts_of
from lite_runner.api.options import stop_texts
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.config import show
from lite_runner.config.generation import FinishReason
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.text.spelling import StopChecker

Prompt = str | Sequence[int]  # a text, or its token ids
Messages = Sequence[Mapping[str, Any]]  # a conversation: [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Output:
    """A completion, or an answer, of a prompt or a conversation."""

    prompt: Prompt | Messages
    text: str
    token_ids: list[int]  # without the token that ended it
    finish_reason: FinishReason  # stop: by itself or at a stop text; length: no room was left
    prompt_tokens: int
    cached_tokens: int  # of the prompt's, computed by an earlier call

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return Outputs([self])._repr_html_()


class Outputs(list[Output]):
    """Outputs in the order of their prompts; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr>{_cell(_prompt_text(one.prompt))}{_cell(one.text)}"
            f"<td>{len(one.token_ids)}, {one.finish_reason}</td></tr>"
            for one in self
        )
        head = "<tr><th>prompt</th><th>text</th><th>tokens</th></tr>"
        return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


class LLM:
    """A model, loaded at the first call, whose KV cache keeps the prefixes of earlier ones.

        with LLM("smollm2_135m", quant="a16w8") as llm:
            print(llm.generate("The capital of France is", max_new_tokens=8)[0])

    Calls from several threads or tasks take turns: prompts in a list are computed together.
    """

    def __init__(
        self, model: str | Path, tokenizer: PreTrainedTokenizer | None = None, **settings: Any
    ) -> None:
        """`model`: a name, a folder or a file, as model= of the command line takes it; `tokenizer`:
        None takes the model's own; `settings` are the other keys (backend, quant, kv_cache,
        adapter_path, threads, ...), and defaults of every call. Raises ConfigError,
        ArtifactError."""
        self._model = AutoModel.from_pretrained(model, **settings)
        self.tokenizer = tokenizer or self._model.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, adapter_id: AdapterIds = None, **options: Any
    ) -> Outputs:
        """The completions of one prompt (a text or its token ids) or of several.

        `options` are the keys of predict (max_new_tokens, temperature, top_p, stop, guided_json,
        num_return_sequences, ...); the sequences of one prompt are neighbours. `adapter_id`: a name
        of adapter_path's, or one for each prompt. Raises ConfigError for what is unknown.
        """
        asked = [prompts] if _is_prompt(prompts) else list(prompts)
        return self._outputs(asked, [self._ids(one) for one in asked], adapter_id, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter_id: AdapterIds = None,
        **options: Any,
    ) -> Outputs:
        """The answers to one conversation or to several.

        `tools` are as OpenAI's protocol has them, `chat_template_kwargs` variables of the model's
        template (enable_thinking, ...), all else as in `generate`.
        """
        one = isinstance(messages, str) or _is_conversation(messages)
        asked = [messages] if one else list(messages)
        ids = [self._chat_ids(each, tools, chat_template_kwargs) for each in asked]
        return self._outputs(asked, ids, adapter_id, options)

    def stream(
        self,
        prompt: Prompt | Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter_id: str | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The text of one prompt's completion, or of the answer to one conversation, piece by piece
        as it becomes certain. To leave the loop ends the generation."""
        if _is_conversation(prompt):
            ids = self._chat_ids(prompt, tools, chat_template_kwargs)
        else:
            ids = self._ids(prompt)
        core = self.tokenizer.core
        pieces = _Pieces(StopChecker(core, stop_texts(options, self._model.config), continues=True))

        def work() -> None:
            try:
                self._model.complete(
                    *([ids], options),
                    streamer=pieces,
                    tokenizer=self.tokenizer,
                    adapter_id=adapter_id,
                )
            except _Left:
                pass
            except BaseException as error:
                pieces.put_last(error)
            else:
                pieces.put_last(None)

        thread = threading.Thread(target=work, name="stream", daemon=True)
        thread.start()
        try:
            yield from pieces
        finally:
            pieces.left = True
            thread.join()

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], *, adapter_id: AdapterIds = None, **options: Any
    ) -> Outputs:
        """`generate`, while other tasks go on."""
        return await asyncio.to_thread(self.generate, prompts, adapter_id=adapter_id, **options)

    async def achat(self, messages: Messages | Sequence[Messages], **options: Any) -> Outputs:
        """`chat`, while other tasks go on."""
        return await asyncio.to_thread(self.chat, messages, **options)

    async def astream(self, prompt: Prompt | Messages, **options: Any) -> AsyncIterator[str]:
        """`stream`, while other tasks go on."""
        pieces = self.stream(prompt, **options)
        waiting: asyncio.Future[str | None] | None = None
        try:
            while True:
                waiting = asyncio.ensure_future(asyncio.to_thread(next, pieces, None))
                # A task that is cancelled must not leave the thread with the generator.
                piece = await asyncio.shield(waiting)
                if piece is None:
                    return
                yield piece
        finally:
            if waiting is not None:
                await asyncio.wait([waiting])
            await asyncio.to_thread(pieces.close)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Free the weights and the KV cache; the next call reads them again."""
        self._model.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self._model.described})"

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.core.encode(prompt)
        if not _is_prompt(prompt):
            raise ConfigError(f"prompt: got {show(prompt)}, expected a string or token ids")
        return [int(token) for token in prompt]

    def _chat_ids(
        self,
        messages: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> list[int]:
        if not _is_conversation(messages):
            raise ConfigError(
                f"messages: got {show(messages)}, expected a list of messages",
                "[{'role': 'user', 'content': 'Hello'}]",
            )
        return self.tokenizer.core.encode_chat(
            [dict(one) for one in messages],
            tools=[dict(tool) for tool in tools or ()] or None,
            template_kwargs=kwargs,
        )

    def _outputs(
        self,
        asked: Sequence[Any],
        ids: list[list[int]],
        adapter_id: AdapterIds,
        options: Mapping[str, Any],
    ) -> Outputs:
        found = self._model.complete(ids, options, tokenizer=self.tokenizer, adapter_id=adapter_id)
        texts = texts_of(found, self.tokenizer.core, stop_texts(options, self._model.config))
        return Outputs(
            Output(
                prompt=asked[one.prompt_index],
                text=text,
                token_ids=one.token_ids,
                finish_reason=one.finish_reason,
                prompt_tokens=len(ids[one.prompt_index]),
                cached_tokens=one.cached_tokens,
            )
            for one, text in zip(found, texts, strict=True)
        )


class _Left(Exception):
    """Nobody reads the stream any more."""


class _Pieces:
    """A streamer whose pieces of text another thread iterates over."""

    def __init__(self, checker: StopChecker) -> None:
        self.left = False
        self._checker = checker
        self._at_prompt = True
        self._queue: queue.Queue[str | BaseException | None] = queue.Queue()

    def put(self, value: Any) -> None:
        """Take the prompt's ids, which are not generated text, then each new one."""
        if self.left:
            raise _Left
        at_prompt, self._at_prompt = self._at_prompt, False
        if not at_prompt:
            for token in np.atleast_1d(np.asarray(value)).reshape(-1):
                self._queue.put(self._checker.put(int(token)))

    def end(self) -> None:
        """Release text that was held back as a possible start of a stop text."""
        self._queue.put(self._checker.finish())

    def put_last(self, error: BaseException | None) -> None:
        """End the iteration, by an error if there was one."""
        self._queue.put(error)

    def __iter__(self) -> Iterator[str]:
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            if piece:
                yield piece


def _is_of(value: Any, kind: type) -> bool:
    """True for a sequence of this kind that is not empty."""
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        return False
    return len(value) > 0 and all(isinstance(one, kind) for one in value)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _is_of(value, int) or _is_of(value, np.integer)


def _is_conversation(value: Any) -> bool:
    return _is_of(value, Mapping)


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if _is_conversation(prompt):
        return "\n".join(f"{one.get('role')}: {one.get('content')}" for one in prompt)
    return f"{len(prompt)} token ids"


def _cell(text: str) -> str:
    return f'<td style="text-align:left; white-space:pre-wrap">{html.escape(text)}</td>'
