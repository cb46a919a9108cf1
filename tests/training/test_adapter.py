"""The modules that an adapter is trained for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.training.adapter import in_memory, lora_of, new_lora, opened_lora
from lite_runner.training.options import LoraOptions
from lite_runner.weights.lora.adapter_writer import write_adapters
from tests.each import each
from tests.models import reference_model


def lora(targets: str | tuple[str, ...] | None = None, **changes: float) -> LoraOptions:
    given = {"r": 4, "alpha": 8.0, "dropout": 0.0, "rslora": False, **changes}
    return LoraOptions(targets=targets, **given)  # type: ignore[arg-type]


@each(
    ("case", "targets", "modules", "weights"),
    [
        ("llama", None, 4, 4),
        ("llama", ("q_proj", "down_proj"), 4, 4),
        ("llama", ("wq", "w2"), 4, 4),  # MindFormers'
        ("llama", r".*\.1\..*(wq|wv)", 2, 2),
        ("llama", "all-linear", 14, 14),
        ("mixtral", "all-linear", 8, 8),
        ("bloom", None, 2, 6),
        ("gpt2", ("c_attn",), 2, 6),
        ("gpt2", ("attention.dense1", "attention.dense2", "attention.dense3"), 2, 6),
        ("phi3", None, 2, 6),
        ("deepseek_v2", ("o_proj",), 2, 2),
    ],
)
def test_target_modules(
    case: str, targets: str | tuple[str, ...] | None, modules: int, weights: int
) -> None:
    found = new_lora(reference_model(case), lora(targets), 0)
    assert len({one.a for one in found.deltas.values()}) == modules
    assert len(found.deltas) == weights


@pytest.mark.parametrize(
    ("case", "targets", "message"),
    [
        ("llama", ("lm_head",), "the embedding and the head are not trained as LoRA"),
        ("llama", ("embed_tokens",), "the embedding and the head are not trained as LoRA"),
        ("gpt2", ("attention.dense1",), "is 3 modules of MindFormers, of which 1 are named"),
        ("mixtral", r".*experts\.1\..*", "experts are not trained as LoRA"),
        ("deepseek_v2", None, "deepseek_v2 has no modules of query and value"),
    ],
)
def test_modules_that_are_not_trained(
    case: str, targets: str | tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        new_lora(reference_model(case), lora(targets), 0)


def test_an_unknown_module() -> None:
    with pytest.raises(ArtifactError, match=r"finetune.lora.targets.*q_porj"):
        new_lora(reference_model("llama"), lora(("q_porj",)), 0)


def test_first_values_and_scales(tmp_path: Path) -> None:
    """A is uniform within 1 / sqrt(in), B zero; a written adapter is read back."""
    model = reference_model("llama")
    found = new_lora(model, lora(rslora=True), 3)
    for name, array in found.arrays.items():
        bound = model.hidden_size**-0.5
        assert np.abs(array).max() <= bound if name.endswith("A") else not array.any()
    assert {one.scale for one in found.deltas.values()} == {4.0}
    for name, array in found.arrays.items():
        if name.endswith("B"):
            array += 1
    adapters = {"x": found.adapter()}
    write_adapters(adapters, model, tmp_path / "x", "peft", listed=False)
    again = opened_lora(model, tmp_path / "x")
    assert {one.scale for one in again.deltas.values()} == {4.0}
    assert all(np.array_equal(again.arrays[name], one) for name, one in found.arrays.items())


def test_an_adapter_that_cannot_be_trained_further(tmp_path: Path) -> None:
    """One A is trained for all parts of a fused module, and one adapter at a time."""
    model = reference_model("bloom")
    adapter = new_lora(model, lora(), 0).adapter()
    pairs = dict(adapter.pairs)
    name = next(iter(pairs))
    pairs[name] = replace(pairs[name], a=in_memory(-pairs[name].a.float32()))
    adapters = {"x": adapter, "y": replace(adapter, pairs=pairs)}
    write_adapters(adapters, model, tmp_path, "mindformers", listed=True)
    assert opened_lora(model, tmp_path / "x").arrays
    with pytest.raises(ConfigError, match=r"y: .*query_key_value: its parts have different A's"):
        opened_lora(model, tmp_path / "y")
    part = replace(adapter, folder=Path("z"), pairs={name: pairs[name]})
    with pytest.raises(ConfigError, match=r"^z: .*query_key_value .* of which 1 are named"):
        lora_of(part, model)
    with pytest.raises(ConfigError) as raised:
        opened_lora(model, tmp_path)
    assert f"finetune.init_adapter: {tmp_path} lists 2 adapters" in str(raised.value)
    assert raised.value.hint == f"finetune.init_adapter={tmp_path / 'x'}"
    with pytest.raises(ArtifactError, match=r"finetune.init_adapter: .* expected lora_adapter"):
        opened_lora(model, tmp_path / "x" / "adapter_model.ckpt")
