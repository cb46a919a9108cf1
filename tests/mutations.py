"""JSON values with something wrong in them, for readers that must not be surprised."""

from __future__ import annotations

import random
from typing import Any

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 10**9, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "zzz", "..", "../../etc/passwd", "/etc/passwd", "a\0b", "\ud800", "x" * 300, "é", "???"),
    *([], [[]], [1], [None], {}, {"": 1}, {"a": {"b": []}}, ["a", 1], "0" * 64),
)


def mutated(value: Any, generator: random.Random) -> Any:
    """`value`, a JSON object that may be changed, with one to three faults somewhere in it."""
    for _ in range(generator.randint(1, 3)):
        places = list(_places(value))
        container, key = generator.choice(places)
        kind = generator.randrange(5)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[generator.choice(["zzz", "", "..", "type"])] = container.pop(key)
        elif kind == 2 and isinstance(container[key], (int, float)):
            container[key] *= generator.choice([-1, 2, 10**6, 0.5])
        else:
            container[key] = generator.choice(STRANGE)
        if not value:
            return value
    return value


def _places(value: Any) -> Any:
    """(container, key) of every value inside `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in pairs:
        yield value, key
        if isinstance(inside, (dict, list)):
            yield from _places(inside)
