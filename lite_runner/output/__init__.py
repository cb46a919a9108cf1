"""The run folder under output_dir, and the results in it.

`<output_dir>/<date>/<time>-<run_mode>-<model>/` holds config.yaml, run.log, result.json and
text_generation_result.txt; `<output_dir>/latest` links to the newest. Files are written atomically.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, field
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from lite_runner import profiler
from lite_runner.architectures.quantization import Quantization
from lite_runner.backends import seat
from lite_runner.config.generation import FinishReason
from lite_runner.config.schema import BACKENDS
from lite_runner.errors import EnvironmentFault, RunnerError
from lite_runner.records import dataclass
from lite_runner.system import environment, memory
from lite_runner.system.environment import versions
from lite_runner.system.files import GROUP_MAY_READ, make_folder, temporary_folder

if TYPE_CHECKING:
    from lite_runner.model import ModelFiles
    from lite_runner.output.comparison import ScoreComparison, TextComparison
    from lite_runner.plan import Plan

logger = logging.getLogger("lite_runner")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
RESULT = "result.json"
CONFIG = "config.yaml"
ANSWERS = "text_generation_result.txt"  # MindFormers' name of it
PROBE_BYTES = 1 << 20  # more than a run writes, except artifacts and logs of long runs


@dataclass(frozen=True)
class RowResult:
    """One generated text. `text` and `token_ids` are without the prompt."""

    prompt: str
    text: str
    token_ids: Sequence[int]
    prompt_tokens: int
    generated_tokens: int
    finish_reason: FinishReason
    adapter: str | None = None  # None: the base model
    id: int | str | None = None  # of the prompt, if it has one
    messages: Sequence[Mapping[str, str]] | None = None  # of a chat; prompt is the last of them
    cached_tokens: int = 0  # prompt_tokens reused from the prefix cache
    # "token", "logprob" and "top" of each generated token, an eos token included; and of the
    # prompt's tokens, None for the first, which has no logits.
    logprobs: Sequence[Mapping[str, Any]] | None = None
    prompt_logprobs: Sequence[Mapping[str, Any] | None] | None = None


@dataclass(frozen=True)
class AdapterUse:
    """Use of one adapter, or of the base model alone."""

    modules: int  # target modules
    prompts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0  # of prefill and decode; a step's time is divided equally among its rows


@dataclass(frozen=True)
class AdapterReport:
    """The adapters of a run."""

    places: int  # adapter slots
    pool_bytes: int  # on the devices
    loads: int
    used: Mapping[str, AdapterUse]  # by name; "base" without an adapter


@dataclass(frozen=True)
class Evaluation:
    """The perplexity of a model on a text."""

    perplexity: float  # exp of the mean negative log-likelihood of the scored tokens
    tokens: int  # of the text
    scored_tokens: int  # all but the first of a window without overlap; fewer after Ctrl-C
    windows: int  # that were scored
    window: int  # tokens per window
    stride: int  # tokens between the starts of windows
    seconds: float  # of scoring, without loading and compiling
    tok_s: float  # tokens computed per second, overlaps included
    interrupted: bool  # by Ctrl-C: the figures are of the windows before
    quant: str = "none"  # quantization of the weights


@dataclass(frozen=True)
class Timing:
    """Seconds and tokens per second, None where not measured; rates exclude compiling."""

    load_s: float | None = None
    compile_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    time_to_first_token_s: float | None = None
    drafted_tokens: int | None = None  # by speculate= or draft_model=
    accepted_tokens: int | None = None  # of these
    preemptions: int | None = None  # sequences recomputed later, for lack of memory


def peak_rss_mib() -> float:
    """Peak resident memory of this process and its running children, such as Lite's, in MiB."""
    return round(memory.peak() / 2**20, 1)


@dataclass(frozen=True, kw_only=True)
class Result:
    """All of result.json, in its order."""

    schema: int = 1
    run_mode: str
    model: str
    backend: str
    engine: str
    world_size: int = 1
    load_checkpoint: str  # the weights' source; "random": from the seed
    seed: int | None = None  # of sampling; omitted for greedy runs
    config_file: str = CONFIG  # beside result.json
    versions: Mapping[str, str] = field(default_factory=versions)
    provenance: Mapping[str, str] = field(default_factory=dict)  # processor, kernels, weights
    results: Sequence[RowResult] = ()  # of run modes that generate
    adapters: AdapterReport | None = None  # omitted without adapters
    evaluation: Evaluation | None = None  # of run_mode=eval
    tasks: Mapping[str, Any] | None = None  # of run_mode=eval over tasks
    bench: Mapping[str, Any] | None = None  # of run_mode=bench
    finetune: Mapping[str, Any] | None = None  # of run_mode=finetune
    comparison: TextComparison | ScoreComparison | None = None  # of compare_backend
    profile: Mapping[str, Any] | None = None  # of profile=true
    timing: Timing
    peak_rss_mib: float = field(default_factory=peak_rss_mib)

    @classmethod
    def of(cls, plan: Plan, source: str, *, engine: str, **others: Any) -> Result:
        """The result of a run with weights from `source`."""
        config = plan.config
        return cls(
            run_mode=config.run_mode,
            model=config.model_name,
            backend=config.backend,
            engine=engine,
            load_checkpoint=source,
            provenance=_provenance(config.backend, plan.files),
            **others,
        )

    @classmethod
    def of_files(
        cls, plan: Plan, source: str, began: float, *, engine: str = "none", world_size: int = 1
    ) -> Result:
        """The result of a run that wrote files from `source` since `began` (time.perf_counter());
        `engine` verified them."""
        timing = Timing(load_s=time.perf_counter() - began)
        return cls.of(plan, source, engine=engine, world_size=world_size, timing=timing)

    def answers(
        self, texts_per_prompt: int = 1, *, chat: bool = False
    ) -> list[dict[str, list[str]]]:
        """The texts in MindFormers' form: a dict per prompt, whose texts begin with the prompt; the
        answers of a `chat` stand alone.

        `texts_per_prompt` consecutive rows belong to one prompt.
        """
        texts = [
            row.text if chat or row.messages else row.prompt + row.text for row in self.results
        ]
        return [
            {"text_generation_text": texts[start : start + texts_per_prompt]}
            for start in range(0, len(texts), texts_per_prompt)
        ]

    def to_json(self) -> str:
        """Indented JSON, text not escaped. Raises ValueError for NaN and infinity."""
        plain = asdict(self)
        optional = ("seed", "adapters", "evaluation", "tasks", "bench", "finetune", "comparison")
        for name in (*optional, "profile"):
            if plain[name] is None:
                del plain[name]
        for row in plain["results"]:
            for name in ("id", "messages", "logprobs", "prompt_logprobs"):
                if row[name] is None:
                    del row[name]
        return json.dumps(plain, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def _provenance(backend: str, files: ModelFiles | None) -> dict[str, str]:
    """Everything that the bits of the result depend on besides the config."""
    found = {"processor": environment.processor()}
    if backend in BACKENDS:  # else nothing is computed
        chosen = seat(backend)
        found |= chosen.provenance()
        if files is not None and (quant := chosen.quantization(files)) != Quantization():
            found["quant"] = str(quant)
    if files is not None and (digest := files.digest) is not None:
        found["weights"] = digest
    return found


class RunFolder:
    """The folder of one run; a context manager that logs errors and closes the log."""

    newest: ClassVar[Path | None] = None  # created by this process

    def __init__(self, path: Path, values: Path | None = None) -> None:
        """`values`: a folder for what is computed, of a run that is compared."""
        self.path, self.values = path, values
        self.result: Result | None = None  # as last written
        self._log: logging.Handler | None = None

    @classmethod
    def create(
        cls,
        output_dir: str | Path,
        run_mode: str,
        model: str,
        config: str = "",
        now: datetime | None = None,
    ) -> RunFolder:
        """Create the folder, check that it is writable, link `latest` to it, and write `config`,
        the text of its config.yaml.

        Cheap: call it before loading a model. Names are unique. Raises EnvironmentFault where the
        folder cannot be created or the disk is full.
        """
        base = Path(output_dir).expanduser().absolute()
        make_folder(base, "choose another folder with output_dir=DIR")
        moment = now or datetime.now()
        name = re.sub(r"[^\w.+-]+", "_", f"{moment:%H%M%S}-{run_mode}-{model}")
        path = base
        try:
            path = _make_new(base / f"{moment:%Y-%m-%d}", name)
            _probe(path)
            _link(base / "latest", path)
        except OSError as error:
            raise _not_writable(path, error) from error
        cls.newest = path
        folder = cls(path)
        if config:
            folder.write_text(CONFIG, config)
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._log is not None and error is not None:
            # In the file alone: on standard error it is the last line of the process.
            text, trace = str(error), None
            if not isinstance(error, RunnerError):
                text, trace = f"ended by {type(error).__name__}", (type(error), error, traceback)
            record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, text, (), trace)
            self._log.handle(record)
        self.close()

    def open_log(self, name: str = "run.log") -> None:
        """Log lite_runner's messages from INFO on to a file, until `close`."""
        try:
            handler = _LogFile(self.path / name, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise _not_writable(self.path, error) from error
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logger.addHandler(handler)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
        self._log = handler

    def close(self) -> None:
        """Close the log; calling it twice is harmless."""
        if self._log is not None:
            logger.removeHandler(self._log)
            self._log.close()
            self._log = None

    def write_result(self, result: Result) -> Path:
        self.result = result
        with profiler.phase("write"):
            return self.write_text(RESULT, result.to_json())

    def write_text(self, name: str, text: str) -> Path:
        """Write a file atomically. Raises EnvironmentFault, e.g. for a full disk."""
        # An argument that was not UTF-8 holds lone surrogates; their escape is valid JSON.
        return self.write_bytes(name, text.encode("utf-8", errors="backslashreplace"))

    def write_bytes(self, name: str, content: bytes) -> Path:
        """As `write_text`."""
        target = self.path / name
        partial = target.with_name(f".{name}.{os.getpid()}.partial")
        try:
            _write_synced(partial, content)
            partial.replace(target)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise _not_writable(target, error) from error
        return target


class _LogFile(logging.FileHandler):
    """A log file that ignores a full disk: writing the results reports it."""

    def _open(self) -> TextIOWrapper:
        return open(
            self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=_opener
        )

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):  # buffered lines that could not be written fail again here
            super().close()


def _make_new(parent: Path, name: str) -> Path:
    """A folder that did not exist: `name`, or the first free `name-2`, `name-3`, ..."""
    parent.mkdir(parents=True, exist_ok=True)
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir(mode=0o700)  # prompts and answers are the user's
            return path
        except FileExistsError:
            number += 1
            path = parent / f"{name}-{number}"


def _probe(folder: Path) -> None:
    """Write and sync a file, to find missing permissions and a full disk."""
    probe = folder / ".probe"
    try:
        _write_synced(probe, bytes(PROBE_BYTES))
    except OSError:
        with suppress(OSError):
            probe.unlink()
            folder.rmdir()
        raise
    probe.unlink()


def _link(link: Path, target: Path) -> None:
    """Point `link` at `target` atomically."""
    if os.path.lexists(link) and not link.is_symlink():
        raise OSError(errno.EEXIST, "no link to a run, but a file or folder of yours", str(link))
    with temporary_folder("latest", link.parent) as staging:
        fresh = staging / "link"
        fresh.symlink_to(target.relative_to(link.parent), target_is_directory=True)
        fresh.replace(link)


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb", opener=_opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _opener(path: str, flags: int) -> int:
    """Prompts and texts are for the user and the group, whatever the umask allows."""
    return os.open(path, flags, GROUP_MAY_READ)


def _not_writable(path: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"cannot write to {error.filename or path}: {error.strerror or error}",
        "free some space or choose another folder with output_dir=DIR",
    )
