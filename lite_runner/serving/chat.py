"""/v1/chat/completions"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from lite_runner.serving.collect import Progress
from lite_runner.serving.completions import prompt_logprobs, usage_of
from lite_runner.serving.engine import Ended, Piece
from lite_runner.serving.errors import ApiError
from lite_runner.serving.sampling import adjustments, generation_options
from lite_runner.serving.schemas import ChatRequest, Message
from lite_runner.serving.state import Server
from lite_runner.serving.structured import grammar_of
from lite_runner.serving.text_logprobs import chat_entry


class ChatCompletion:
    """One call: its prompt, and the answer in both forms."""

    def __init__(self, server: Server, body: ChatRequest) -> None:
        """Raises ApiError for what cannot be done."""
        self._server, self._body = server, body
        self._adapter = server.adapter_of(body.model)
        self._adjustments = adjustments(body, server.engine.info.vocab_size)
        self._grammar = grammar_of(body)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or server.name,
        }
        if not server.tokenizer.has_chat_template:
            raise ApiError(
                400, f"model: {server.name} has no chat template; use /v1/completions", "model"
            )

    async def prepare(self) -> None:
        """Render and tokenize the messages. Raises ApiError where they do not fit."""
        body, server = self._body, self._server
        messages = plain_messages(body.messages)
        generates = body.add_generation_prompt is not False
        self._prompt = await server.encode(
            lambda: server.tokenizer.encode_chat(messages, generates)
        )
        context = server.engine.info.max_length
        self._options = generation_options(body, server.defaults, len(self._prompt), context)
        self._adjustments = await server.restricted(self._adjustments, self._grammar)
        self.progress = Progress(server, [len(self._prompt)], body.n or 1)

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        texts: dict[int, str] = {}
        content: dict[int, list[Any]] = {}
        ended: dict[int, Ended] = {}
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                texts[output.index] = texts.get(output.index, "") + output.text
                if isinstance(output, Ended):
                    ended[output.index] = output
                elif output.logprobs is not None:
                    entry = chat_entry(self._server.tokenizer, output.token, output.logprobs)
                    content.setdefault(output.index, []).append(entry)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": texts[index], "refusal": None},
                "logprobs": {"content": content.get(index, []), "refusal": None}
                if self._body.logprobs
                else None,
                "finish_reason": ended[index].finish_reason,
            }
            for index in sorted(ended)
        ]
        answer = self._head | {"choices": choices, "usage": usage_of(self.progress.usage)}
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(
                self._server, self._prompt, ended[0].completion
            )
        return answer

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as it comes: first the role, then a chunk for each token."""
        body, begun = self._body, False
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                if not begun:  # not earlier: what cannot be done is not begun
                    begun = True
                    for index in range(body.n or 1):
                        yield self._chunk(index, {"role": "assistant", "content": ""})
                if isinstance(output, Piece):
                    found = None
                    if output.logprobs is not None:
                        entry = chat_entry(self._server.tokenizer, output.token, output.logprobs)
                        found = {"content": [entry], "refusal": None}
                    yield self._chunk(output.index, {"content": output.text}, found)
                    continue
                if output.text:
                    yield self._chunk(output.index, {"content": output.text})
                yield self._chunk(output.index, {}, reason=output.finish_reason)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield self._head | {"choices": [], "usage": usage_of(self.progress.usage)}

    async def _outputs(self) -> AsyncGenerator[Piece | Ended, None]:
        work = [(self._prompt, self._options)]
        priority = self._body.priority or 0
        answer = self._server.answer(work, self._adapter, self._adjustments, priority)
        async with answer as outputs, aclosing(self.progress.follow(outputs)) as followed:
            async for _, output in followed:
                yield output

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"choices": [choice]}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates take them."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
        }
        for message in messages
    ]
