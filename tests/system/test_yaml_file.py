from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.errors import ConfigError
from lite_runner.system.yaml_file import read_yaml


def bomb(first: str, level: str) -> str:
    lines = [f"x0: &x0 {first}", *(level.format(f"&x{i}", f"*x{i - 1}", i) for i in range(1, 9))]
    return "\n".join([*lines, "seed: *x8"])


@pytest.mark.parametrize(
    "text",
    [
        bomb("[1, 2]", "x{2}: {0} [" + ", ".join(["{1}"] * 10) + "]"),
        bomb(
            "{a: 1}", "x{2}: {0} {{" + ", ".join(f"{letter}: {{1}}" for letter in "abcdefgh") + "}}"
        ),
        "a: &a " + 1000 * "x" + "\nseed: [" + 1000 * "*a, " + "]",
        "a: &a [*a]",
        "a: &a\n  b: {c: *a}",
    ],
    ids=["lists", "mappings", "texts", "a list in itself", "a mapping in itself"],
)
def test_aliases_are_bounded(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"aliases .* repeat too much of it, or a value holds"):
        read_yaml(file)


def test_aliases_of_a_usual_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: &a {b: 1, c: [x, y]}\nd: *a\ne:\n  <<: *a\n  b: 2\nf: [*a, *a]")
    a = {"b": 1, "c": ["x", "y"]}
    assert read_yaml(file) == {"a": a, "d": a, "e": {**a, "b": 2}, "f": [a, a]}
