"""The program of the process that renders chat templates; it imports jinja2 and nothing of ours.

Run as `python -I -S template_worker.py '{"path": [...], "bytes": ..., "seconds": ..., "chars":
...}'`. A message either way is its length (8 bytes, little endian) and JSON: {"template", "values",
"of_task"} in, {"text"} or {"error", "line"} out. It ends with NO_MEMORY where a template needs more
than `bytes`, by SIGXCPU where one takes more than `seconds` of a processor, and at the end of its
input.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

NO_MEMORY = 3
LENGTH = struct.Struct("<Q")


def serve(seconds: int, most_chars: int) -> None:
    """Answer the requests on standard input until it ends."""
    while header := sys.stdin.buffer.read(LENGTH.size):
        request = json.loads(sys.stdin.buffer.read(LENGTH.unpack(header)[0]))
        _allow(seconds)
        answer = _rendered(request, most_chars)
        body = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
        sys.stdout.buffer.write(LENGTH.pack(len(body)) + body)
        sys.stdout.buffer.flush()


def _allow(seconds: int) -> None:
    """Allow so many further seconds of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _rendered(request: Mapping[str, Any], most_chars: int) -> dict[str, Any]:
    pieces: list[str] = []
    length = 0
    try:
        compiled = _compiled_task if request["of_task"] else _compiled
        for piece in compiled(request["template"]).generate(**request["values"]):
            length += len(piece)
            if length > most_chars:
                return {"error": f"its output exceeds {most_chars:,} characters", "line": None}
            pieces.append(piece)
    except MemoryError:
        raise
    # A template may divide by zero, recurse or add a number to a string: any Python error.
    except Exception as error:
        message = " ".join(str(error)[:500].split()) or type(error).__name__
        return {"error": message, "line": getattr(error, "lineno", None)}
    return {"text": "".join(pieces)}


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    from datetime import datetime

    import jinja2
    from jinja2 import ext, nodes, parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(ext.Extension):
        """{% generation %} marks the assistant's turn for training; here its content is kept."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


@lru_cache(maxsize=64)
def _compiled_task(template: str) -> jinja2.Template:
    """A template of an evaluation task, in lm_eval's dialect; regex_findall is for its filters."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["regex_replace"] = lambda text, pattern, by, count=0: re.sub(
        pattern, by, text, count=count
    )
    environment.filters["regex_findall"] = lambda text, pattern: re.findall(pattern, text)
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As json.dumps; jinja2's own filter escapes < and > for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def main() -> None:
    """Set the limits, which children and threads would inherit, and serve."""
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes our input
    for limit, most in (
        (resource.RLIMIT_AS, settings["bytes"]),
        (resource.RLIMIT_CORE, 0),  # SIGXCPU would write a core dump
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    try:
        serve(settings["seconds"], settings["chars"])
    except MemoryError:
        os._exit(NO_MEMORY)


if __name__ == "__main__":
    main()
