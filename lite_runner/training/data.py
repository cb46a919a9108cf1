"""Training examples: files of records, and their token ids.

A record is told apart by its keys: text; prompt and completion; instruction, input and output (as
Alpaca and BELLE have them); messages, with tools if there are some. An example is the ids of the
prompt, then of the completion, tokenized apart and without special tokens, then one eos, cut at the
right; the completion and the eos are learned.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import parse_json
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.training.network import Example
from lite_runner.weights.formats.mindrecord_file import (
    IDS,
    IGNORED,
    LABELS,
    is_mindrecord,
    read_mindrecord,
)

MAX_BYTES = 1 << 30  # of a file
MAX_RECORDS = 10_000_000
KINDS = ("text", "prompt and completion", "instruction and output", "messages")
# Stanford Alpaca's, with and without an input.
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
BELLE = "Human: {instruction}\n\nAssistant: "
Template: TypeAlias = Literal["alpaca", "belle", "none"]
Pieces: TypeAlias = list[tuple[str, bool]]  # texts or tags, and whether each is a target


@dataclass(frozen=True)
class ExampleSet:
    """Examples, and how many records were cut or dropped."""

    texts: Sequence[Example]
    records: int
    truncated: int  # longer than max_length, truncated
    dropped: int  # without a target

    @property
    def tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)

    @property
    def targets(self) -> int:
        return sum(text.targets for text in self.texts)

    def packs(self, length: int | None) -> list[list[Example]]:
        """The texts in their order, as many together as have at most `length` tokens; None: each
        alone. None attends to another."""
        packs: list[list[Example]] = []
        room = 0
        for text in self.texts:
            if length is None or len(text.ids) > room:
                packs.append([])
                room = length or 0
            packs[-1].append(text)
            room -= len(text.ids)
        return packs

    def summary(self, max_length: int) -> str:
        """A line about them."""
        longest = max((len(text.ids) for text in self.texts), default=0)
        parts = [
            f"{len(self.texts):,} of {self.records:,} examples, {self.tokens:,} tokens,"
            f" {self.targets:,} of them targets, the longest has {longest:,}"
        ]
        if self.truncated:
            parts.append(f"{self.truncated:,} were cut to {max_length:,} tokens")
        if self.dropped:
            parts.append(
                f"{self.dropped:,} dropped, with nothing to learn in {max_length:,} tokens"
            )
        return "; ".join(parts)


def read_data(
    path: Path,
    tokenizer: Tokenizer,
    template: Template,
    max_length: int,
    *,
    key: str = "finetune.data",
    skip: int = 0,
    take: int | None = None,
) -> ExampleSet:
    """The examples of a .jsonl, .json, .csv or .mindrecord file, or of a folder of the last; of
    their records those behind the first `skip`, at most `take`. Raises ConfigError for a record
    that is none, with its place and the `key` or flag that names the file, and where none is
    left."""
    try:
        return _read(path, tokenizer, template, max_length, skip, take)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.message}", error.hint) from None


def _read(
    path: Path,
    tokenizer: Tokenizer,
    template: Template,
    max_length: int,
    skip: int,
    take: int | None,
) -> ExampleSet:
    texts, truncated, dropped, count = [], 0, 0, 0
    stop = None if take is None else skip + take
    records: Iterator[tuple[list[int], list[bool]]]
    if path.is_dir() or is_mindrecord(path):
        records = itertools.islice(_recorded(path, tokenizer), skip, stop)
    else:
        chosen = itertools.islice(records_of(path), skip, stop)
        records = (
            _ids(pieces_of(record, where, tokenizer, template), tokenizer, where)
            for where, record in chosen
        )
    for ids, learned in records:
        count += 1
        truncated += len(ids) > max_length
        ids, learned = ids[:max_length], learned[:max_length]
        learned[:1] = [False] * len(learned[:1])  # it has no predecessor
        if True not in learned:
            dropped += 1
            continue
        first = learned.index(True)
        mask = None if all(learned[first:]) else np.array(learned[first:])
        texts.append(Example(np.array(ids, np.int64), first, mask))
    if not count:
        what, hint = "no records", "a file with examples"
        if skip:
            what, hint = f"no records behind the first {skip}", "a smaller finetune.skip="
        raise ConfigError(f"{path}: {what}", hint)
    if not texts:
        raise ConfigError(
            f"{path}: nothing to learn: of {count} examples {dropped} have no"
            f" target within {max_length} tokens",
            "more tokens of each: finetune.max_length=, or --seq_length of"
            " scripts/make_mindrecord.py",
        )
    return ExampleSet(texts, count, truncated, dropped)


def _recorded(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[bool]]]:
    """The ids of each record of MindRecord, and which of them are learned. Its texts are filled up
    with the pad or eos token: of what follows the text, MindFormers learns the first."""
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if is_mindrecord(one))
        if not files:
            raise ConfigError(
                f"{path}: no .mindrecord file is in this folder",
                "a folder of them, or a .jsonl, .json or .csv file",
            )
        every = itertools.chain.from_iterable(_recorded(file, tokenizer) for file in files)
        yield from itertools.islice(every, MAX_RECORDS)
        return
    fillers = {*tokenizer.eos_token_ids, tokenizer.pad_token_id}
    for number, row in enumerate(itertools.islice(read_mindrecord(path), MAX_RECORDS), 1):
        ids, labels = row[IDS], row.get(LABELS)
        if len(ids) and int(ids.min()) < 0:
            raise ConfigError(f"{path}, record {number}: a token {ids.min()}")
        count = len(ids)
        while count > 1 and ids[count - 1] == ids[count - 2] and int(ids[count - 1]) in fillers:
            count -= 1
        ids = ids[:count]
        learned = np.ones(count, bool) if labels is None else labels[:count] != IGNORED
        if labels is not None and not np.array_equal(labels[:count][learned], ids[learned]):
            raise ConfigError(
                f"{path}, record {number}: labels that are other tokens than"
                f" input_ids; expected the same, or {IGNORED}"
            )
        yield ids.tolist(), learned.tolist()


def _ids(pieces: Pieces, tokenizer: Tokenizer, where: str) -> tuple[list[int], list[bool]]:
    """Token ids, and which of them are targets; one eos is the last."""
    eos = tokenizer.eos_token_ids
    if not eos:
        raise ArtifactError(
            f"{tokenizer.source}: names no eos token, with which an example ends",
            "processor.tokenizer.eos_token= names one",
        )
    ids: list[int] = []
    learned: list[bool] = []
    for text, is_learned in pieces:
        try:
            found = tokenizer.part_ids(text)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None
        ids += found
        learned += [is_learned] * len(found)
    if not ids or ids[-1] not in eos:
        ids, learned = [*ids, eos[0]], [*learned, True]
    return ids, learned


def pieces_of(
    record: Any, where: str, tokenizer: Tokenizer, template: Template = "alpaca"
) -> Pieces:
    """The texts of a record. Raises ConfigError for one of no known kind."""
    if not isinstance(record, Mapping):
        raise _no_example(where, "is not an object")
    if "messages" in record:
        return _chat(record, where, tokenizer)
    if "completion" in record:
        return [(_text(record, "prompt", where), False), (_text(record, "completion", where), True)]
    if "output" in record and "instruction" in record:
        return [
            (_instruction(record, where, template), False),
            (_text(record, "output", where), True),
        ]
    if "text" in record:
        return [(_text(record, "text", where), True)]
    raise _no_example(where, f"has {', '.join(map(str, record)) or 'no keys'}")


def _no_example(where: str, what: str) -> ConfigError:
    return ConfigError(f"{where}: {what}; expected an object with {'; or '.join(KINDS)}")


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        got = "nothing" if value is None else type(value).__name__
        raise ConfigError(f"{where}: {key}: got {got}, expected a string")
    return value


def _instruction(record: Mapping[str, Any], where: str, template: Template) -> str:
    """The prompt of a record of Alpaca's or BELLE's."""
    instruction = _text(record, "instruction", where)
    given = _text(record, "input", where) if record.get("input") is not None else ""
    if template == "alpaca":
        form = ALPACA_INPUT if given else ALPACA
        return form.format(instruction=instruction, input=given)
    whole = f"{instruction}\n{given}" if given else instruction
    return BELLE.format(instruction=whole) if template == "belle" else whole


def _chat(record: Mapping[str, Any], where: str, tokenizer: Tokenizer) -> Pieces:
    """The rendered messages, of which what is written for each answer is learned."""
    if not tokenizer.has_chat_template:
        raise ConfigError(
            f"{where}: messages: {tokenizer.source} has no chat template",
            "processor.tokenizer.chat_template= gives it, or prompt and completion in place of"
            " messages",
        )
    messages, tools = record["messages"], record.get("tools")
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        raise ConfigError(f"{where}: messages: expected a list of objects")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(one, Mapping) for one in tools)
    ):
        raise ConfigError(f"{where}: tools: expected a list of objects")
    needed = ("role", "content") if tokenizer.chat_template is None else ("role",)
    for message, key in itertools.product(messages, needed):
        _text(message, key, f"{where}: messages")
    pieces: Pieces = []
    done: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = tokenizer.chat_parts(messages[:index], True, tools)
            after = tokenizer.chat_parts(messages[: index + 1], False, tools)
        except (ConfigError, ArtifactError) as error:
            hint = "check the roles and their order, or prompt and completion in place of messages"
            raise ConfigError(f"{where}: {error.message}", hint) from None
        prompt, answer = _behind(done, before), _behind(before, after)
        if prompt is None or answer is None:
            raise ConfigError(
                f"{where}: the chat template renders earlier messages differently once later ones"
                " follow, so the answers cannot be located",
                "give one answer in each conversation, or prompt and completion",
            )
        pieces += [*((part, False) for part in prompt), *((part, True) for part in answer)]
        done = after
    if not pieces:
        raise ConfigError(f"{where}: messages: none has the role assistant")
    last, _ = pieces[-1]  # text after the end token of a template is not part of the answer
    return [*pieces[:-1], (last.rstrip("\n") if last.strip() else last, True)]


def _behind(start: list[str], parts: list[str]) -> list[str] | None:
    """The parts of a chat behind those of its start, whose last text may go on; None where it
    starts otherwise."""
    if not start:
        return parts
    *same, last = start
    count = len(same)
    if parts[:count] != same or not (behind := parts[count:]) or not behind[0].startswith(last):
        return None
    rest, others = behind[0][len(last) :], behind[1:]
    return [rest, *others] if rest or not others else others


def records_of(path: Path) -> Iterator[tuple[str, Any]]:
    """The place and the value of each record in a file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"{path}: more than {MAX_BYTES >> 20} MiB")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    del raw
    readers = {".jsonl": _lines, ".json": _list, ".csv": _table}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        endings = ", ".join([*readers, ".mindrecord"])
        raise ConfigError(f"{path}: expected a file ending in {endings}")
    yield from itertools.islice(reader(path, text), MAX_RECORDS)


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _json(line, where)


def _list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """A list of records; a file with one object per line is JSON lines, whatever its name."""
    if not text.lstrip().startswith("["):
        yield from _lines(path, text)
        return
    for number, record in enumerate(_json(text, str(path)), 1):
        yield f"{path}, record {number}", record


def _json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None


def _table(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for name, count in Counter(reader.fieldnames or ()).items():
            if name and count > 1:
                raise ConfigError(f"{path}, line 1: {count} columns are called {name}")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():  # more columns, or fewer
                raise ConfigError(
                    f"{where}: expected {len(reader.fieldnames or ())} columns, as"
                    " the first line has"
                )
            yield where, row
    except csv.Error as error:
        where = f"{path}, line {reader.line_num}"
        raise ConfigError(f"{where}: not valid CSV: {error}") from None
