"""Many cases in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SHOWN = 60  # characters of a value in the name of a failed case


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[..., Callable[..., None]]:
    """As pytest.mark.parametrize, but the cases are subtests of one test, which names each that
    fails. They share what fixtures give, so these must not be changed by one of them."""
    given = (names,) if isinstance(names, str) else names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(test).parameters
        kept = {name: one for name, one in own.items() if name not in given}
        has_subtests = "subtests" in kept

        @functools.wraps(test)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            if has_subtests:
                fixtures["subtests"] = subtests
            number = -1
            for number, case in enumerate(cases):
                values = dict(zip(given, (case,) if len(given) == 1 else case, strict=True))
                shown = {name: repr(value)[:SHOWN] for name, value in values.items()}
                with subtests.test(str(number), **shown):
                    test(**values, **fixtures)
            assert number >= 0, "no cases"

        subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = list(({"subtests": subtests} | kept).values())
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate
