"""What an export is said to take, against what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.export.memory import export_memory, packed_weights
from lite_runner.export.spec import spec_of
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve


@pytest.mark.parametrize(
    "quant",
    [[], ["quant=a8"], ["quant=none"], ["quant=a16w8"]],
    ids=["file", "a8", "none", "a16w8"],
)
def test_packed_layers_are_as_large_as_counted(small_gguf: Path, quant: list[str]) -> None:
    """Blocks stay blocks: they are not counted as the floats that they stand for."""
    line = ["run_mode=export", f"model={small_gguf}", "export.layout=packed", *quant]
    config, _ = resolve(parse(line, heads()))
    files = locate(config)
    counted = packed_weights(files)
    assert export_memory(files, spec_of(config, files, 1, 64)).weights == counted
    assert main(line) == 0
    (folder,) = Path("outputs").glob("*packed*")
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert written > 1e6 and counted == pytest.approx(written, rel=0.03)
