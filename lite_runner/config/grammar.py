"""Values as Hydra's override grammar reads them; a text is never put through it.

A text (a prompt, a path) is taken as typed. Numbers, booleans, null, lists and sweeps are
Hydra's: `max_new_tokens=24`, `eos_token_id=[1,2]`, `seed=1,2` with -m.
"""

from __future__ import annotations

import functools
import re
import types
from typing import TYPE_CHECKING, Any, get_args, get_origin

from lite_runner.config.fields import accepts
from lite_runner.config.prompt import Request, is_prompt
from lite_runner.system.json_file import parse_json

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override


# What Hydra's grammar and JSON read alike.
_PLAIN = re.compile(r"-?(?:0|[1-9]\d{0,17})(?:\.\d{1,17})?|true|false|null")


@functools.cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _parse(text: str) -> Override:
    """Raises ValueError with one line that says what cannot be read."""
    try:
        return _parser().parse_override(f"key={text}")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # ANTLR's and Python's own, besides HydraException
        raise ValueError(str(error).strip().splitlines()[0][:100]) from None


def value_of(text: str, annotation: Any) -> Any:
    """The value that `text` means for a key of this annotation.

    Raises ValueError where the grammar cannot read it, or where it is a sweep.
    """
    if accepts(annotation, str):
        if text == "null" and accepts(annotation, types.NoneType):
            return None
        listed = accepts(annotation, tuple) and text.startswith("[") and text.endswith("]")
        found = _list(text, annotation) if listed else None
        return text if found is None else found
    if _PLAIN.fullmatch(text):  # most values; Hydra's parser takes a tenth of a second to import
        return parse_json(text)
    override = _parse(text)
    if override.is_sweep_override():
        raise ValueError("several values; add -m to run them one after another")
    return override.value()


def _list(text: str, annotation: Any) -> list[Any] | None:
    """The list that a text means for such a key; None where it is a text that looks like one.

    It is a list where each item is a text, null if the key takes that, or, where it takes prompts,
    one of those with more than a text: `{role: user, content: hi}`, in JSON as well.
    """
    value = _value(text)
    items = [get_args(member)[0] for member in get_args(annotation) if get_origin(member) is tuple]
    kinds = (str, types.NoneType) if any(accepts(i, types.NoneType) for i in items) else str
    prompts = any(accepts(item, Request) for item in items)

    def fits(entry: Any) -> bool:
        return isinstance(entry, kinds) or (prompts and is_prompt(entry))

    return value if isinstance(value, list) and all(map(fits, value)) else None


def _value(text: str) -> Any:
    try:
        return _parse(text).value()
    except ValueError:
        pass
    try:  # where the grammar takes no quotes, around keys, JSON has them
        value = parse_json(text)
    except ValueError:
        return None
    return value if "{" in text else None


def swept_values(text: str, options: list[str]) -> list[str]:
    """The values of a sweep as texts, `[text]` where it is none; a glob picks of `options`.

    Raises ValueError for what cannot be listed, such as `interval(0, 1)`.
    """
    from hydra.core.override_parser.types import Glob, IntervalSweep

    try:
        override = _parse(text)
    except ValueError:
        return [text]  # reported with the rest of the faults
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(options)
    if not override.is_sweep_override():
        return [text]
    if isinstance(value, IntervalSweep):
        raise ValueError("an interval has no list of values; use range(start,stop)")
    return list(override.sweep_string_iterator())
