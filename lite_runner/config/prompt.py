"""A prompt and its own options: in predict_data, and in a line of a prompt file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from lite_runner.architectures.spec import Prefix
from lite_runner.config.generation import (
    GenerationConfig,
    RequestOptions,
    StructuredOptions,
    structured_options,
)
from lite_runner.errors import ConfigError
from lite_runner.records import Seed, dataclass

BASE = "base"  # users' names of the model without an adapter; None internally
_ALSO_BASE = ("", "none", "null")


def adapter_name(given: str | None) -> str | None:
    """An adapter as a user names it; None: the base model, by one of its names in any case."""
    return None if given is None or given.lower() in (BASE, *_ALSO_BASE) else given


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Request(RequestOptions, StructuredOptions):
    """A prompt or the messages of a chat; null: the run's setting."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    adapter: str | None = None
    seed: Seed | None = None
    id: int | str | None = None  # returned with the text
    priority: int | None = None  # smaller is scheduled earlier; null: 0

    @property
    def text(self) -> str:
        """The text shown as the prompt: of messages the last one."""
        return self.prompt or (self.messages[-1].content if self.messages else "")

    @property
    def own(self) -> dict[str, Any]:
        """Its own generation options, by name."""
        return {name: value for name in OWN if (value := getattr(self, name)) is not None}

    @property
    def structured(self) -> dict[str, Any]:
        """Its own options of structured output, which replace the run's."""
        return structured_options(vars(self))

    def options(self, shared: GenerationConfig) -> GenerationConfig:
        """Its generation options: its own, else the run's."""
        own = self.own
        return shared.with_options(own | {"max_length": None} if "max_new_tokens" in own else own)

    def chat(self, system: str) -> list[dict[str, str]]:
        """Its messages, a prompt being the user's; behind `system` where they have none ("" : no
        such message)."""
        given = self.messages or (Message("user", self.text),)
        if system and given[0].role != "system":
            given = (Message("system", system), *given)
        return [asdict(message) for message in given]

    def size(self, system: str) -> int:
        """Bytes of its texts, which no token is shorter than; a chat template adds to them."""
        if self.messages is None:
            return len(self.text.encode())
        return sum(len(message["content"].encode()) for message in self.chat(system))

    @property
    def is_text(self) -> bool:
        """True if it is a prompt without options."""
        return self == Request(prompt=self.prompt)

    def plain(self) -> dict[str, Any]:
        """Plain data, as a record of a file."""
        return {name: value for name, value in asdict(self).items() if value is not None}


# Options that a prompt may have of its own; all others are the run's.
OWN = tuple(
    field.name for field in fields(Request) if field.name in GenerationConfig.__dataclass_fields__
)


# An item of predict_data, and all of them.
Item = str | Request | Message | tuple[Message, ...]
Items = tuple[Item, ...]


def is_prompt(value: Any) -> bool:
    """True if plain data is meant as an item that is more than a text, right or not."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, dict) and "role" in one for one in value)
    return isinstance(value, dict) and not value.keys().isdisjoint({"prompt", "messages", "role"})


def requests_of(items: Sequence[Item]) -> list[Request]:
    """The requests that a list means: each item is one, but {role, content} alone make one chat.

    Raises ValueError if a list mixes messages and prompts.
    """
    messages = [item for item in items if isinstance(item, Message)]
    if messages and len(messages) < len(items):
        raise ValueError(
            "messages ({role, content}) and prompts side by side; expected a list in brackets, or"
            " {messages: [...]}, for each chat"
        )
    if messages:
        return [Request(messages=tuple(messages))]
    return [_request(item) for item in items]


def items_of(requests: Sequence[Request]) -> Items:
    """Requests as predict_data has them, without their adapters: adapter_id has those."""
    plain = [replace(request, adapter=None) for request in requests]
    return tuple(one.prompt if one.is_text and one.prompt else one for one in plain)


def _request(item: Item) -> Request:
    if isinstance(item, Request):
        return item
    if isinstance(item, str):
        return Request(prompt=item)
    assert isinstance(item, tuple)
    return Request(messages=item)


def errors_of(request: Request, *, adapters: bool) -> list[str]:
    """Validation errors of a request in a run with or without `adapters`."""
    found = []
    if request.prompt is not None and request.messages is not None:
        found.append("got both prompt and messages, expected one of them")
    if request.prompt is None and not request.messages:
        found.append("no prompt; expected prompt or messages")
    elif request.prompt == "":
        found.append("an empty prompt")
    texts = [request.prompt or ""]
    for message in request.messages or ():
        texts += [message.role, message.content]
        if not message.role:
            found.append("a message without a role")
    if not all(map(is_utf8, texts)):
        found.append("not valid UTF-8")
    if adapter_name(request.adapter) is not None and not adapters:
        found.append(f"adapter {request.adapter!r} needs adapter_path=lora_adapter.json")
    return found


def is_utf8(text: str) -> bool:
    """True if a text has no lone surrogates, which stand for bytes that are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_prefixes(
    prefix: Prefix | None, prompts: Sequence[Sequence[int]], each: Sequence[GenerationConfig]
) -> None:
    """Raise ConfigError for prompts without the tokens that `prefix` needs, and for the likelihoods
    of prompts, whose tokens see those behind them; None: any prompt will do.

    `each`: their options.
    """
    if prefix is None:
        return
    if any(options.prompt_logprobs is not None for options in each):
        raise ConfigError(*no_likelihood("prompt_logprobs"))
    from lite_runner.architectures.positions import prefix_error  # imports NumPy

    errors = []
    for index, tokens in enumerate(prompts):
        if lacks := prefix_error(prefix, tokens):
            errors.append(f"prompt {index} {lacks}")
    if errors:
        error = ConfigError.of(errors)
        error.hint = (
            "the model's own tokenizer appends both to a text; give them in prompts of token ids"
        )
        raise error


def with_ending(prefix: Prefix | None, tokens: list[int]) -> list[int]:
    """The tokens of a text with what ends a prefix, as the model's own tokenizer appends it; the
    byte tokenizer and others do not."""
    if prefix is None or prefix.end_token_id in tokens:
        return tokens
    return [*tokens, prefix.mask_token_ids[0], prefix.end_token_id]


def no_likelihood(key: str) -> tuple[str, str]:
    """Message and hint for a setting that needs the likelihood of a prompt's tokens."""
    return (
        f"{key}: each token of a prefix sees those behind it, so a prompt's tokens have no"
        " likelihood",
        "logprobs gives those of the generated tokens",
    )
