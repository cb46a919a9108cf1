"""The errors a user may see, and the exit code of each kind.

A message says what, where, and got against expected; the hint says what to do next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_ARTIFACT = 4
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_PIPE = 141  # as a shell says of a program whose reader has gone (SIGPIPE)
# Our own texts go on in indented lines; any other break, or control character, is part of a name.
_OWN_BREAK = re.compile(r"(\n(?=  )|\t)")


def _in_python(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shown(text: str) -> str:
    """`text` without control characters: a name that somebody else chose, such as a file's, neither
    forges a line nor steers the terminal."""
    parts = [text] if text.isprintable() else _OWN_BREAK.split(text)
    return "".join(part if part in ("\n", "\t") else escaped(part) for part in parts)


def escaped(text: str, keep: str = "", escape: Callable[[str], str] = _in_python) -> str:
    """`text` without control characters, other than those to `keep`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else escape(one) for one in text)


def show(value: Any) -> str:
    """A value as a message shows it: short, in yaml's words for none, true and false."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a very long number"
    return text if len(text) <= 80 else text[:77] + "..."


class RunnerError(Exception):
    """A job that failed for a reason worth a sentence, not a traceback."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        message = shown(message)
        super().__init__(message)
        self.message = message
        self.hint = shown(hint)

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.hint}" if self.hint else self.message


class NonFiniteError(RunnerError):
    """The model computed NaN or infinity."""


class ConfigError(RunnerError):
    """The config or the command line is wrong; lists every error found, not the first."""

    exit_code = EXIT_CONFIG

    @classmethod
    def of(cls, errors: Sequence[str], most: int | None = None) -> ConfigError:
        """One error for all `errors` of a config, or for the first `most` and how many follow."""
        if most is not None and len(errors) > most:
            errors = [*errors[:most], f"and {len(errors) - most} more"]
        if len(errors) == 1:
            return cls(errors[0])
        listed = "\n".join(f"  - {error}" for error in errors)
        return cls(f"{len(errors)} errors in the config:\n{listed}")


class EnvironmentFault(RunnerError):
    """The machine lacks something: a package, memory, disk, a device, a writable folder."""

    exit_code = EXIT_ENVIRONMENT


class ArtifactError(RunnerError):
    """A checkpoint, tokenizer, adapter or MindIR is missing, broken or of another model."""

    exit_code = EXIT_ARTIFACT


def first_line(error: BaseException) -> str:
    """The first line of another library's message; what kind of error it is, where it has none."""
    return next(iter(str(error).strip().splitlines()), repr(error))


@contextmanager
def of_http() -> Iterator[None]:
    """Raise OSError where an answer is none of HTTP's, or is cut short."""
    from http.client import HTTPException, IncompleteRead

    try:
        yield
    except OSError:  # RemoteDisconnected is both
        raise
    except IncompleteRead as error:
        raise OSError("the connection ended before the answer did") from error
    except HTTPException as error:
        raise OSError(f"got {ascii(error)[:200]}, expected an answer of HTTP") from error
