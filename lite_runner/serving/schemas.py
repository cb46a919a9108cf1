"""The bodies of requests: OpenAI's fields, and vLLM's additions.

What a field asks for is done, or refused by its name; there is no field that is silently ignored.
A value that asks for nothing (null, false, 1) is taken for fields that are not supported. The
fields below `_Described` describe the caller, not the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_RETURNS = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class FieldFault(ValueError):
    """A field contradicts another one, or has a value that its type does not tell."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Described(_Body):
    """Who asks; of no effect on the answer."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # prefixes are shared whatever it says
    prompt_cache_retention: str | None = None
    request_id: str | None = None


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class JsonSchema(_Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # it always is


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldFault("json_schema", "with type=json_schema, and only there")
        return self


Schema = dict[str, Any] | str  # or its JSON
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class StructuredOutputs(_Body):
    """vLLM's form."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None


class Sampling(_Described):
    """What completions and chat completions share. null: the server's default."""

    model: str | None = None  # null: the base model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_RETURNS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0, -1: off
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
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
    # Not supported but for the values that change nothing.
    use_beam_search: Literal[False] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        if "" in self.stops:
            raise FieldFault("stop", "an empty string would end every completion at once")
        if self.stream_options is not None and not self.stream:
            raise FieldFault("stream_options", "only with stream=true")
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdigit()):
                raise FieldFault("logit_bias", f"got {key!r}, expected a token id")
        return self


class CompletionRequest(Sampling):
    """/v1/completions"""

    # A text, several, the token ids of one, or of several.
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_prompts(self) -> CompletionRequest:
        if not self.prompt or (isinstance(self.prompt, list) and [] in self.prompt):
            raise FieldFault("prompt", "empty")
        return self


class ContentPart(_Body):
    type: Literal["text"]
    text: str


class FunctionCall(_Body):
    name: str
    arguments: str  # JSON


class ToolCall(_Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None  # of an earlier answer
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        """Its content, the parts in lines."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Function(_Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; null: none
    strict: bool | None = None  # forced calls always are


class Tool(_Body):
    type: Literal["function"]
    function: Function


class FunctionName(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """/v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None  # null: auto
    parallel_tool_calls: bool | None = None
    verbosity: Literal["medium"] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldFault("top_logprobs", "only with logprobs=true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        for name in names:
            if names.count(name) > 1:
                raise FieldFault("tools", f"two tools have the name {name}")
        if self.tool_choice not in (None, "none") and not names:
            raise FieldFault("tool_choice", "only with tools")
        if isinstance(self.tool_choice, NamedTool):
            chosen = self.tool_choice.function.name
            if chosen not in names:
                raise FieldFault("tool_choice", f"no tool has the name {chosen}")
        return self


class LoadAdapter(_Body):
    """/v1/load_lora_adapter"""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]  # a folder, relative to adapter_root
    load_inplace: Literal[False] | None = None


class UnloadAdapter(_Body):
    """/v1/unload_lora_adapter"""

    lora_name: str
    lora_int_id: int | None = None  # of vLLM's; the name says it


class TokenizeRequest(_Described):
    """/tokenize: of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldFault("prompt", "expected either prompt or messages")
        return self


class DetokenizeRequest(_Described):
    """/detokenize"""

    model: str | None = None
    tokens: list[TokenId]
