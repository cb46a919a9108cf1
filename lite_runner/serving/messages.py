"""/v1/messages and its count_tokens: Anthropic's protocol, over a chat completion."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from lite_runner.serving.chat import AnswerBlock, ChatCompletion
from lite_runner.serving.engine import Ended
from lite_runner.serving.errors import ApiError, of_validation
from lite_runner.serving.metrics import RequestStats, Usage
from lite_runner.serving.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    MAX_TOOLS,
    Cached,
    ChatRequest,
    RequestBody,
    as_format,
    as_function,
    only,
)
from lite_runner.serving.state import Server
from lite_runner.system.files import parse_json
from lite_runner.text.thinking import thinking_marks
from lite_runner.text.tokenizer import Tokenizer


class TextBlock(Cached):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, only([])] = None


class ThinkingBlock(Cached):
    """Thinking in an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestBody):
    """Thinking of another model, which only that model can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Cached):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


Texts = str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ToolResultBlock(Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None  # the content says so


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ToolDefinition(Cached):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None  # forced calls always are
    eager_input_streaming: bool | None = None
    defer_loading: Annotated[Any, only(False)] = None
    allowed_callers: Annotated[Any, only(["direct"])] = None
    input_examples: Annotated[Any, only([])] = None


class ToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    # Of thinking, where the chat template reads reasoning_effort.
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingSwitch(RequestBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ContextEdit(RequestBody):
    type: Literal["clear_thinking_20251015"]
    keep: Any = None  # the chat template has the thinking of the turns that it was made for


class ContextManagement(RequestBody):
    edits: Annotated[list[ContextEdit], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class CountTokens(Cached):
    """/v1/messages/count_tokens"""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSwitch | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    speed: Annotated[Any, only("standard")] = None
    user_profile_id: str | None = None  # the user; ignored, as is the next
    workspace_id: str | None = None


class MessagesRequest(CountTokens):
    """/v1/messages"""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    service_tier: Annotated[Any, only("auto", "standard_only")] = None
    seed: int | None = None  # not Anthropic's: an answer can be asked for again
    # About the client; of no effect on the answer.
    metadata: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    mcp_servers: Annotated[Any, only([])] = None


def chat_request(body: CountTokens, tokenizer: Tokenizer) -> ChatRequest:
    """The request in OpenAI's form. Raises ApiError for features that it lacks."""
    given: dict[str, Any] = {"model": body.model, "messages": list(_messages(body))}
    if isinstance(body, MessagesRequest):
        given |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "seed": body.seed,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    if body.tools:
        given["tools"] = list(map(as_function, body.tools))
    if (choice := body.tool_choice) is not None:
        words = {"any": "required", "tool": as_function(choice)}
        given["tool_choice"] = words.get(choice.type, choice.type)
        given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    thinks = thinking_marks(tokenizer.chat_template) is not None
    if (thinking := body.thinking) is not None and thinks:  # it may: a model that cannot does not
        if thinking.type in ("enabled", "disabled"):
            given["enable_thinking"] = thinking.type == "enabled"
        given["thinking_token_budget"] = thinking.budget_tokens
        given["include_reasoning"] = thinking.display != "omitted"
    if (output := body.output_config) is not None:
        if output.effort and tokenizer.template_reads("reasoning_effort"):
            given["reasoning_effort"] = "xhigh" if output.effort == "max" else output.effort
        if output.format is not None:
            given["response_format"] = as_format(output.format.schema_)
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise of_validation(error) from None


def _messages(body: CountTokens) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own."""
    if body.system:
        yield {"role": "system", "content": _text(body.system)}
    for place, message in enumerate(body.messages):
        blocks = message.content
        if isinstance(blocks, str):
            yield {"role": message.role, "content": blocks}
            continue
        read = [block for block in blocks if not isinstance(block, RedactedThinkingBlock)]
        if message.role == "assistant":
            yield from _of_assistant(place, read)
        else:
            yield from _of_others(place, read, message.role)


def _misplaced(place: int, block: ContentBlock, role: str) -> ApiError:
    field = f"messages.{place}.content"
    why = f"{block.type} is not in a message of the {role}"
    return ApiError(400, f"{field}: {why}", field, "invalid_value")


def _of_others(place: int, blocks: Sequence[ContentBlock], role: str) -> Iterator[dict[str, Any]]:
    for is_text, run in itertools.groupby(blocks, lambda block: isinstance(block, TextBlock)):
        if is_text:
            yield {"role": role, "content": _joined(run)}
            continue
        for block in run:
            if role == "system" or not isinstance(block, ToolResultBlock):
                raise _misplaced(place, block, role)
            content = _text(block.content or "")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _of_assistant(place: int, blocks: Sequence[ContentBlock]) -> Iterator[dict[str, Any]]:
    turn: dict[str, Any] = {}
    if texts := [block for block in blocks if isinstance(block, TextBlock)]:
        turn["content"] = _joined(texts)
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning"] = "".join(thoughts)
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            raise _misplaced(place, block, "assistant")
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            call = {"id": block.id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    if turn:
        yield {"role": "assistant", **turn}


def _joined(blocks: Iterable[Any]) -> str:
    return "\n".join(block.text for block in blocks)


def _text(given: Texts) -> str:
    return given if isinstance(given, str) else _joined(given)


class MessagesCall:
    """One call: its prompt, and the answer in both forms."""

    def __init__(self, server: Server, body: MessagesRequest) -> None:
        """Raises ApiError for an unsupported request."""
        self._chat = ChatCompletion(server, chat_request(body, server.tokenizer), fills=True)
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": body.model or server.name,
            "container": None,
        }
        self.streams, self.is_large = bool(body.stream), False

    @property
    def stats(self) -> RequestStats:
        return self._chat.stats

    async def prepare(self) -> None:
        await self._chat.prepare()

    def replayed(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._chat.replayed(body)

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        content = []
        async with aclosing(self._chat.blocks()) as blocks:
            async for change, block, _, _ in blocks:
                if change == "ended":
                    content.append(_whole(block))
        end = self._end()
        return {**self._head, "content": content, **end["delta"], "usage": end["usage"]}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as events."""
        index = -1  # of the block that is open
        async with aclosing(self._chat.blocks()) as blocks:
            async for change, block, added, _ in blocks:
                if index < 0:  # not earlier: a refused request is not begun
                    yield self._start()
                if change == "begun":
                    index += 1
                    empty = _whole(
                        AnswerBlock(block.kind, "{}" * (block.kind == "call"), block.id, block.name)
                    )
                    yield {"type": "content_block_start", "index": index, "content_block": empty}
                elif change == "added":
                    kind, name = _DELTAS[block.kind]
                    delta = {"type": kind, name: added}
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
                else:
                    yield {"type": "content_block_stop", "index": index}
        if index < 0:
            yield self._start()
        yield self._end()
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that is cut."""
        return error.body("/v1/messages")

    def _start(self) -> dict[str, Any]:
        usage = _usage(Usage(self.stats.usage.prompt))
        message: dict[str, Any] = {**self._head, "content": [], "usage": usage}
        message |= dict.fromkeys(("stop_reason", "stop_sequence", "stop_details"))
        return {"type": "message_start", "message": message}

    def _end(self) -> dict[str, Any]:
        ended = self._chat.ended
        assert ended is not None
        return {
            "type": "message_delta",
            "delta": self._reason(ended),
            "usage": _usage(self.stats.usage),
        }

    def _reason(self, ended: Ended) -> dict[str, str | None]:
        length = "model_context_window_exceeded" if self._chat.is_cut else "max_tokens"
        reason = {"tool_calls": "tool_use", "length": length}.get(
            self._chat.reason(ended), "end_turn"
        )
        if reason == "end_turn" and ended.stop_string is not None:
            reason = "stop_sequence"
        stop = ended.stop_string if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}


async def count_tokens(server: Server, body: CountTokens) -> dict[str, int]:
    """The tokens of a prompt. Raises ApiError."""
    chat = ChatCompletion(server, chat_request(body, server.tokenizer))
    return {"input_tokens": len(await chat.encode())}


def _usage(usage: Usage) -> dict[str, Any]:
    thinks = usage.reasoning is not None
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning} if thinks else None,
        "server_tool_use": None,
        "inference_geo": None,
        "service_tier": "standard",
    }


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _input(written: str) -> Any:
    """Arguments; {}: the answer was cut before their end."""
    try:
        return parse_json(written)
    except ValueError:
        return {}


def _whole(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {
        "type": "tool_use",
        "id": block.id,
        "name": block.name,
        "input": _input(block.text),
        "caller": {"type": "direct"},
    }
