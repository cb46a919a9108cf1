"""The keys of a conversation, and their validation errors."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from lite_runner.config.fields import Fault, fault, show
from lite_runner.config.generate_checks import session_faults
from lite_runner.config.schema import SessionOptions
from lite_runner.records import dataclass

_OF_TEXTS = ("num_beams", "length_penalty", "num_return_sequences", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SessionOptions):
    """A conversation with a model of this process, or of a server."""

    system: str  # "": none
    server: str  # URL of a server; "": the model is loaded here
    server_key: str  # env:NAME or a file; "": none


def chat_faults(config: ChatOptions) -> Iterator[Fault]:
    """Validation errors of a conversation."""
    for key in _OF_TEXTS:
        if (value := getattr(config, key)) is not None:
            yield fault(key, f"{key}={show(value)} has no effect with run_mode=chat")
    if isinstance(config.adapter_id, tuple):
        yield fault("adapter_id", f"adapter_id: got {show(config.adapter_id)}, expected one name")
    if config.server:
        parts = urlsplit(config.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield fault("server", f"server: got {show(config.server)}, expected http://HOST:PORT")
        return
    if config.server_key:
        yield fault(("server_key", "server"), "server_key needs server=http://HOST:PORT")
    yield from session_faults(config)
