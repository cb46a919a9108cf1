"""Chat templates: untrusted Jinja programs, rendered in a sandbox.

A template cannot reach Python's internals or modify its inputs. Its output and the strings it
builds are bounded; jinja2's own sandbox bounds range(). The dialect is that of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from lite_runner.errors import ArtifactError

MAX_RENDERED_CHARS = 16 * 2**20
_MAX_TEMPLATE_CHARS = 2**20
_MAX_EXPONENT = 1024


def render_template(template: str, values: Mapping[str, Any], *, source: str) -> str:
    """Render `template` with `values`. Raises ArtifactError naming `source` if it fails."""
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ArtifactError(
            f"{source}: chat template of {len(template)} characters, "
            f"at most {_MAX_TEMPLATE_CHARS} are expected"
        )
    pieces: list[str] = []
    length = 0
    try:
        for piece in _compile(template).generate(**values):
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise jinja2.TemplateError(f"its output exceeds {MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
    # A template may divide by zero, recurse or add a number to a string: any Python error.
    except Exception as error:
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if line else ""
        raise ArtifactError(
            f"{source}: the chat template failed{where}: {error or type(error).__name__}",
            hint="check the roles and their order, or leave out chat=true",
        ) from error
    return "".join(pieces)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's turn for training; here only its content is kept."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also bounds the result of a multiplication or power."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*" and _repeated_length(left, right) > MAX_RENDERED_CHARS:
            raise jinja2.exceptions.SecurityError(f"a text longer than {MAX_RENDERED_CHARS}")
        if operator == "**" and abs(right) > _MAX_EXPONENT:
            raise jinja2.exceptions.SecurityError(f"an exponent beyond {_MAX_EXPONENT}")
        return super().call_binop(context, operator, left, right)


def _repeated_length(left: Any, right: Any) -> int:
    """Length of `left * right` if one operand is a sequence; 0 for a product of numbers."""
    if isinstance(left, int) and hasattr(right, "__len__"):
        return left * len(right)
    if isinstance(right, int) and hasattr(left, "__len__"):
        return right * len(left)
    return 0


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As json.dumps; jinja2's own filter escapes < and > for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
    }
    environment.globals.update(helpers)
    return environment.from_string(template)
