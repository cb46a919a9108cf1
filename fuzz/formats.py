"""Mutations that know a format: what they change is past the first check of a reader."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterator
from random import Random
from typing import Any

import yaml

from fuzz.values import DEPTHS, NUMBERS, TEXTS, change_tree, flip_bytes, integer
from lite_runner.system.protobuf import varint


def json_text(data: bytes, random: Random) -> bytes:
    """A JSON file."""
    kind = random.randrange(10)
    if kind == 0:
        return _spliced(data, random)
    if kind == 1:
        deep = random.choice(DEPTHS)
        nested = random.choice((("[", "]"), ('{"a":', "}")))
        return (nested[0] * deep + "1" + nested[1] * deep).encode()
    return dumped(change_tree(json.loads(data), random), random)


def dumped(value: Any, random: Random) -> bytes:
    """JSON as Python writes it: NaN, lone surrogates and long numbers included."""
    return json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")


def json_lines(data: bytes, random: Random) -> bytes:
    """A file of a JSON value a line."""
    lines = data.splitlines()
    place = random.randrange(len(lines))
    lines[place] = json_text(lines[place], random)
    return b"\n".join(lines)


def yaml_text(data: bytes, random: Random) -> bytes:
    """A YAML file."""
    if random.random() < 0.3:
        return _spliced(data, random)
    tree = change_tree(yaml.safe_load(data), random)
    return yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")


def _spliced(data: bytes, random: Random) -> bytes:
    """Some text put anywhere into a text, or in the place of a word of it."""
    marks = (*TEXTS, *map(str, NUMBERS), "&a [*a, *a]", "!!python/name:os.system x", "<<: x", "\t")
    text = random.choice(marks).encode("utf-8", "surrogatepass")
    words = data.split(b" ")
    place = random.randrange(len(words))
    words[place] = text if random.random() < 0.5 else words[place] + text
    return b" ".join(words)


plain_text = _spliced


def safetensors(data: bytes, random: Random) -> bytes:
    """The JSON header, with a length that fits, mostly; or the length itself."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.1:
        return integer(random, 8) + data[8:]
    header = json.loads(data[8 : 8 + length])
    if random.random() < 0.5:  # a tensor's offsets or shape, which agree with one another
        entry = random.choice([value for name, value in header.items() if name != "__metadata__"])
        key = random.choice(("shape", "data_offsets"))
        change = random.choice(NUMBERS[:20])
        entry[key] = [number + change for number in entry[key]]
    else:
        header = change_tree(header, random)
    text = dumped(header, random)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def gguf(data: bytes, random: Random) -> bytes:
    """Numbers of the header: counts, kinds, lengths, shapes, types, offsets, values."""
    changed = bytearray(data)
    places = list(_gguf_places(data))
    for _ in range(random.choice((1, 1, 2))):
        start, layout = random.choice(places)
        size = struct.calcsize(layout)
        if layout in "fd":
            changed[start : start + size] = random.randbytes(size)
        elif random.random() < 0.4:
            (value,) = struct.unpack_from(f"<{layout}", data, start)
            near = (int(value) + random.choice((-32, -1, 1, 32))) % (1 << 8 * size)
            changed[start : start + size] = near.to_bytes(size, "little")
        else:
            changed[start : start + size] = integer(random, size)
    return bytes(changed)


def _gguf_places(data: bytes) -> Iterator[tuple[int, str]]:
    """(offset, layout) of each number of the header; strings have their length and first byte."""
    numbers = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
    position = 4

    def read(layout: str) -> tuple[int, Any]:
        nonlocal position
        start = position
        position += struct.calcsize(layout)
        return start, struct.unpack_from(f"<{layout}", data, start)[0]

    def string() -> Iterator[tuple[int, str]]:
        nonlocal position
        start, length = read("Q")
        yield start, "Q"
        yield position, "B"
        position += length

    def value(kind: int) -> Iterator[tuple[int, str]]:
        if kind == 8:
            yield from string()
        elif kind == 9:
            start, inner = read("I")
            yield start, "I"
            start, count = read("Q")
            yield start, "Q"
            for _ in range(count):
                yield from value(inner)
        else:
            yield read(numbers[kind])[0], numbers[kind]

    yield read("I")[0], "I"
    (start, tensors), (keys_at, keys) = read("Q"), read("Q")
    yield start, "Q"
    yield keys_at, "Q"
    for _ in range(keys):
        yield from string()
        start, kind = read("I")
        yield start, "I"
        # A vocabulary would be nearly all of the places.
        yield from list(value(kind))[:20]
    for _ in range(tensors):
        yield from string()
        start, dimensions = read("I")
        yield start, "I"
        for layout in ("Q" * dimensions) + "IQ":
            yield read(layout)[0], layout


Fields = list[tuple[int, int, Any]]  # number, wire type, and its value: int, bytes or Fields


def protobuf(data: bytes, random: Random) -> bytes:
    """Any message: fields at any depth renumbered, dropped, doubled, or of other values."""
    try:
        message = _fields(data)
    except (IndexError, ValueError):
        return flip_bytes(data, random)
    for _ in range(random.choice((1, 1, 2, 3))):
        inside = message
        while random.random() < 0.85:
            nested = [value for _, _, value in inside if isinstance(value, list) and value]
            if not nested:
                break
            inside = random.choice(nested)
        if inside:
            _change_field(inside, random)
    return _encoded(message)


def _change_field(inside: Fields, random: Random) -> None:
    place = random.randrange(len(inside))
    number, wire, value = inside[place]
    match random.randrange(6):
        case 0:
            del inside[place]
        case 1:
            inside[place:place] = [inside[place]] * random.choice((1, 2, 100))
        case 2:
            inside[place] = (random.choice((number + 1, max(1, number - 1), 99)), wire, value)
        case 3 if isinstance(value, bytes) and value:
            inside[place] = (number, wire, flip_bytes(value, random))
        case 4:
            text = random.choice((*TEXTS, "\udcff")).encode("utf-8", "surrogatepass")
            inside[place] = (number, 2, random.choice((b"\xff\xfe", b"\0", text)))
        case _:
            inside[place] = (number, 0, random.choice(NUMBERS) % 2**64)


def _fields(data: bytes) -> Fields:
    """The fields of a message, nested as deep as bytes can be read as messages."""
    found: Fields = []
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            found.append((number, wire, value))
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError
        if not number or position + size > len(data):
            raise ValueError
        held = data[position : position + size]
        position += size
        inner: Any = held
        if wire == 2 and 1 < size < 1 << 16 and not held.isalnum():
            try:
                inner = _fields(held)
            except (IndexError, ValueError):
                inner = held
        found.append((number, wire, inner))
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError


def _encoded(message: Fields) -> bytes:
    made = bytearray()
    for number, wire, value in message:
        made += varint(number << 3 | wire)
        if wire == 0:
            made += varint(value)
            continue
        held = _encoded(value) if isinstance(value, list) else value
        if wire == 2:
            made += varint(len(held))
        made += held
    return bytes(made)


def torch_zip(data: bytes, random: Random) -> bytes:
    """An entry of PyTorch's archive, whose checksums are right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        chosen = next(name for name in names if name.endswith("data.pkl") or random.random() < 0.1)
        for name in names:
            content = old.read(name)
            # a ZipInfo of its own has a fixed time; a name alone would be stamped with the clock
            entry = zipfile.ZipInfo(name)
            new.writestr(entry, flip_bytes(content, random) if name == chosen else content)
    return made.getvalue()
