"""The network with gradients against the reference, and adapters trained as PEFT and PyTorch do."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures import native_parts, reference
from lite_runner.config import read
from lite_runner.training.adapter import TrainedLora, opened_lora
from lite_runner.training.costs import operations_of
from lite_runner.training.data import ExampleSet
from lite_runner.training.network import Example, TrainedNetwork, frozen
from lite_runner.training.options import FinetuneOptions
from lite_runner.training.tape import Bfloat16Matrix, PanelMatrix
from lite_runner.training.trainer import Trainer
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.formats.fused import fuse
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.lora.adapter import by_module
from tests.each import each
from tests.models import reference_model
from tests.paths import FIXTURES, REFERENCE
from tests.training.options import OPTIONS

# Of scripts/make_finetune_reference.py.
EXPECTED: dict[str, dict[str, Any]] = json.loads((FIXTURES / "finetune.json").read_text("utf-8"))
RANK, ALPHA = 4, 8


def weights_of(case: str) -> dict[str, NDArray[np.float32]]:
    model = reference_model(case)
    return {name: one.float32() for name, one in open_checkpoint(REFERENCE / case, model).items()}


def examples(vocabulary: int) -> list[Example]:
    """As the script draws them."""
    generator = np.random.default_rng(40)
    found = []
    for _ in range(12):
        length = int(generator.integers(6, 30))
        ids = generator.integers(3, vocabulary, length)
        found.append(Example(ids, int(generator.integers(1, length // 2))))
    return found


def adapter_folder(folder: Path, case: str, targets: list[str]) -> Path:
    """A PEFT folder with the values that the script draws."""
    modules = by_module(reference_model(case), hugging_face=True)
    tensors = {}
    for module, places in modules.items():
        if module.rpartition(".")[2] not in targets:
            continue
        widths = places[0].width_in, sum(place.width_out for place in places)
        for part, shape in (("A", (RANK, widths[0])), ("B", (widths[1], RANK))):
            name = f"base_model.model.{module}.lora_{part}.weight"
            generator = np.random.default_rng(zlib.crc32(name.encode()))
            values = generator.normal(0, 0.1, shape).astype(np.float32)
            tensors[name] = LazyTensor(shape, "F32", lambda values=values: values)
    write_safetensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", sorted(EXPECTED))
def test_losses_and_logits_equal_those_of_peft(case: str, tmp_path: Path) -> None:
    expected, model = EXPECTED[case], reference_model(case)
    folder = adapter_folder(tmp_path, case, expected["targets"])
    lora = opened_lora(model, folder)
    network = TrainedNetwork(model, weights_of(case), lora.arrays, lora.deltas)
    given = {
        **OPTIONS,
        **{"steps": 50, "batch_size": 2, "accumulate": 2, "learning_rate": 0.01, "clip": 1.0},
        **{"schedule": "cosine", "warmup_steps": 5, "weight_decay": 0.1, "shuffle": False},
    }
    texts = examples(model.vocab_size)
    trainer = Trainer(network, [[text] for text in texts], options(given), seed=0, threads=2)
    steps = list(trainer.run())
    losses = [step.loss for step in steps]
    assert losses == pytest.approx(expected["losses"], rel=1e-3)
    assert [step.grad_norm for step in steps] == pytest.approx(expected["norms"], rel=1e-2)
    logits = network.logits(texts[0].ids)[-1]
    scale = np.abs(expected["logits"]).max()
    assert np.abs(logits - expected["logits"]).max() < 1e-4 * max(1.0, scale)


def options(given: dict[str, Any]) -> FinetuneOptions:
    found = read(given, FinetuneOptions, "finetune", [])
    assert isinstance(found, FinetuneOptions)
    return found


def test_logits_equal_those_of_the_reference() -> None:
    """Of every architecture and variant but those that are refused."""
    for folder in sorted(REFERENCE.glob("*/config.json")):
        case = folder.parent.name
        model = reference_model(case)
        scaled = model.sparse is not None and model.sparse.experts.scaled_inputs
        if model.prefix is not None or native_parts(model) or scaled:
            continue
        weights = weights_of(case)
        ids = np.random.default_rng(1).integers(3, model.vocab_size, 20)
        expected = reference.forward(model, weights, ids.astype(np.int32))
        found = TrainedNetwork(model, dict(weights), {}, {}).logits(ids)
        largest = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest, err_msg=case)


# Between them they have all that a block may have.
ARCHITECTURES = (
    *("bloom", "chatglm_biases", "cohere_normed", "deepseek_v2", "deepseek_v3", "falcon"),
    *("gemma3_biases", "glm4_moe_whole", "gpt2", "gpt_neox_linear", "gpt_oss", "hunyuan_moe"),
    *("llama_rope_dynamic", "mixtral", "mpt", "nemotron", "olmoe_clipped", "opt", "phi_normed"),
    *("qwen2_moe", "stablelm_parallel"),
)


@each("case", ARCHITECTURES)
def test_all_gradients_follow_the_reference(case: str) -> None:
    """By finite differences of the reference's loss, for every tensor at once."""
    model, weights = reference_model(case), weights_of(case)
    trained = {name: array.copy() for name, array in weights.items()}
    network = TrainedNetwork(model, weights, trained, {})
    generator = np.random.default_rng(1)
    ids = generator.integers(0, model.vocab_size, 14)
    texts = [Example(ids[:9], 1), Example(ids, 6)]
    count = sum(text.targets for text in texts)
    loss, gradients = network.gradients(texts, 1 / count)

    def expected(shift: float) -> float:
        moved = {n: one + shift * along[n] for n, one in weights.items()}
        total = 0.0
        for text in texts:
            logits = reference.forward(model, moved, text.ids.astype(np.int32))
            logits = logits - logits.max(-1, keepdims=True)
            logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            rows = text.rows()
            total -= float(logits[rows, text.ids[rows + 1]].sum())
        return total / count

    along = {name: generator.normal(size=one.shape) for name, one in weights.items()}
    assert loss / count == pytest.approx(expected(0.0), rel=1e-5)
    # An expert that no token chooses has none.
    computed = sum(float((one * along[name]).sum()) for name, one in gradients.items())
    shift = 1e-6  # so small that the same experts are chosen
    difference = (expected(shift) - expected(-shift)) / (2 * shift)
    assert computed == pytest.approx(difference, rel=2e-3)


def test_tokens_between_answers_are_no_targets() -> None:
    text = Example(np.arange(8), 2, np.array([True, True, False, False, True, True]))
    assert (text.rows().tolist(), text.targets) == ([1, 2, 5, 6], 4)


def test_the_head_is_computed_of_targets_alone() -> None:
    """Forwards and back, and once more where it is trained."""
    model, ids = reference_model("llama"), np.arange(8)
    for full, products in ((False, 2), (True, 3)):
        asked = options({**OPTIONS, "full": full})
        few, more = (
            operations_of(asked, model, ExampleSet([Example(ids, first)], 1, 0, 0))
            for first in (6, 3)
        )
        assert more - few == 2 * products * 3 * model.vocab_size * model.hidden_size


def test_a_fused_module_keeps_one_a(tmp_path: Path) -> None:
    """B of q, k and v of each head, as PEFT has them, is fused again to the same."""
    model = reference_model("bloom")
    lora = opened_lora(model, adapter_folder(tmp_path, "bloom", ["query_key_value"]))
    assert isinstance(lora, TrainedLora)
    module, places = next(
        (m, p) for m, p in by_module(model, hugging_face=True).items() if len(p) == 3
    )
    adapter = lora.adapter()
    pairs = [adapter.pairs[place.weight] for place in places]
    fused = fuse([p.fused for p in places if p.fused], [pair.b for pair in pairs], model)
    name = f"base_model.model.{module}.lora_B.weight"
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.1, fused.shape)
    assert np.array_equal(fused.float32(), values.astype(np.float32))


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "gemma2"])
def test_frozen_matrices_and_checkpointed_activations(case: str, tmp_path: Path) -> None:
    """The gradients of recomputed layers and of matrices held in panels have the same bits; those
    of bfloat16 are near."""
    expected, model = EXPECTED[case], reference_model(case)
    lora = opened_lora(model, adapter_folder(tmp_path, case, expected["targets"]))
    texts = examples(model.vocab_size)[:3]
    found = []
    for kind in (None, PanelMatrix, Bfloat16Matrix):
        arrays, others = frozen(model, weights_of(case).items(), kind)
        assert bool(others) == (kind is not None)
        for recomputes in (False, True):
            network = TrainedNetwork(
                model, arrays, lora.arrays, lora.deltas, others=others, recomputes=recomputes
            )
            found.append(network.gradients(texts, 1.0))
            assert network.loss(texts) == pytest.approx(found[-1][0], rel=1e-6)
    for same in (found[:4], found[4:]):
        (loss, gradients), *more = same
        for again, those in more:
            assert again == loss and those.keys() == gradients.keys()
            assert all(np.array_equal(those[name], one) for name, one in gradients.items())
    (loss, plain), (near, rounded) = found[0], found[4]
    assert near == pytest.approx(loss, rel=5e-3) and near != loss
    for name, one in plain.items():
        assert np.linalg.norm(rounded[name] - one) < 0.1 * np.linalg.norm(one), name
