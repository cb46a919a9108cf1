"""/v1/chat/completions"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lite_runner.generation import Adjustments
from lite_runner.serving.completions import (
    chat_entry,
    of_prompt,
    prompt_logprobs,
    replayed,
    usage_of,
)
from lite_runner.serving.engine import Ended, Piece
from lite_runner.serving.errors import ApiError
from lite_runner.serving.metrics import RequestStats
from lite_runner.serving.sampling import adjustments, generation_options, grammar_for
from lite_runner.serving.schemas import ChatRequest
from lite_runner.serving.state import Server
from lite_runner.serving.thinking import Thinking, template_kwargs
from lite_runner.serving.tools import CallReader, ToolUse

Part = tuple[str, str, list[dict[str, Any]]]  # thinking, text, and calls as deltas have them
Change = Literal["begun", "added", "ended"]


@dataclass(slots=True)
class AnswerBlock:
    """A block so far: thinking, text or a call."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""  # of a call: its arguments
    id: str = ""  # of a call, as is its name
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a text, where asked for


class ChatCompletion:
    """One call: its prompt, and the answer in both forms."""

    def __init__(self, server: Server, body: ChatRequest, *, fills: bool = False) -> None:
        """`fills`: with less room than asked for, the answer uses what there is. Raises ApiError
        for what cannot be done."""
        self._server, self._body, self._fills = server, body, fills
        self.is_cut = False  # at the end of the context
        self._adapter = server.adapter_of(body.model)
        self._priority = server.priority_of(body.priority)
        self._adjustments = adjustments(body, server.engine.info.vocab_size)
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
        self._grammar = grammar_for(body)
        self._tools: ToolUse | None = None
        if body.tools and body.tool_choice != "none":
            self._tools = ToolUse(body, server.tokenizer, server.call_format, self._grammar)
            self._grammar = self._tools.grammar
        self._thinking = Thinking(body, server.tokenizer)
        self._template_kwargs = template_kwargs(body, server.tokenizer)
        self.ended: Ended | None = None  # once the blocks are over
        self.streams = bool(body.stream)
        self.is_large = body.prompt_logprobs is not None  # see Completions
        self._readers: list[CallReader] = []  # of each answer, where there are tools
        if self._tools is not None:
            self._readers = [self._tools.reader() for _ in range(body.n or 1)]

    async def encode(self) -> list[int]:
        """The token ids of the messages. Raises ApiError for messages that the template refuses."""
        body = self._body
        generates = body.add_generation_prompt is not False
        tools = self._tools.definitions if self._tools is not None else None
        return await self._server.encode_chat(
            body.messages, generates, tools, self._template_kwargs
        )

    async def prepare(self) -> None:
        """Render and tokenize the messages. Raises ApiError where they do not fit."""
        body, server = self._body, self._server
        self._prompt = await self.encode()
        self._thinking.follow(self._prompt)
        info = server.engine.info
        room = info.max_length - len(self._prompt)
        if self._fills and body.max_tokens is not None and body.max_tokens > room > 0:
            self.is_cut, body.max_tokens = True, room
        self._options = generation_options(body, server.defaults, self._prompt, info)
        grammar = self._thinking.around(self._grammar)
        restricted = await server.restricted(self._adjustments, grammar) or Adjustments()
        calls = self._tools is not None
        guide = self._thinking.guide(restricted.guide, calls=calls)
        restricted = replace(restricted, guide=guide)
        self._adjustments = None if restricted == Adjustments() else restricted
        self.stats = RequestStats(server.metrics, [len(self._prompt)], body.n or 1)
        self._thoughts = [self._thinking.reader() for _ in range(body.n or 1)]
        if self._thoughts[0] is not None:
            self.stats.usage.reasoning = 0

    def replayed(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request body that reproduces the answer."""
        return replayed(body, self._body)

    async def whole(self) -> dict[str, Any]:
        texts: dict[int, str] = {}
        thoughts: dict[int, str] = {}
        content: dict[int, list[Any]] = {}
        ended: dict[int, Ended] = {}
        async with aclosing(self.parts()) as parts:
            async for output, (thought, text, _) in parts:
                texts[output.index] = texts.get(output.index, "") + text
                thoughts[output.index] = thoughts.get(output.index, "") + thought
                if isinstance(output, Ended):
                    ended[output.index] = output
                elif output.logprobs is not None:
                    entry = chat_entry(self._server.tokenizer, output.token, output.logprobs)
                    content.setdefault(output.index, []).append(entry)
        choices = [
            {
                "index": index,
                "message": self._message(index, texts[index], thoughts[index]),
                "logprobs": {"content": content.get(index, []), "refusal": None}
                if self._body.logprobs
                else None,
                "finish_reason": self.reason(ended[index]),
            }
            for index in sorted(ended)
        ]
        answer = self._head | {"choices": choices, "usage": usage_of(self.stats.usage)}
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = await self._prompt_logprobs(ended[0])
        return answer

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The streamed answer: first the role, then a chunk for each token."""
        body, begun = self._body, False
        async with aclosing(self.parts()) as parts:
            async for output, (thought, text, calls) in parts:
                if not begun:  # not earlier: a refused request is not begun
                    begun = True
                    for index in range(body.n or 1):
                        head = self._chunk(index, {"role": "assistant", "content": ""})
                        if body.prompt_logprobs is not None and index == 0:
                            head["prompt_logprobs"] = await self._prompt_logprobs(output)
                        yield head
                delta: dict[str, Any] = _reasoning(thought) if thought else {"content": text}
                if thought and text:
                    delta["content"] = text
                if calls:
                    delta["tool_calls"] = calls
                if isinstance(output, Piece):
                    found = None
                    if output.logprobs is not None:
                        entry = chat_entry(self._server.tokenizer, output.token, output.logprobs)
                        found = {"content": [entry], "refusal": None}
                    yield self._chunk(output.index, delta, found)
                    continue
                if thought or text or calls:
                    yield self._chunk(output.index, delta)
                yield self._chunk(output.index, {}, reason=self.reason(output))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield self._head | {"choices": [], "usage": usage_of(self.stats.usage)}

    async def _prompt_logprobs(self, output: Piece | Ended) -> list[dict[str, Any] | None]:
        """Made in another thread: there may be thousands."""
        tokenizer, found = self._server.tokenizer, of_prompt(output)
        return await self._server.aside(lambda: prompt_logprobs(tokenizer, self._prompt, found))

    async def parts(self) -> AsyncGenerator[tuple[Piece | Ended, Part], None]:
        """The outputs, and the parts of thinking, text and calls that each makes certain."""
        work = [(self._prompt, self._options)]
        special = self._thinking.keeps_special or (
            self._tools is not None and self._tools.keeps_special
        )
        answer = self._server.answer(
            work, self._adapter, self._adjustments, self._priority, special_tokens=special
        )
        async with answer as outputs, aclosing(self.stats.follow(outputs)) as followed:
            async for _, output in followed:
                yield output, self._read(output)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last chunk of a stream that is cut."""
        return error.body()

    async def blocks(self) -> AsyncGenerator[tuple[Change, AnswerBlock, str, list[Any]], None]:
        """The only answer in blocks, one after the other, with the text that is added to one and
        its log-probabilities. How it ended is in `ended` then."""
        block: AnswerBlock | None = None
        entries: list[dict[str, Any]] = []  # of tokens whose text is held back
        async with aclosing(self.parts()) as parts:
            async for output, (thought, text, calls) in parts:
                if isinstance(output, Piece) and output.logprobs is not None:
                    tokenizer = self._server.tokenizer
                    entries.append(chat_entry(tokenizer, output.token, output.logprobs))
                for new, added in _added(thought, text, calls):
                    if block is None or new.id or new.kind != block.kind:
                        if block is not None:
                            yield "ended", block, "", []
                        block = new
                        yield "begun", block, "", []
                    block.text += added
                    of_text, entries = entries if block.kind == "text" else [], []
                    block.logprobs += of_text
                    if added:
                        yield "added", block, added, of_text
                if isinstance(output, Ended):
                    self.ended = output
        if block is not None:
            yield "ended", block, "", []

    def _read(self, output: Piece | Ended) -> Part:
        thought, text, last = "", output.text, isinstance(output, Ended)
        if (thoughts := self._thoughts[output.index]) is not None:
            before = thoughts.stage
            thought, text = thoughts.put(text, last=last)
            if not last and "inside" in (before, thoughts.stage):
                self.stats.usage.reasoning = (self.stats.usage.reasoning or 0) + 1
        calls: list[dict[str, Any]] = []
        if self._readers:
            reader = self._readers[output.index]
            text, calls = reader.put(text, last=last)
            if isinstance(output, Ended) and output.finish_reason == "stop":
                reader.check()
        return thought if self._thinking.is_returned else "", text, calls

    def _message(self, index: int, text: str, thought: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= {"refusal": None, "annotations": []}
        if thought:
            message |= {"content": text or None, **_reasoning(thought)}
        if self._readers and (calls := self._readers[index].calls):
            message |= {"content": text or None, "tool_calls": calls}
        return message

    def reason(self, ended: Ended) -> str:
        """finish_reason of a sequence."""
        called = bool(self._readers) and bool(self._readers[ended.index].calls)
        return "tool_calls" if called and ended.finish_reason == "stop" else ended.finish_reason

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"choices": [choice]}


def _added(
    thought: str, text: str, calls: list[dict[str, Any]]
) -> Iterator[tuple[AnswerBlock, str]]:
    """The texts of a delta, each with the block that it may begin."""
    if thought:
        yield AnswerBlock("thinking"), thought
    if text:
        yield AnswerBlock("text"), text
    for call in calls:
        function = call["function"]
        yield (
            AnswerBlock("call", id=call.get("id", ""), name=function.get("name", "")),
            function["arguments"],
        )


def _reasoning(text: str) -> dict[str, str]:
    """Thinking by vLLM's name, and by the older one."""
    return {"reasoning": text, "reasoning_content": text}
