"""The bodies of requests: OpenAI's fields, and vLLM's additions.

What a field asks for is done, or refused by its name; there is no field that is silently ignored.
Fields that are not supported take the values that ask for nothing: null, and what `only` lists. The
fields of `Described` describe the caller, not the answer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from lite_runner.records import MAX_PENALTY, MIN_PENALTY

MAX_RETURNS = 128
MAX_STOPS = 64  # Continue sends some 25
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
_ID_DIGITS = 10
MAX_MESSAGES = 10_000
MAX_PARTS = 1000  # of a message
MAX_IDS = 1024  # of tokens that end an answer, or whose scores are changed
_MAX_KEYS = 100  # of an object whose keys are known

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Of a list the first error is reported.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
ListsOfIds = Annotated[list[TokenIds], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]


class FieldError(ValueError):
    """A field contradicts another one, or has a value that its type does not exclude."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


def only(*values: Any) -> AfterValidator:
    """The validator of an unsupported field: only values that change nothing are accepted."""

    def check(value: Any) -> Any:
        for one in values:
            if value == one and isinstance(value, bool) is isinstance(one, bool):
                return value
        listed = " or ".join(json.dumps(one) for one in (*values, None))
        raise PydanticCustomError("unsupported", f"not supported; expected {listed}")

    return AfterValidator(check)


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        """A null is the same as an absent field."""
        if not isinstance(given, dict):
            return given
        if len(given) > _MAX_KEYS:
            raise PydanticCustomError("too_long", f"an object of {len(given)} keys")
        return {name: value for name, value in given.items() if value is not None}


class Described(RequestBody):
    """Fields that describe the caller; no effect on the answer."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # prefixes are shared in any case
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    request_id: str | None = None
    client_metadata: dict[str, Any] | None = None  # of Codex


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None
    continuous_usage_stats: Annotated[Any, only(False)] = None


class JsonSchema(RequestBody):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # it always is


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("json_schema", "with type=json_schema, and only there")
        return self


Schema = dict[str, Any] | str  # or its JSON
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]


class StructuredOutputs(RequestBody):
    """vLLM's form."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    disable_fallback: bool | None = None  # there is one engine of grammars
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None


class Sampling(Described):
    """Fields that completions and chat completions share. null: the server's default."""

    model: str | None = None  # null: the base model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_RETURNS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0, -1: off
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_IDS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    priority: int | None = None  # the smaller, the earlier
    # At most one of these: see structured.py.
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    # Not supported.
    best_of: Annotated[Any, only(1)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    bad_words: Annotated[Any, only([])] = None
    logits_processors: Annotated[Any, only([])] = None
    return_tokens_as_token_ids: Annotated[Any, only(False)] = None
    return_token_ids: Annotated[Any, only(False)] = None
    guided_decoding_backend: Annotated[Any, only("auto")] = None
    vllm_xargs: Annotated[Any, only({})] = None
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        if "" in self.stops:
            raise FieldError("stop", "an empty string would end every completion at once")
        options = self.stream_options
        if options is not None and options.include_usage and not self.stream:
            raise FieldError("stream_options", "only with stream=true")
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS):
                raise FieldError("logit_bias", f"got {key[:40]!r}, expected a token id")
        return self


class CompletionRequest(Sampling):
    """/v1/completions"""

    # A text, several, the token ids of one, or of several.
    prompt: str | TokenIds | Texts | ListsOfIds
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, only("")] = None

    @model_validator(mode="after")
    def _check_prompts(self) -> CompletionRequest:
        if not self.prompt or (isinstance(self.prompt, list) and [] in self.prompt):
            raise FieldError("prompt", "empty")
        return self


class Cached(RequestBody):
    """Marks for prompt caching, which are ignored: prefixes are shared anyway."""

    cache_control: dict[str, Any] | None = None


class ContentPart(Cached):
    type: Literal["text"]
    text: str


Parts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class FunctionCall(RequestBody):
    name: str
    arguments: str  # JSON


class ToolCall(RequestBody):
    index: int | None = None  # of a delta that it was put together from
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Cached):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None  # the thinking of an earlier answer
    reasoning_content: str | None = None  # the same by its older name
    # Of earlier answers, maybe of other servers.
    annotations: list[Any] | None = None
    reasoning_details: list[Any] | None = None
    thinking_blocks: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None
    images: Annotated[Any, only([])] = None

    @property
    def text(self) -> str:
        """Its content, the parts in lines."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Function(RequestBody):
    # OpenAI has up to 64 characters, Anthropic up to 128.
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; null: none
    strict: bool | None = None  # forced calls always are


class Tool(Cached):
    type: Literal["function"]
    function: Function


def as_function(tool: Any) -> dict[str, Any]:
    """A tool, or a choice of one, of another protocol as chat completions have it."""
    schema = getattr(tool, "parameters", getattr(tool, "input_schema", None))
    about = getattr(tool, "description", None)
    function = {"name": tool.name, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


def as_format(schema: Any, name: str | None = "answer") -> dict[str, Any]:
    """A schema as response_format has it."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


class FunctionName(RequestBody):
    name: str


class NamedTool(RequestBody):
    type: Literal["function"]
    function: FunctionName


class AllowedNames(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(RequestBody):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class ChatRequest(Sampling):
    """/v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    # null: auto
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    # Thinking.
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the chat template
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    include_reasoning: bool | None = None  # null: true
    # Not supported.
    functions: Annotated[Any, only([])] = None  # of OpenAI before tools
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    verbosity: Annotated[Any, only("medium")] = None
    echo: Annotated[Any, only(False)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    add_special_tokens: Annotated[Any, only(False)] = None  # the template has them
    documents: Annotated[Any, only([])] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "only with logprobs=true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        for name in names:
            if names.count(name) > 1:
                raise FieldError("tools", f"two tools have the name {name}")
        choice = self.tool_choice
        allowed = choice.allowed_tools if isinstance(choice, AllowedChoice) else None
        named = allowed.tools if allowed else [choice] if isinstance(choice, NamedTool) else []
        chosen = {one.function.name: None for one in named}
        for name in chosen:
            if name not in names:
                raise FieldError("tool_choice", f"no tool has the name {name}")
        if allowed:
            self.tools = [tool for tool in self.tools or () if tool.function.name in chosen]
            self.tool_choice = allowed.mode
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise FieldError("tool_choice", "only with tools")
        return self


def _one_line(name: str) -> str:
    if not name.isprintable():
        raise PydanticCustomError("unprintable", "has characters that cannot be shown")
    return name


class LoadAdapter(RequestBody):
    """/v1/load_lora_adapter"""

    lora_name: Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_one_line)]
    lora_path: Annotated[str, Field(min_length=1)]  # a folder, relative to adapter_root
    load_inplace: Annotated[Any, only(False)] = None


class UnloadAdapter(RequestBody):
    """/v1/unload_lora_adapter"""

    lora_name: str
    lora_int_id: int | None = None  # as vLLM has it; the name decides


class TokenizeRequest(Described):
    """/tokenize: of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: Annotated[Any, only(False)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "expected either prompt or messages")
        for name in ("chat_template_kwargs", "tools") if self.messages is None else ():
            if getattr(self, name):
                raise FieldError(name, "only with messages")
        return self


class DetokenizeRequest(Described):
    """/detokenize"""

    model: str | None = None
    tokens: TokenIds
