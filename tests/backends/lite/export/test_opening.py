"""What a run asks of the exported model that it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.backends.lite.export.opening import check_fits, check_generation
from lite_runner.config.argv import parse
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import Layout, Manifest
from lite_runner.model.exported_model import ExportedModel
from lite_runner.run_modes import heads, resolve
from tests.each import each


@each(
    ("rows", "slots", "width", "hint"),
    [
        (1, 2, 1, "predict_batch_size=1"),
        (4, 8, 1, "predict_batch_size=4"),
        (4, 8, 2, "predict_batch_size=2"),
        (4, 6, 3, "predict_batch_size=1"),
        (1, 2, 2, "export the model again with predict_batch_size=2"),
        (2, 9, 3, "export the model again with predict_batch_size=3"),
    ],
)
def test_more_rows_than_were_exported_for(
    manifest_of: Callable[..., Manifest], rows: int, slots: int, width: int, hint: str
) -> None:
    """What is said to type fits then; each prompt takes rows of its own for its beams."""
    config, _ = resolve(parse(["backend=mslite", "predict_data=hi", "model=tiny_llama"], heads()))
    given = ExportedModel(Path("x"), manifest_of("llama", "full", {}, rows, 8), ())
    with pytest.raises(ConfigError, match=f"a batch size of {rows}, got {slots} rows") as caught:
        check_fits(config.settings, given, slots, 8, width)
    assert caught.value.hint == hint
    size = int(hint.rpartition("=")[2])
    if hint.startswith("export"):
        given = ExportedModel(Path("x"), manifest_of("llama", "full", {}, size, 8), ())
        size = 1
    check_fits(config.settings, given, size * width, 8, width)


@each(
    ("settings", "layout", "notes"),
    [
        (["export.layout=resizable"], "static_pair", ["export.layout=resizable has no effect"]),
        (["export.weight_fp16=true"], "resizable", ["export.weight_fp16=true has no effect"]),
        (["export.layout=static_pair"], "static_pair", []),
        ([], "full", []),
    ],
)
def test_what_was_decided_by_the_export_is_noted(
    manifest_of: Callable[..., Manifest], settings: list[str], layout: Layout, notes: list[str]
) -> None:
    words = ["backend=mslite", "predict_data=hi", "model=tiny_llama", *settings]
    config, _ = resolve(parse(words, heads()))
    given = ExportedModel(Path("x"), manifest_of("llama", layout, {}, 1, 8), ())
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lite_runner.progress.note", seen.append)
        check_fits(config.settings, given, 1, 8)
    assert seen == [f"{note} on x: exported as {layout} in float32" for note in notes]


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "top_k": 3}])
def test_only_a_pair_cannot_copy_its_cache(options: dict[str, int]) -> None:
    generation = GenerationConfig(**options, do_sample="top_k" in options)
    layouts: tuple[Layout, ...] = ("full", "no_cache", "resizable")
    for layout in layouts:
        check_generation(layout, generation, sampled=False, given=True)
    for given, hint in (
        (True, "export the model again with export.layout=resizable"),
        (False, "export.layout=resizable, or backend=native"),
    ):
        with pytest.raises(ConfigError, match="graphs of the static_pair layout") as caught:
            check_generation("static_pair", generation, sampled=False, given=given)
        assert caught.value.hint == hint
