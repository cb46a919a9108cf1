"""/v1/responses: OpenAI's protocol of items, over a chat completion."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from lite_runner.serving.chat import AnswerBlock, ChatCompletion
from lite_runner.serving.errors import ApiError, of_validation, shortened
from lite_runner.serving.metrics import RequestStats, Usage
from lite_runner.serving.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    ChatRequest,
    Described,
    RequestBody,
    StreamOptions,
    as_format,
    as_function,
    only,
)
from lite_runner.serving.state import Server, Stored

_SYSTEM = ("system", "developer")
_LOGPROBS = "message.output_text.logprobs"
# Fields of a chat completion, by what they are here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
# Fields that a chat completion has under the same name.
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "priority"),
    *("chat_template_kwargs", "enable_thinking", "thinking_token_budget", "include_reasoning"),
    "parallel_tool_calls",
)


class TextPart(RequestBody):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None  # of an earlier answer, as are these
    logprobs: list[Any] | None = None


class RefusalPart(RequestBody):
    """A refusal in another model's answer."""

    type: Literal["refusal"]
    refusal: str


Content = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Contents = str | Annotated[list[Content], Field(max_length=MAX_PARTS, fail_fast=True)]


class _Item(RequestBody):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    caller: dict[str, Any] | None = None  # of a call and its result
    namespace: str | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents
    phase: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON


class ResultItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Contents
    name: str | None = None


class ReasoningText(RequestBody):
    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(_Item):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: ReasoningTexts | None = None
    content: ReasoningTexts | None = None
    encrypted_content: str | None = None  # of another model, which none but that can read


def _kind(given: Any) -> str | None:
    """The type of an item, which a message may leave out."""
    return given.get("type", "message") if isinstance(given, dict) else getattr(given, "type", None)


Item = MessageItem | CallItem | ResultItem | ReasoningItem
_Tagged = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unsupported",
        custom_error_message="an item of this type is not supported; expected message,"
        " function_call, function_call_output or reasoning",
    ),
]
Items = Annotated[list[_Tagged], Field(max_length=MAX_MESSAGES, fail_fast=True)]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[_Tagged])


class FunctionTool(RequestBody):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # forced calls always are
    output_schema: dict[str, Any] | None = None
    defer_loading: Annotated[Any, only(False)] = None
    allowed_callers: Annotated[Any, only(["direct"])] = None


class ChosenTool(RequestBody):
    type: Literal["function"]
    name: str


class AllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class TextFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # it always is


class TextOptions(RequestBody):
    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


class Reasoning(RequestBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # The reasoning itself is returned.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Described):
    """/v1/responses, and its input_tokens"""

    model: str | None = None
    input: str | Items
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None  # null: true
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: int | None = None  # of tools that run in the server: there are none
    include: Annotated[list[str], Field(max_length=MAX_PARTS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # See ChatRequest.
    parallel_tool_calls: bool | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    priority: Any = None
    chat_template_kwargs: Any = None
    enable_thinking: Any = None
    thinking_token_budget: Any = None
    include_reasoning: Any = None
    # Not supported.
    background: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None


def listed_items(items: bytes) -> dict[str, Any]:
    """A page of /v1/responses/ID/input_items: all of them."""
    data = from_json(items)
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": False, **ends}


def chat_request(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """The request as a chat completion's. Raises ApiError for features that it lacks."""
    given: dict[str, Any] = {name: getattr(body, name, None) for name in _SAME}
    given["messages"] = list(_messages(body.instructions, items))
    choice: Any = body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": list(map(as_function, choice.tools))}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    elif isinstance(choice, ChosenTool):
        choice = as_function(choice)
    given["tool_choice"] = choice
    given["tools"] = list(map(as_function, body.tools or ())) or None
    if body.reasoning is not None and body.reasoning.effort:
        effort = body.reasoning.effort
        given["reasoning_effort"] = "xhigh" if effort == "max" else effort
    if body.text is not None and (wanted := body.text.format) is not None:
        is_schema = wanted.type == "json_schema"
        form = as_format(wanted.schema_, wanted.name) if is_schema else {"type": wanted.type}
        given["response_format"] = form
    given["max_completion_tokens"] = body.max_output_tokens
    if _wants_logprobs(body):
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise _renamed(of_validation(error)) from None


def _wants_logprobs(body: ResponsesRequest) -> bool:
    """Raises ApiError for values of `include` that are not supported."""
    for one in body.include or ():
        if one not in (_LOGPROBS, "reasoning.encrypted_content"):  # reasoning is not encrypted
            known = f"include: {shortened(one, 100)!r} is not supported"
            raise ApiError(400, known, "include", "unsupported_parameter")
    return bool(body.top_logprobs) or _LOGPROBS in (body.include or ())


def _renamed(error: ApiError) -> ApiError:
    """An error of a chat completion with the names of fields here."""
    param = error.param or ""
    first = param.partition(".")[0]
    if first not in _NAMES:
        return error
    own = _NAMES[first]  # items are not counted as messages are
    return ApiError(error.status, error.message.replace(param, own, 1), own, error.code)


def _messages(instructions: str | None, items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    """The messages of the items: instructions before the first turn are one, and so are the
    parts of an answer."""
    system = [instructions] if instructions else []
    rest = [one for one in items if not isinstance(one, ReasoningItem) or _thought(one)]
    while rest and isinstance(first := rest[0], MessageItem) and first.role in _SYSTEM:
        system.append(_text(first.content))
        del rest[0]
    if system:
        yield {"role": "system", "content": "\n\n".join(system)}
    turn: dict[str, Any] = {}  # by the assistant, so far
    for item in rest:
        if (part := _of_assistant(item)) is None or not _follows(part, turn):
            if turn:
                yield {"role": "assistant", **turn}
            turn = {}
        if part is not None:
            calls = turn.get("tool_calls", []) + part.get("tool_calls", [])
            turn |= {**part, "tool_calls": calls} if calls else part
        elif isinstance(item, ResultItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        elif isinstance(item, MessageItem):
            yield {"role": item.role, "content": _text(item.content)}
    if turn:
        yield {"role": "assistant", **turn}


def _of_assistant(item: Item) -> dict[str, Any] | None:
    """A part of an answer; None: it is none."""
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        return {"tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if isinstance(item, ReasoningItem):
        return {"reasoning": _thought(item)}
    if isinstance(item, MessageItem) and item.role == "assistant":
        return {"content": _text(item.content)}
    return None


def _thought(item: ReasoningItem) -> str:
    return "".join(one.text for one in item.content or item.summary or ())


def _follows(part: dict[str, Any], turn: dict[str, Any]) -> bool:
    """True if a part is of the same answer: thinking, text and calls come in this order."""
    order = ("reasoning", "content", "tool_calls")
    (new,) = (order.index(name) for name in part)
    return all(order.index(name) < new or name == "tool_calls" == order[new] for name in turn)


def _text(given: Contents) -> str:
    if isinstance(given, str):
        return given
    return "\n".join(one.text if isinstance(one, TextPart) else one.refusal for one in given)


class ResponsesCall:
    """One call: its prompt, and the answer in both forms."""

    def __init__(self, server: Server, body: ResponsesRequest, owner: str | None = None) -> None:
        """`owner`: the name of the key. Raises ApiError for an unsupported request."""
        self._server, self._body, self._owner = server, body, owner
        self.streams, self.is_large = bool(body.stream), False
        self._id, self._created = f"resp_{secrets.token_hex(24)}", int(time.time())
        self._events = 0  # so far
        self._output: list[dict[str, Any]] = []
        self._stores = body.store is not False and server.stores
        if body.previous_response_id is None:
            self._open()

    @property
    def stats(self) -> RequestStats:
        return self._chat.stats

    async def count(self) -> dict[str, Any]:
        """The tokens of the prompt. Raises ApiError."""
        await self._go_on()
        with _renaming():
            tokens = len(await self._chat.encode())
        return {"object": "response.input_tokens", "input_tokens": tokens}

    async def prepare(self) -> None:
        await self._go_on()
        with _renaming():
            try:
                await self._chat.prepare()
            except ApiError as error:
                if error.code != "context_length_exceeded" or self._body.truncation != "auto":
                    raise
                await self._truncate(error)

    async def _go_on(self) -> None:
        """Begin with the items of the response before, where there is one."""
        if (id := self._body.previous_response_id) is None:
            return
        one = self._server.responses.get(id, self._owner, 400, "previous_response_id")
        await self._server.aside(
            lambda: self._open(to_json(from_json(one.items) + from_json(one.response)["output"]))
        )

    def _open(self, before: bytes = b"[]") -> None:
        """`before`: JSON of the items that it goes on from."""
        self._before, given = before, self._body.input
        if isinstance(given, str):
            given = [MessageItem(role="user", content=given)]
        items = [*_ITEMS.validate_json(before), *given]
        with _renaming():
            self._request = chat_request(self._body, items)
            self._chat = ChatCompletion(self._server, self._request)
        # As JSON alone: Python looks through thousands of objects for garbage, and all else waits.
        self._input_items = _listed(items) if self._stores else b""
        self._body = self._body.model_copy(update={"input": ""})

    async def _truncate(self, error: ApiError) -> None:
        """Leave out the oldest turns, as few as have to be. Raises `error` where that is not
        enough."""
        messages = self._request.messages
        first = int(messages[0].role == "system")
        turns = [at for at, one in enumerate(messages) if at > first and one.role == "user"]
        fits: ChatCompletion | None = None
        while turns:  # by halves
            middle = len(turns) // 2
            kept = [*messages[:first], *messages[turns[middle] :]]
            request = self._request.model_copy(update={"messages": kept})
            chat = ChatCompletion(self._server, request)
            try:
                await chat.prepare()
            except ApiError as again:
                if again.code != error.code:
                    raise
                turns = turns[middle + 1 :]
            else:
                fits, turns = chat, turns[:middle]
        if fits is None:
            raise error
        self._chat = fits

    def replayed(self, body: dict[str, Any]) -> dict[str, Any]:
        """See ChatCompletion; with all items that it goes on from."""
        replay = self._chat.replayed(body)
        if replay.pop("previous_response_id", None) is None:
            return replay
        given = replay["input"]
        new = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return {**replay, "input": from_json(self._before) + new}

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        async with aclosing(self._chat.blocks()) as blocks:
            async for change, block, _, _ in blocks:
                if change == "ended":
                    self._output.append(_item(block, self._status))
        return await self._ended()

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as events."""
        async with aclosing(self._chat.blocks()) as blocks:
            async for change, block, added, logprobs in blocks:
                if not self._events:  # not earlier: a refused request is not begun
                    for one in self._begun():
                        yield one
                for one in self._changed(change, block, added, logprobs):
                    yield one
        if not self._events:
            for one in self._begun():
                yield one
        response = await self._ended()
        yield self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that is cut."""
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.body()["error"]["message"]}
        return self._event("failed", response=response)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": f"response.{kind}", "sequence_number": self._events - 1, **more}

    def _begun(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def _changed(
        self, change: str, block: AnswerBlock, added: str, logprobs: list[Any]
    ) -> Iterator[dict[str, Any]]:
        """The events of a change of the item that is being written."""
        if change == "begun":
            self._output.append(_item(block, "in_progress"))
            place = len(self._output) - 1
            yield self._event("output_item.added", output_index=place, item=self._output[-1])
        item = self._output[-1]
        of_item = {"item_id": item["id"], "output_index": len(self._output) - 1}
        is_call = block.kind == "call"
        of_part = of_item if is_call else {**of_item, "content_index": 0}
        _, _, kind, name = _KINDS[block.kind]
        extra = {"logprobs": logprobs} if block.kind == "text" else {}
        if change == "begun" and not is_call:
            yield self._event("content_part.added", **of_part, part=_part(block))
        elif change == "added":
            yield self._event(f"{kind}.delta", **of_part, delta=added, **extra)
        elif change == "ended":
            extra = {"logprobs": block.logprobs} if extra else {}
            yield self._event(f"{kind}.done", **of_part, **{name: block.text}, **extra)
            if not is_call:
                yield self._event("content_part.done", **of_part, part=_part(block))
            self._output[-1] = {**_item(block, self._status), "id": item["id"]}
            place = len(self._output) - 1
            yield self._event("output_item.done", output_index=place, item=self._output[-1])

    @property
    def _status(self) -> str:
        ended = self._chat.ended
        cut = ended is not None and self._chat.reason(ended) == "length"
        return "incomplete" if cut else "completed"

    async def _ended(self) -> dict[str, Any]:
        """The response, which is kept."""
        response = self._response(self._status)
        response["usage"] = _usage(self.stats.usage)
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._stores:
            self._server.responses.add(
                self._id, Stored(to_json(response), self._input_items, self._owner)
            )
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body, defaults = self._body, self._server.defaults
        temperature = defaults.temperature if defaults.do_sample else 0.0
        dumped = body.model_dump(
            include={"tools", "tool_choice", "reasoning", "text"}, exclude_none=True, by_alias=True
        )
        tools = [{"parameters": None, "strict": None, **one} for one in dumped.get("tools", ())]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "frequency_penalty": defaults.frequency_penalty,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": body.model or self._server.name,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": defaults.presence_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **dumped.get("reasoning", {})},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self._stores,
            "temperature": temperature if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **dumped.get("text", {})},
            "tool_choice": dumped.get("tool_choice", "auto"),
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": (defaults.top_p or 1.0) if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }


# Of a block: the prefix of its item's id and its type, its events, and the field of the last one.
_KINDS = {
    "thinking": ("rs", "reasoning", "reasoning_text", "text"),
    "text": ("msg", "message", "output_text", "text"),
    "call": ("fc", "function_call", "function_call_arguments", "arguments"),
}


def _part(block: AnswerBlock) -> dict[str, Any]:
    """Thinking or text."""
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    extra = {"annotations": [], "logprobs": block.logprobs}
    return {"type": "output_text", "text": block.text, **extra}


def _item(block: AnswerBlock, status: str) -> dict[str, Any]:
    """A block as an item of the output; one that is in progress has no content yet."""
    prefix, kind, _, _ = _KINDS[block.kind]
    item = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": status}
    if block.kind == "call":
        return {**item, "call_id": block.id, "name": block.name, "arguments": block.text}
    content = [] if status == "in_progress" else [_part(block)]
    if block.kind == "thinking":
        return {**item, "summary": [], "content": content}
    return {**item, "role": "assistant", "content": content}


def _listed(items: Sequence[Item]) -> bytes:
    """Items as /v1/responses/ID/input_items lists them."""
    listed = []
    for item in items:
        one = item.model_dump(exclude_none=True)
        one.setdefault("id", f"item_{secrets.token_hex(16)}")
        if isinstance(content := one.get("content"), str):
            kind = "output_text" if one["role"] == "assistant" else "input_text"
            one["content"] = [{"type": kind, "text": content}]
        listed.append(one)
    return to_json(listed)


@contextmanager
def _renaming() -> Iterator[None]:
    """Errors within name the fields of this protocol."""
    try:
        yield
    except ApiError as error:
        raise _renamed(error) from None


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }
