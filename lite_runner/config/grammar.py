"""Values as Hydra's override grammar reads them; a text is never put through it.

A text (a prompt, a path) is taken as typed. Numbers, booleans, null, lists and sweeps are
Hydra's: `max_new_tokens=24`, `eos_token_id=[1,2]`, `seed=1,2` with -m.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, get_args, get_origin

from lite_runner.config.fields import accepts

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override


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
        texts = _list_of_texts(text, null=_takes_null(annotation)) if listed else None
        return text if texts is None else texts
    override = _parse(text)
    if override.is_sweep_override():
        raise ValueError("several values; add -m to run them one after another")
    return override.value()


def _takes_null(annotation: Any) -> bool:
    """Whether null may stand in the list that an annotation takes."""
    lists = (member for member in get_args(annotation) if get_origin(member) is tuple)
    return any(accepts(get_args(one)[0], types.NoneType) for one in lists)


def _list_of_texts(text: str, *, null: bool) -> list[str | None] | None:
    try:
        value = _parse(text).value()
    except ValueError:
        return None
    kinds = (str, types.NoneType) if null else str
    if isinstance(value, list) and all(isinstance(entry, kinds) for entry in value):
        return value
    return None


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
