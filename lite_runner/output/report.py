"""The run folder under output_dir, and the results in it.

`<output_dir>/<date>/<time>-<run_mode>-<model>/` holds config.yaml, run.log, result.json and
text_generation_result.txt; `<output_dir>/latest` points at the newest. A file stands under its
name only when it is whole.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from lite_runner.config.generation import FinishReason
from lite_runner.errors import EnvironmentFault, RunnerError
from lite_runner.system import memory
from lite_runner.system.files import make_folder, temporary_folder
from lite_runner.system.versions import versions

if TYPE_CHECKING:
    from lite_runner.config.schema import RunConfig

logger = logging.getLogger("lite_runner")

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PROBE_BYTES = 1 << 20  # more than a run writes besides artefacts, logs of long runs apart


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
    id: int | str | None = None  # of the prompt, where it was given one
    messages: Sequence[Mapping[str, str]] | None = None  # of a chat; prompt is the last of them
    cached_tokens: int = 0  # of prompt_tokens, those that another prompt's cache had already
    # Where asked for: "token", "logprob" and "top" of each drawn token, also the one that ended the
    # text; and of the prompt's, where None stands for the first, which has no logits.
    logprobs: Sequence[Mapping[str, Any]] | None = None
    prompt_logprobs: Sequence[Mapping[str, Any] | None] | None = None


@dataclass(frozen=True)
class AdapterUse:
    """What a run did with one adapter, or with the base model alone."""

    modules: int  # weights that it changes
    prompts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0  # of prefill and decode; rows of a step have equal parts in it


@dataclass(frozen=True)
class AdapterReport:
    """The adapters of a run."""

    places: int  # loaded at a time
    pool_bytes: int  # on the devices
    loads: int
    used: Mapping[str, AdapterUse]  # by name; "base" without an adapter


@dataclass(frozen=True)
class Evaluation:
    """The perplexity of a model on a text."""

    perplexity: float  # exp of the mean negative natural log-likelihood of the scored tokens
    tokens: int  # of the text
    scored_tokens: int  # all but those that begin a window; fewer after Ctrl-C
    windows: int  # that were scored
    window: int  # tokens that are seen together
    stride: int  # tokens from window to window
    seconds: float  # of scoring, without loading and compiling
    tok_s: float  # tokens put through the model a second; those of overlaps count each time
    interrupted: bool  # by Ctrl-C: the figures are those of the windows before
    quant: str = "none"  # how the weights are held


@dataclass(frozen=True)
class Timing:
    """Seconds and tokens a second, None where not measured. Rates never include compiling."""

    load_s: float | None = None
    compile_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    time_to_first_token_s: float | None = None


def peak_rss_mib() -> float:
    """The most memory that this process has held so far, in MiB; so has each of those that it has
    started and that still run, such as Lite's, which are counted too."""
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
    load_checkpoint: str  # where the weights are from; "random" when made from the seed
    seed: int | None = None  # that tokens were drawn by; left out where none were
    config_file: str = "config.yaml"  # beside result.json
    versions: Mapping[str, str] = field(default_factory=versions)
    results: Sequence[RowResult]
    adapters: AdapterReport | None = None  # left out where there are none
    evaluation: Evaluation | None = None  # of run_mode=eval
    bench: Mapping[str, Any] | None = None  # of run_mode=bench
    timing: Timing
    peak_rss_mib: float = field(default_factory=peak_rss_mib)

    @classmethod
    def of_files(
        cls,
        config: RunConfig,
        source: str,
        began: float,
        *,
        engine: str = "none",
        world_size: int = 1,
    ) -> Result:
        """Of a run that made files out of `source` since `began` (time.perf_counter()); `engine` is
        the one that proved them."""
        return cls(
            run_mode=config.run_mode,
            model=config.model_name,
            backend=config.backend,
            engine=engine,
            world_size=world_size,
            load_checkpoint=source,
            results=[],
            timing=Timing(load_s=time.perf_counter() - began),
        )

    def to_json(self) -> str:
        """Readable JSON, text un-escaped. A NaN or infinity is a ValueError: JSON has none."""
        plain = asdict(self)
        for name in ("seed", "adapters", "evaluation", "bench"):
            if plain[name] is None:
                del plain[name]
        for row in plain["results"]:
            for name in ("id", "messages", "logprobs", "prompt_logprobs"):
                if row[name] is None:
                    del row[name]
        return json.dumps(plain, ensure_ascii=False, indent=2, allow_nan=False) + "\n"


class RunFolder:
    """The folder of one run; a context manager that logs how the run failed and closes its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log: logging.Handler | None = None

    @classmethod
    def create(
        cls,
        output_dir: str | Path,
        run_mode: str,
        model: str,
        now: datetime | None = None,
    ) -> RunFolder:
        """Make the folder, prove that it can be written, and point `latest` at it.

        Cheap, so call it before a model is loaded. Runs of the same second get folders of
        their own. Raises EnvironmentFault where the folder cannot be made or is full.
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
        return cls(path)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._log is not None and isinstance(error, RunnerError):
            logger.error("%s", error)
        elif self._log is not None and error is not None:
            logger.error("ended by %s", type(error).__name__, exc_info=error)
        self.close()

    def open_log(self, name: str = "run.log") -> None:
        """Send what lite_runner logs to a file, everything from INFO on, until `close`."""
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

    def write_config(self, config: Mapping[str, Any]) -> Path:
        """Write the resolved config, plain containers and scalars, as config.yaml."""
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        return self.write_text("config.yaml", text)

    def write_result(self, result: Result, texts_per_prompt: int = 1) -> Path:
        """Write result.json and text_generation_result.txt; gives the path of the former.

        The text file has MindFormers' form: a list with a dict for each prompt, its texts with
        the prompt in front. `texts_per_prompt` neighbouring rows belong to one prompt.
        """
        texts = [row.prompt + row.text for row in result.results]
        answers = [
            {"text_generation_text": texts[start : start + texts_per_prompt]}
            for start in range(0, len(texts), texts_per_prompt)
        ]
        self.write_text("text_generation_result.txt", str(answers))
        return self.write_text("result.json", result.to_json())

    @contextmanager
    def private(self, name: str, text: str) -> Iterator[Path]:
        """A file that this user alone may read, for as long as it is needed."""
        path = self.path / name
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        except OSError as error:
            raise _not_writable(path, error) from error
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def write_text(self, name: str, text: str) -> Path:
        """Write a whole file or none; EnvironmentFault where the disk does not take it."""
        # An argument that was no UTF-8 holds lone surrogates; their escape is valid JSON.
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
    """A log that falls silent on a full disk: the job goes on, and its results say so."""

    def _open(self) -> TextIOWrapper:
        return open(
            self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=_opener
        )

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):  # what could not be written fails once more here
            super().close()


def _make_new(parent: Path, name: str) -> Path:
    """A folder that did not exist: `name`, or the first free `name-2`, `name-3`, ..."""
    parent.mkdir(parents=True, exist_ok=True)
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = parent / f"{name}-{number}"


def _probe(folder: Path) -> None:
    """Write and sync a file: permission and space show only then."""
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
    """Point `link` at `target` in one step: a reader sees the old folder or the new one."""
    if link.is_dir() and not link.is_symlink():
        raise OSError(errno.EEXIST, "a folder stands where a link is to be", str(link))
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
    return os.open(path, flags, 0o640)


def _not_writable(path: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"cannot write to {error.filename or path}: {error.strerror or error}",
        "free some space or choose another folder with output_dir=DIR",
    )
