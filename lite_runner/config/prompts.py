"""The requests of a run, read from predict_data: each prompt with its adapter, and the seed.

predict_data is a text, a list, standard input, or a file: lines of .txt, records of .jsonl and
.json, rows of .csv.
"""

from __future__ import annotations

import csv
import io
import json
import secrets
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.config import (
    NEAR_NAME,
    Invalid,
    accepts,
    did_you_mean,
    hints_of,
    invalid,
    nearest,
    read,
    show,
)
from lite_runner.config.argv import value_of
from lite_runner.config.generation import SAMPLING, GenerationConfig, sampled, sampling_errors
from lite_runner.config.prompt import (
    Item,
    Items,
    Message,
    Request,
    adapter_name,
    errors_of,
    is_utf8,
    requests_of,
)
from lite_runner.config.schema import Config, ExportedOptions, GenerateOptions, RunConfig
from lite_runner.errors import ConfigError
from lite_runner.system.files import parse_json

MAX_PROMPT_BYTES = 64 << 20
STANDARD_INPUT = "-"
SEEDS = 2**32
_FIELDS = tuple(field.name for field in fields(Request))
KEYS = tuple(dict.fromkeys((*Request.__annotations__, *_FIELDS)))  # its own first
# Options of the whole run, not allowed in a record.
RUN_LEVEL = {*GenerationConfig.__dataclass_fields__, "adapter_id", "system"} - {*KEYS}
MAX_RECORDS = 1 << 20
_MAX_SHOWN = 10  # errors listed per file
# Validation errors of a request of this run.
Check = Callable[[Request], list[str]]


def prompt_file(predict_data: str | Items) -> Path | None:
    """The file that a single text names; a list holds texts only.

    A text that ends in .txt always means one, and the other kinds where it is one word, or a file
    that is there.
    """
    path = _path(predict_data)
    if path is None or path.suffix.lower() not in READERS:
        return None
    named = str(predict_data).endswith(".txt") or not any(map(str.isspace, str(predict_data)))
    return path if named or is_file(path) else None


def is_file(path: Path) -> bool:
    """True if a file exists; never raises, whatever the name."""
    try:
        return path.is_file()
    except OSError:  # too long for a file name
        return False


def prompt_errors(config: GenerateOptions) -> Iterator[Invalid]:
    """Validation errors of the prompts, as far as they show without reading a file."""
    for text in _data_errors(config):
        yield invalid("predict_data", text)
    if config.system and not config.chat:
        yield invalid(
            ("system", "chat"), "system= needs chat=true: it is the first message of a chat"
        )
    if config.enable_thinking is not None and not config.chat:
        yield invalid(
            ("enable_thinking", "chat"), "enable_thinking= needs chat=true: templates switch it"
        )
    if not is_utf8(config.system):
        yield invalid("system", "system: not valid UTF-8")


def _data_errors(config: GenerateOptions) -> Iterator[str]:
    data = config.predict_data
    if not data:
        if not config.dry_run and not config.only_save_strategy:
            example = "predict_data='The capital of France is'"
            yield f"predict_data is empty; give a prompt: {example}"
        return
    if isinstance(data, str):
        if not is_utf8(data):
            yield "predict_data: not valid UTF-8"
        if data != STANDARD_INPUT:
            yield from file_errors(data, _as_prompt(data))
        return
    try:
        requests = requests_of(data)
    except ValueError as error:
        yield f"predict_data: {error}"
        return
    check = _check(config)
    for i, request in enumerate(requests):
        where = f"predict_data[{i}]" if len(requests) == len(data) else "predict_data"
        for text in check(request):
            yield f"{where}: {text}"


def _as_prompt(data: str) -> str:
    """What to type where a text that names a file is meant as a prompt."""
    return f"as a prompt: predict_data={shlex.quote(json.dumps([data], ensure_ascii=False))}"


def file_errors(data: str, as_text: str) -> Iterator[str]:
    """Errors of a text that names a file: a missing one, or of a kind that is not read; `as_text`
    says what to do where a text is meant."""
    path = prompt_file(data)
    if path is not None and not is_file(path):
        yield (
            f"predict_data: no file {path}; a text that ends in {path.suffix} names a file of"
            f" prompts ({as_text})"
        )
    elif path is None and (there := _path(data)) is not None and is_file(there):
        kinds = ", ".join(READERS)
        yield f"predict_data: {data} is a file, expected one of {kinds} ({as_text})"


def read_prompts(config: GenerateOptions) -> list[str | Request]:
    """The prompts of a run, as typed; the lines of a file and standard input without their end.

    Standard input can be read once. Raises ConfigError for a file or an input that cannot be
    read, is not UTF-8, or holds no prompt, and for what is wrong in it.
    """
    data = config.predict_data
    path = prompt_file(data)
    if path is not None:
        found = _read_file(path, _check(config))
        if not found:
            raise ConfigError(f"predict_data: {path} has no lines; expected one prompt per line")
        return list(found)
    if data == STANDARD_INPUT:
        return [_standard_input(config.verbosity)]
    if isinstance(data, str):
        return [data] if data else []
    texts = [item for item in data if isinstance(item, str)]
    return [*texts] if len(texts) == len(data) else [*requests_of(data)]


def _standard_input(verbosity: int) -> str:
    if sys.stdin.isatty() and verbosity > 0:
        print("type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr)
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    text = decoded(raw, "predict_data: standard input").removeprefix("\ufeff")
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ConfigError("predict_data: standard input is empty; expected a prompt")
    return text


def completed(config: Config, *, draws_seed: bool) -> Config:
    """The config of a run that can be repeated: with the prompt of standard input, which is read
    once, and with `draws_seed` a seed to sample by. Raises ConfigError as `read_prompts`."""
    if isinstance(config, GenerateOptions) and config.predict_data == STANDARD_INPUT:
        config = replace(config, predict_data=(_standard_input(config.verbosity),))
    return with_seed(config) if draws_seed else config


def read_texts(data: str) -> list[str]:
    """The prompts of a file as texts; another text is one itself. Raises ConfigError for a file
    that is missing or broken, and for records with more than a prompt."""
    path = prompt_file(data)
    if path is None:
        return [data]

    def errors(request: Request) -> list[str]:
        given = [name for name, value in vars(request).items() if value is not None]
        others = [name for name in given if name not in ("prompt", "id")]
        if request.prompt is None or others:
            return [f"got {', '.join(others) or 'no prompt'}, expected a prompt alone"]
        return errors_of(request, adapters=False)

    found = _read_file(path, errors)
    if not found:
        raise ConfigError(f"predict_data: {path} has no texts; expected one per line")
    return [one if isinstance(one, str) else one.text for one in found]


def prompt_count(items: Sequence[Item]) -> int:
    """The number of prompts in a list; of its items if it is invalid."""
    try:
        return len(requests_of(items))
    except ValueError:
        return len(items)


def _check(config: GenerateOptions) -> Check:
    """Validation errors of a request of this run."""
    shared = config.generation()

    def errors(request: Request) -> list[str]:
        found = errors_of(request, adapters=bool(config.adapter_path))
        return found + _option_errors(config, shared, request)

    return errors


def _option_errors(
    config: ExportedOptions, shared: GenerationConfig, request: Request
) -> list[str]:
    """Validation errors of a prompt's options, with each other and with the run's (`shared`)."""
    own = request.own | request.structured
    if not own:
        return []
    every = sampling_errors(config, request.options(shared), own)
    return [one.text for one in every if not own.keys().isdisjoint(one.keys)]


def _path(predict_data: str | Items) -> Path | None:
    """The path that a single text would name."""
    if not isinstance(predict_data, str) or "\n" in predict_data or "\0" in predict_data:
        return None
    try:
        return Path(predict_data).expanduser()
    except RuntimeError:  # ~name of nobody
        return Path(predict_data)


def _read_file(path: Path, check: Check) -> Sequence[str | Request]:
    """The prompts of a file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"predict_data: {path}: {error.strerror}",
            f"a text that ends in {path.suffix} is a file of prompts; {_as_prompt(str(path))}",
        ) from None
    text = decoded(raw, f"predict_data: {path}").removeprefix("\ufeff")
    return READERS[path.suffix.lower()](path, text, check)


def decoded(raw: bytes, where: str) -> str:
    """UTF-8 as text; other bytes, or too many, are a ConfigError that begins with `where`."""
    if len(raw) > MAX_PROMPT_BYTES:
        raise ConfigError(f"{where} has more than {MAX_PROMPT_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}",
            "convert it: iconv -f GB18030 -t UTF-8",
        ) from None


def read_txt(_path: Path, text: str, _: Check) -> list[str]:
    """The non-blank lines of a .txt file; \\n in a line is a line break."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return [line.replace("\\n", "\n") for line in lines if line.strip()]


def read_jsonl(path: Path, text: str, check: Check) -> list[Request]:
    """A request per non-blank line."""
    records = (
        (f"{path}:{number}", _json(line.rstrip("\r\n"), f"{path}:{number}"))
        for number, line in enumerate(io.StringIO(text, newline="\n"), 1)
        if line.strip()
    )
    return _requests(path, records, check)


def read_json(path: Path, text: str, check: Check) -> list[Request]:
    """The requests of a JSON value: a record, a list of records, or the messages of a chat."""
    value = _json(text, str(path))
    if not isinstance(value, list) or _is_chat(value):
        return _requests(path, [(str(path), value)], check)
    return _requests(path, [(f"{path}[{i}]", entry) for i, entry in enumerate(value)], check)


def read_csv(path: Path, text: str, check: Check) -> list[Request]:
    """A request per row. The first row names the columns: `prompt`, or any name of an only column,
    and other keys of a record."""
    before = csv.field_size_limit(max(len(text), 1))
    try:
        return _requests(path, _csv_records(path, text), check)
    finally:
        csv.field_size_limit(before)


READERS: dict[str, Callable[[Path, str, Check], Sequence[str | Request]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
}


def _csv_records(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] = []
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            where = f"{path}:{reader.line_num}"
            if not columns:
                columns = _columns(where, row)
                continue
            if len(row) != len(columns):
                raise ConfigError(
                    f"{where}: got {len(row)} columns, expected {len(columns)}:"
                    f" {', '.join(columns)}",
                    "put a value that contains a comma or a line break in double quotes",
                )
            # Empty cells are null, except an empty prompt.
            cells = zip(columns, row, strict=True)
            yield where, {n: _cell(n, c) for n, c in cells if c or n == "prompt"}
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: not CSV: {error}") from None


def _columns(where: str, row: list[str]) -> list[str]:
    names = [name.strip() for name in row]
    listed = ", ".join(map(repr, names))
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: got the columns {listed}, expected each name once")
    if "prompt" in names:
        return names
    if len(names) > 1:
        raise ConfigError(
            f"{where}: got the columns {listed}, expected one that is called prompt, or only one",
            "name the column of the prompts: prompt",
        )
    if any(mark in names[0] for mark in ";\t|"):
        raise ConfigError(f"{where}: got {names[0]!r}, expected columns with commas between them")
    progress.note(f"{where}: the prompts are in the column {names[0]!r}, as its first line says")
    return ["prompt"]


def _cell(name: str, text: str) -> Any:
    """The value of a cell: text, a number, a boolean, or a list of texts."""
    expected = hints_of(Request).get(name, str)
    if name in ("stop", "guided_choice"):
        return value_of(text, expected)
    if accepts(expected, str):
        return text
    try:
        value = parse_json(text.lower())  # spreadsheets write TRUE
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        # A .jsonl record is a single line.
        line = f":{error.lineno}" if "\n" in text else ""
        text = f"{where}{line}: not JSON at column {error.colno}: {error.msg}"
        raise ConfigError(text) from None
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None


def _is_chat(value: Any) -> bool:
    """True if a JSON value is a list of messages."""
    return isinstance(value, list) and any(
        isinstance(entry, dict) and "role" in entry for entry in value
    )


def _requests(path: Path, records: Iterable[tuple[str, Any]], check: Check) -> list[Request]:
    """Requests of (location, record) pairs. Unknown keys are the user's own data, listed in a note.
    Raises ConfigError for invalid records, and for more than MAX_RECORDS."""
    errors: list[str] = []
    more = 0  # errors beyond _MAX_SHOWN
    unread: set[str] = set()
    found: list[Request] = []
    for where, record in records:
        if not found and isinstance(record, dict) and record.keys() >= {"custom_id", "url", "body"}:
            raise ConfigError(
                f"{path}: requests in OpenAI's batch form, which the server answers",
                f"run_mode=serve serve.batch={path}",
            )
        mine: list[Invalid] = []
        request = _request(record, unread, mine)
        texts = [error.text for error in mine] or check(request)
        room = _MAX_SHOWN - len(errors)
        errors += [f"{where}: {text}" for text in texts[:room]]
        more += len(texts[room:])
        found.append(request)
        if len(found) > MAX_RECORDS:
            raise ConfigError(f"{path} has more than {MAX_RECORDS} prompts", "split the file")
    listed = f"the keys of a prompt in a file are {', '.join(KEYS)}"
    if not found:
        raise ConfigError(f"{path} has no prompts", listed)
    if len(errors) == 1:
        raise ConfigError(errors[0], listed)
    if errors:
        rest = [f"and {more} more"] if more else []
        lines = "".join(f"\n  - {text}" for text in [*errors, *rest])
        raise ConfigError(f"{len(errors) + more} errors in {path}:{lines}", listed)
    if unread:
        progress.note(f"{path}: not read: {', '.join(sorted(unread))}")
    return found


def _request(record: Any, unread: set[str], errors: list[Invalid]) -> Any:
    if isinstance(record, str):
        return Request(prompt=record)
    if _is_chat(record):
        return Request(messages=read(record, tuple[Message, ...], "messages", errors))
    if not isinstance(record, dict):
        errors.append(Invalid((), f"got {show(record)}, expected an object with a prompt"))
        return None
    for name in record.keys() - {*KEYS}:
        near = nearest(name, [key for key in KEYS if key != "id"], cutoff=NEAR_NAME)
        if name in RUN_LEVEL:
            text = f"{name} is set for all prompts of a run, as {name}=, not for one"
            errors.append(Invalid((name,), text))
        elif near:
            errors.append(Invalid((name,), f"{name}: no such key{did_you_mean(near)}"))
        else:
            unread.add(name)
    return read({name: record[name] for name in KEYS if name in record}, Request, "", errors)


def read_requests(config: GenerateOptions) -> list[Request]:
    """The prompts of a run, each with its adapter, None for the base model.

    A .txt file of run_mode=slora without adapter_id has lines `adapter<TAB>prompt`; elsewhere no
    name means the base model. Raises ConfigError, also where the numbers of adapters and prompts
    differ.
    """
    prompts, ids = read_prompts(config), config.adapter_id
    file, lines = prompt_file(config.predict_data), [one for one in prompts if isinstance(one, str)]
    if config.adapter_lines and ids is None and file is not None and lines:
        return _split_lines(config, lines)
    requests = [Request(prompt=one) if isinstance(one, str) else one for one in prompts]
    if isinstance(ids, tuple) and (text := _count_error(ids, requests)):
        raise ConfigError(text)
    several = ids if isinstance(ids, tuple) else [ids] * len(requests)
    return [
        replace(request, adapter=adapter_name(name if request.adapter is None else request.adapter))
        for request, name in zip(requests, several, strict=True)
    ]


def adapter_names(ids: str | Sequence[str | None] | None) -> list[str]:
    """The adapters named by a config's adapter_id, without the base model."""
    given = [ids] if ids is None or isinstance(ids, str) else ids
    return [name for name in map(adapter_name, given) if name is not None]


def request_errors(config: GenerateOptions) -> Iterator[Invalid]:
    """Validation errors of adapters and prompts, without reading prompt files."""
    data, ids = config.predict_data, config.adapter_id
    file = data == STANDARD_INPUT or prompt_file(data) is not None
    if config.adapter_path and config.in_lite:
        yield invalid(
            ("adapter_path", "backend"),
            "adapter_path has no effect with backend=mslite, whose models are exported ones;"
            " run_mode=export adapter_id= exports a model with an adapter merged into it, and"
            " backend=native takes adapters",
        )
    if isinstance(ids, tuple) and data and not file:
        texts = (data,) if isinstance(data, str) else data
        if prompt_count(texts) == len(texts) and (text := _count_error(ids, texts)):
            yield invalid(("adapter_id", "predict_data"), text)


def _count_error(ids: Sequence[str | None], prompts: Sequence[Item]) -> str:
    """The error of a wrong number of adapters; "" for none."""
    if any(isinstance(one, Request) and one.adapter is not None for one in prompts):
        return "adapter_id: got a list, and prompts with adapters of their own; give one of them"
    count = len(prompts)
    if len(ids) == count:
        return ""
    return (
        f"adapter_id: got {len(ids)} for {count} prompt{'s' * (count > 1)}, expected one for each,"
        " or one name for all"
    )


def _split_lines(config: GenerateOptions, lines: Sequence[str]) -> list[Request]:
    found = []
    for number, line in enumerate(lines, 1):
        name, tab, prompt = line.partition("\t")
        if not tab or not prompt:
            raise ConfigError(
                f"predict_data: {config.predict_data}: prompt {number} has no adapter; expected"
                f" adapter<TAB>prompt, got {line[:40]!r}",
                "or one adapter for all of them: adapter_id=NAME",
            )
        found.append(Request(prompt=prompt, adapter=adapter_name(name.strip())))
    return found


def with_seed(config: Config) -> Config:
    """`config` with a seed to sample by. If none is given it is drawn, and the run written with it
    repeats: random weights stay the same."""
    if config.seed is not None or not samples(config):
        return config
    return replace(config, seed=secrets.randbelow(SEEDS), weights_seed=config.checkpoint_seed)


def samples(config: RunConfig) -> bool:
    """True if the run may sample: for all prompts, or for one with its own options."""
    if not isinstance(config, GenerateOptions):
        return False
    if config.samples:
        return True
    data = config.predict_data
    if isinstance(data, str):
        path = prompt_file(data)
        return path is not None and _names_sampling(path)
    return any(isinstance(item, Request) and sampled(item.own) for item in data)


def _names_sampling(path: Path) -> bool:
    """True if an option's name occurs in a file of prompts, without parsing its records."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PROMPT_BYTES)
            return any(name.encode() in content for name in ("do_sample", *SAMPLING))
    except OSError:  # reported when the prompts are read
        return False
