"""The ctypes structs match those of the C++: offsets of fields, constants of both sides."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from ctypes import Structure, c_double, sizeof
from pathlib import Path

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from lite_runner import native
from lite_runner.native import structs
from tests.each import each

SOURCES = Path(native.__file__).parent / "src"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")))
STRUCTS = [one for one in Structure.__subclasses__() if one.__module__ == structs.__name__]
# Names that differ by more than their style; `in` is a keyword of Python's.
GGUF_TYPE = re.compile(r"I?Q\d_\w+")  # named as there, in both
OTHER_NAMES = {"inputs": "in", "BFLOAT16": "kBFloat16"}


def expressions() -> dict[str, int]:
    """C++ expressions, and the values that they have in Python."""
    found = {
        "kPanel": structs.PANEL,
        "kInputGroup": structs.INPUT_GROUP,
        "kMostDim": structs.MOST_HEAD_DIM,
    }
    for struct in STRUCTS:
        name = struct.__name__
        found[f"sizeof({name})"] = sizeof(struct)
        for field, kind in struct._fields_:
            there = OTHER_NAMES.get(field, field)
            found[f"offsetof({name}, {there})"] = getattr(struct, field).offset
            found[f"sizeof({name}::{there})"] = sizeof(kind)
            found[f"std::is_floating_point_v<decltype({name}::{there})>"] = kind is c_double
    for enum in (structs.Format, structs.Order, structs.Kind):
        for member in enum:
            styled = member.name.title().replace("_", "")
            if GGUF_TYPE.fullmatch(member.name):
                styled = member.name
            there = OTHER_NAMES.get(member.name, f"k{styled}")
            found[f"{enum.__name__}::{there}"] = member.value
    return found


def test_structs_are_those_of_the_operators(tmp_path: Path) -> None:
    expected = expressions()
    assert {"sizeof(AttentionLayer)", "offsetof(HeadLayer, adapters)"} <= set(expected)
    source = tmp_path / "told.cc"
    lines = (f'  std::printf("%lld\\n", (long long)({one}));\n' for one in expected)
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include <type_traits>\n"
        '#include "instruction_set.h"\n#include "layers.h"\nusing namespace lite_runner;\n'
        f"int main() {{\n{''.join(lines)}}}\n"
    )
    program = tmp_path / "told"
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", f"-I{SOURCES}", source, "-o", program]
    subprocess.run(command, check=True)
    told = subprocess.run([program], check=True, capture_output=True, encoding="utf-8").stdout
    assert dict(zip(expected, map(int, told.split()), strict=True)) == expected


@each("struct", STRUCTS)
def test_a_field_that_is_not_there_cannot_be_set(struct: type[Structure]) -> None:
    with pytest.raises(AttributeError):
        struct().no_field = 1
    with pytest.raises(AttributeError):
        struct(no_field=1)


def test_units_of_ggufs_blocks_are_panels_of_its_own_sizes() -> None:
    """A panel's rows one beside the other, and no more than four bytes a row to align them."""
    for form, (inputs, size) in structs.UNITS.items():
        block, stored = GGML_QUANT_SIZES[GGMLQuantizationType[form.name]]
        each, rest = divmod(size, structs.PANEL)
        assert (inputs, rest) == (block, 0) and stored <= each <= stored + 4, form
