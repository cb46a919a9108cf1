"""Reading an artifact in the current folder as a run does: the plan, and then all values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lite_runner.config.argv import parse
from lite_runner.plan import Plan
from lite_runner.run_modes import heads, resolve, run_mode
from lite_runner.text import load_tokenizer
from lite_runner.weights import LazyTensor

Read = Callable[[Path], object]
TEXT = "Words, and ünïcödé 😀 <s>\n\tof 2 lines"
CHAT = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


def planned(*words: str) -> Plan:
    """The plan of a command line, before a weight is read."""
    config, _ = resolve(parse(words, heads()))
    return run_mode(config.run_mode).plan(config)


def plan(*words: str) -> Read:
    """Reads by planning the run of this command line."""
    return lambda folder: planned(*words)


def run(*words: str) -> Read:
    """Reads by planning the run of this command line, and then all the tensors that it needs."""

    def read(folder: Path) -> None:
        found = planned(*words)
        read_all(found.files.tensors())
        if found.job is not None and found.job.adapters is not None:
            for adapter in found.job.adapters.adapters:
                for pair in adapter.pairs.values():
                    read_all({"a": pair.a, "b": pair.b})

    return read


def read_all(tensors: Mapping[str, LazyTensor]) -> None:
    """Every value; quantized matrices have integers as well."""
    for tensor in tensors.values():
        tensor.float32()
        if tensor.integers is not None:
            tensor.integers.read()


def tokenizer(path: str) -> Read:
    """Reads a tokenizer, and encodes, decodes, streams and renders with it."""

    def read(folder: Path) -> None:
        found = load_tokenizer(folder / path, model_vocab=None)
        ids = found.encode(TEXT)
        found.decode(ids)
        found.decode(range(min(found.vocab_size, 300)))
        found.files()
        if found.has_chat_template:
            found.encode_chat(CHAT)

    return read
