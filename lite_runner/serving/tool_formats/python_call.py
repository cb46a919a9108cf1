"""The arguments of a call in Python's spelling, read without running anything.

They are rewritten, token by token, as JSON, and its reader says whether they are any: how deep they
may be nested, how long numbers are, and that no name occurs twice, is told there.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from lite_runner.serving.tool_formats.calls import json_of

NAMES = re.compile(r"[^\W\d]\w*")  # of parameters
# A text's quotes are what it begins with. No part of it begins as another does.
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>(?P<quotes>'{3}|"{3}|'|")(?:\\.|(?!(?P=quotes))[^\\])*(?P=quotes))
        |(?P<constant>(?:True|true|False|false|None|null)\b)
        |(?P<name>[^\W\d]\w*)\s*=
        |(?P<number>-?\d[\d.eE+-]*)
        |(?P<mark>[][{}:,)])
    )""",
    re.DOTALL | re.VERBOSE,
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtv0-7xuUN\n]|(?P<other>.))", re.DOTALL)


def read_arguments(code: str, at: int) -> tuple[dict[str, Any], int] | None:
    """Of a call whose parenthesis ends at `at`, and where what follows the other one begins; None:
    they are none. JSON's spelling of texts and constants may stand in them, too."""
    made, depth = ["{"], 0
    while token := _TOKEN.match(code, at):
        at, kind = token.end(), token.lastgroup
        found = token[kind or 0]
        closes = found in ("]", "}", ")")
        if closes and made[-1] == "," and made[-2] not in ("[", "{", ","):
            made.pop()  # Python lets one stand behind the last of several
        if found == ")":
            arguments = json_of("".join([*made, "}"]))
            return None if arguments is None or depth else (arguments, at)
        # Names of arguments stand outside of brackets, and colons inside.
        if (kind == "name" and depth) or (found == ":" and not depth):
            return None
        depth += (found in ("[", "{")) - closes
        written = _json(kind, found)
        if written is None:
            return None
        made.append(written)
    return None


def write_arguments(arguments: dict[str, Any]) -> str:
    """As Python spells them."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _json(kind: str | None, token: str) -> str | None:
    """A token as JSON; None: it is a text that Python does not read either."""
    if kind == "name":
        return f"{json.dumps(token)}:"
    if kind == "constant":
        return _CONSTANTS.get(token, token)
    if kind != "text" or json_of(token) is not None:
        return token
    try:
        # An escape that Python does not know is a backslash; it would warn of it.
        known = _ESCAPE.sub(lambda found: "\\" * bool(found["other"]) + found[0], token)
        return json.dumps(ast.literal_eval(known))
    except (SyntaxError, ValueError):
        return None
