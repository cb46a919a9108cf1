"""run_mode=embed: the embeddings of texts, to a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.backends import Backend
from lite_runner.config import Invalid, invalid, show
from lite_runner.config.checks import session_errors
from lite_runner.config.generation import GenerationConfig, Pooling
from lite_runner.config.prompts import file_errors, read_texts
from lite_runner.config.schema import OverwriteOptions, RunConfig, SamplingOptions, SessionOptions
from lite_runner.errors import ConfigError
from lite_runner.generation import Engine, Finished, Request
from lite_runner.generation.pooling import first_numbers
from lite_runner.model.adapters import only_adapter
from lite_runner.model.embedding import EmbeddingConfig, embedding_of
from lite_runner.output import Result, RunFolder
from lite_runner.plan import Plan
from lite_runner.plan.resources import open_planned
from lite_runner.records import Count, OutputPath, dataclass
from lite_runner.run_modes._plan import plan_session
from lite_runner.system.files import atomic_write

MOST_AT_ONCE = 8  # texts, with embed.batch=null
_KINDS = (".npy", ".jsonl")
_MAX_SHOWN = 10  # texts that do not fit


@dataclass(frozen=True, kw_only=True)
class Embed:
    """Pooling of hidden states."""

    pooling: Pooling | Literal["auto"]  # auto: as the checkpoint says, or last
    normalize: bool | None  # null: as the checkpoint says, or true
    prompt: str | None  # the name of a text of the checkpoint's before each; null: its usual one
    dimensions: Count | None  # null: all
    batch: Count | None  # null: as many as fit, up to MOST_AT_ONCE


@dataclass(frozen=True, kw_only=True)
class Config(SessionOptions, OverwriteOptions):
    """run_mode=embed"""

    batch_key: ClassVar[str] = "embed.batch"
    embeds: ClassVar[bool] = True

    predict_data: str
    embed_output: OutputPath
    embed: Embed

    @property
    def target(self) -> Path:
        """The file to write."""
        return Path(self.embed_output).expanduser()


@dataclass(frozen=True, kw_only=True)
class EmbedPlan(Plan):
    """The plan with the token ids of each text; without a tokenizer there are none."""

    texts: Sequence[NDArray[np.int32]] = ()
    embedding: EmbeddingConfig = EmbeddingConfig()


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of embeddings."""
    own = {field.name for field in fields(RunConfig)} | {"max_length"}
    for name in (field.name for field in fields(SamplingOptions) if field.name not in own):
        if (value := getattr(config, name)) is not None:
            yield invalid(name, f"{name}={show(value)} has no effect with run_mode=embed")
    if config.enable_thinking is not None:
        yield invalid("enable_thinking", "enable_thinking= has no effect with run_mode=embed")
    if config.demands_drafts:
        yield invalid("speculate", f"speculate={config.speculate} has no effect: no token is drawn")
    if config.draft_model:
        yield invalid("draft_model", "draft_model= has no effect: no token is drawn")
    if isinstance(config.adapter_id, tuple):
        yield invalid("adapter_id", f"adapter_id: got {show(config.adapter_id)}, expected one name")
    if not config.predict_data:
        yield invalid("predict_data", "predict_data is empty; give a file: predict_data=texts.txt")
    for text in file_errors(config.predict_data, "a text itself goes into a .txt file"):
        yield invalid("predict_data", text)
    if not config.embed_output.endswith(_KINDS):
        given, kinds = show(config.embed_output), " or ".join(_KINDS)
        yield invalid(
            "embed_output", f"embed_output: got {given}, expected a file with the suffix {kinds}"
        )
    yield from session_errors(config)


def plan(config: Config) -> Plan:
    """Files, texts as token ids, and memory, all validated. Raises RunnerError."""
    began = time.perf_counter()
    if config.target.exists() and not config.overwrite:
        raise ConfigError(f"{config.target}: exists already", "choose another, or overwrite=true")
    texts = read_texts(config.predict_data)
    batch = config.embed.batch
    slots = range(1, MOST_AT_ONCE + 1) if batch is None else [batch]
    plan = plan_session(config, slots=slots, length=config.max_length or "auto")
    hidden, wanted = plan.model.model.hidden_size, config.embed.dimensions
    if wanted is not None and wanted > hidden:
        raise ConfigError(f"embed.dimensions: got {wanted}, expected at most {hidden}")
    size = f"{len(texts):,} vectors of {wanted or hidden} numbers"
    lines = {**plan.lines, "writes": f"{config.target}, {size}"}
    asked = config.embed.pooling
    embedding = embedding_of(plan.model, None if asked == "auto" else asked)
    if (normalize := config.embed.normalize) is not None:
        embedding = replace(embedding, normalize=normalize)
    try:
        before = embedding.prompt(config.embed.prompt)
    except ConfigError as error:
        raise ConfigError(f"embed.prompt: {error.message}") from None
    ids = _encoded(plan, texts, before) if plan.tokenizer is not None else []
    plan = replace(plan, lines=lines, seconds=time.perf_counter() - began)
    return EmbedPlan(**vars(plan), texts=ids, embedding=embedding)


def _encoded(plan: Plan, texts: Sequence[str], before: str) -> list[NDArray[np.int32]]:
    """The token ids of each text, with that `before` it. Raises ConfigError for those that do not
    fit."""
    assert plan.tokenizer is not None
    most, found, wrong = plan.work.length, [], []
    for place, text in enumerate(texts):
        ids = plan.tokenizer.encode(before + text)
        found.append(np.array(ids, np.int32))
        if not 0 < len(ids) <= most:
            wrong.append(f"text {place}: {len(ids)} tokens, expected 1 to {most}")
    if wrong:
        error = ConfigError.of(wrong, _MAX_SHOWN)
        error.hint = "cut it in parts, or leave it out"
        raise error
    return found


def run(plan: Plan, folder: RunFolder) -> None:
    """Write `embed_output`. Raises RunnerError; nothing half-written gets the final name."""
    began, config = time.perf_counter(), plan.config
    assert isinstance(config, Config) and isinstance(plan, EmbedPlan)
    numbers = config.embed.dimensions or plan.model.model.hidden_size
    count, tokens = len(plan.texts), sum(map(len, plan.texts))
    adapter = config.adapter_id if isinstance(config.adapter_id, str) else None
    adapter = adapter or only_adapter(config.adapters)
    with closing(open_planned(plan)) as backend:
        loaded = time.perf_counter()
        with atomic_write(config.target, 4 * count * numbers) as file:
            write = _writer(file, config.target, count, numbers)
            with progress.step("embed", total=count, unit="texts") as step:
                pooling, normalize = plan.embedding.pooling or "last", plan.embedding.normalize
                for embedding in _embeddings(backend, plan.texts, pooling, adapter):
                    write(first_numbers(embedding, numbers, normalize=normalize))
                    step.advance()
        engine = backend.info.engine
    seconds = time.perf_counter() - loaded
    folder.write_result(Result.of_files(plan, plan.model.source, began, engine=engine))
    progress.note(
        f"wrote {config.target}: {count:,} vectors of {numbers} numbers, {tokens:,} tokens,"
        f" {tokens / seconds:.0f} tokens/s"
    )


def _writer(
    file: IO[bytes], path: Path, count: int, numbers: int
) -> Callable[[NDArray[np.float32]], object]:
    """Writes one vector after the other."""
    if path.suffix == ".npy":
        shape = {"descr": "<f4", "fortran_order": False, "shape": (count, numbers)}
        np.lib.format.write_array_header_1_0(file, shape)  # type: ignore[no-untyped-call]
        return lambda row: file.write(row.astype("<f4").tobytes())
    places = iter(range(count))

    def write(row: NDArray[np.float32]) -> None:
        line = {"index": next(places), "embedding": row.tolist()}
        file.write(json.dumps(line).encode() + b"\n")

    return write


def _embeddings(
    backend: Backend, texts: Sequence[NDArray[np.int32]], pooling: Pooling, adapter: str | None
) -> Iterator[NDArray[np.float32]]:
    """The embedding of each text, in their order. Raises RunnerError."""
    engine, options = Engine(backend), GenerationConfig(max_new_tokens=0)
    places: dict[int, int] = {}  # of requests that run or wait
    # Results held back until those of earlier texts are there.
    ready: dict[int, NDArray[np.float32]] = {}
    added = yielded = 0
    while yielded < len(texts):
        while added < len(texts) and added - yielded < 2 * backend.info.slots:
            request = Request(texts[added], options, adapter, pooling=pooling)
            places[engine.add(replace(request, name=f"text {added}"))] = added
            added += 1
        for event in engine.step():
            assert isinstance(event, Finished)
            if event.error is not None:
                raise event.error
            assert event.completion.embedding is not None
            ready[places.pop(event.id)] = event.completion.embedding
        while yielded in ready:
            yield ready.pop(yielded)
            yielded += 1
