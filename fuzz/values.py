"""Values that readers get wrong, and random changes of bytes and of trees of plain data."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]

NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 65535, 65536),
    *(2**bits + step for bits in (31, 32, 48, 53, 63, 64) for step in (-1, 0, 1)),
    *(-(2**31), -(2**63), 10**18, 10**400),
)
FLOATS = (0.0, -0.0, 0.5, 1e-45, 1e38, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\n",
        "a\0b",
        "\ud800",
        "\ufeff",
        "\u202e",
        "é",
        "😀",
        "1",
        "-1",
        "true",
        "null",
    ),
    *(
        "none",
        "None",
        "???",
        "${x}",
        "${oc.env:HOME}",
        "~",
        "~nobody",
        "..",
        "../../etc/passwd",
        "/",
    ),
    *(
        "/dev/zero",
        "/dev/full",
        "/proc/self/mem",
        "*",
        "[",
        "(",
        "(a|a|aa)+$",
        "{{",
        "{% for",
        "%s",
    ),
    *("a" * 300, "a" * 70_000, "/" * 5_000, "F32", "float64", "1e999", "0x10", "2024-01-01"),
)
LITERALS = (None, True, False, [], {}, [None], [[]], {"": None}, [1, 2, 3], {"a": {"b": 1}})
DEPTHS = (50, 1_000, 100_000)


def flip_bytes(data: bytes, random: Random) -> bytes:
    """One to three changes of bytes: flips, cuts, insertions, copies, integers at any place."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        place = random.randrange(len(changed) + 1)
        end = min(len(changed), place + random.choice((1, 2, 4, 8, 64, 1024)))
        match random.randrange(8):
            case 0 if place < len(changed):
                changed[place] ^= 1 << random.randrange(8)
            case 1 if place < len(changed):
                changed[place] = random.randrange(256)
            case 2:
                del changed[place:]
            case 3:
                del changed[place:end]
            case 4:
                changed[place:place] = random.randbytes(random.choice((1, 4, 8, 100)))
            case 5:
                start = random.randrange(len(changed) + 1)
                changed[place:place] = changed[start : start + end - place]
            case 6:
                changed[place:end] = bytes(end - place)
            case _:
                size = random.choice((1, 2, 4, 8))
                changed[place : place + size] = integer(random, size)
    return bytes(changed)


def integer(random: Random, size: int) -> bytes:
    """One of NUMBERS in `size` bytes, little endian."""
    return (random.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")


def number_near(value: float, random: Random) -> Any:
    """A number that is close to `value`, or of another type."""
    if abs(value) > 1e300:
        return 0
    return random.choice(
        (value + 1, value - 1, -value, value * 2, value / 2, float(value), str(value), [value])
    )


def hostile(old: Any, random: Random) -> Any:
    """Values to put in the place of `old`."""
    kind = random.randrange(6)
    if kind == 0 and isinstance(old, int | float):
        return number_near(old, random)
    if kind <= 1:
        return random.choice(NUMBERS)
    if kind == 2:
        return random.choice(FLOATS)
    if kind == 3:
        text = random.choice(TEXTS)
        return text if not isinstance(old, str) or random.random() < 0.6 else old + text
    return deepcopy(random.choice(LITERALS))


def change_tree(root: Any, random: Random) -> Any:
    """`root`, plain data, with one to three values or keys replaced, removed, moved or doubled."""
    for _ in range(random.choice((1, 1, 2, 3))):
        places = list(_places(root))
        if not places:
            return hostile(root, random)
        parent, key = random.choice(places)
        match random.randrange(8):
            case 0:
                del parent[key]
            case 1:
                other, name = random.choice(places)
                if isinstance(other, list) or name in other:
                    parent[key] = deepcopy(other[name])
            case 2 if isinstance(parent, dict):
                parent[random.choice((*TEXTS, str(key).upper(), f"{key}x"))] = parent.pop(key)
            case 2:
                parent.insert(key, deepcopy(parent[key]))
            case 3 if isinstance(parent, list):
                parent *= random.choice((2, 3, 40))
            case _:
                parent[key] = hostile(parent[key], random)
    return root


def _places(value: Any) -> Any:
    """Every (container, key or index) below `value`; of long lists the first few."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:50])
    for key, child in list(items) if isinstance(value, dict | list) else ():
        yield value, key
        if isinstance(child, dict | list):
            yield from _places(child)
