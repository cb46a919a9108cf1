"""Loading checkpoints of the real MindFormers 1.0.2: tests/fixtures/README.md says how they were
made. `make reference-mindformers` makes them anew, and has the real one load ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import yaml
from numpy.typing import NDArray

from lite_runner import AutoModel
from lite_runner.backends import Backend, Row
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.lora.adapter import Adapter, merged
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from tests.paths import FIXTURES
from tests.sizes import ModelConfig

FIXTURES = FIXTURES / "mindformers"
SEQ_LENGTH = 16
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "n_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "seq_length": SEQ_LENGTH,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GROUPED = {"num_heads": 4, "head_dim": 4, "intermediate_size": 24, "tie_word_embeddings": False}
CONFIGS = {
    "bloom": ModelConfig("bloom", **SIZES),
    "gpt2": ModelConfig("gpt2", **SIZES),
    "llama": ModelConfig("llama", **{**SIZES, **GROUPED}),
}
# MindFormers was told to compute with float32, but bloom and gpt2 round to float16 on the way.
TOLERANCE = {"bloom": 4e-3, "gpt2": 4e-3, "llama": 1e-5}
Error = Callable[[NDArray, NDArray], float]


def backend(
    family: str, kind: str, *, kernels: bool = True, adapter: Adapter | None = None
) -> Backend:
    config = CONFIGS[family]
    tensors = open_checkpoint(FIXTURES / family / kind / f"{family}.ckpt", config)
    if adapter is not None:
        tensors = merged(tensors, adapter, config)
    if kernels:
        options = NativeOptions(slots=1, length=SEQ_LENGTH)
        layers = pack(config, QuantizedWeights(tensors, config))
        return NativeBackend(config, layers, options)
    return MindSporeBackend(
        config, ReadAhead(tensors), MindSporeOptions(slots=1, length=SEQ_LENGTH)
    )


def run(model: Backend, expected: Any, steps: int) -> NDArray[np.float32]:
    """Logits [prompts, steps, vocab] after each prompt and after MindFormers' tokens."""
    found = []
    for padded, length, tokens in zip(
        expected["prompts"], expected["lengths"], expected["tokens"], strict=True
    ):
        logits = [model.forward([Row(0, padded[:length], 0)])[0]]
        for step, token in enumerate(tokens[: steps - 1]):
            logits.append(model.forward([Row(0, np.array([token], np.int32), length + step)])[0])
        found.append(np.stack(logits))
    return np.stack(found)


@pytest.mark.parametrize(
    ("kernels", "steps"), [(True, 6), (False, 1)], ids=["own operators", "MindSpore's"]
)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_checkpoint_gives_the_logits_and_tokens_of_mindformers(
    family: str, kernels: bool, steps: int, relative_error: Error
) -> None:
    expected = np.load(FIXTURES / family / "expected.npz")
    found = run(backend(family, "plain", kernels=kernels), expected, steps)
    assert relative_error(found, expected["logits"][:, :steps]) <= TOLERANCE[family]
    np.testing.assert_array_equal(found.argmax(axis=-1), expected["tokens"][:, :steps])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_checkpoint_with_its_cache_too(family: str, relative_error: Error) -> None:
    """use_past=True and float16, in which MindFormers computes it; here float32 computes."""
    expected = np.load(FIXTURES / family / "expected.npz")
    found = run(backend(family, "past"), expected, 6)
    assert relative_error(found, expected["past_logits"]) <= 6e-3
    np.testing.assert_array_equal(found.argmax(axis=-1), expected["tokens"])


@pytest.mark.parametrize(
    ("family", "targets"), [("gpt2", ["dense1", "mapping"]), ("llama", ".*wq|.*wv|.*w2")]
)
def test_an_adapter_that_mindformers_trained(
    family: str, targets: Any, tmp_path: Path, relative_error: Error
) -> None:
    """Its parameters are named mindpet_delta_lora_a and ..._b; SLoRA's config says the rest."""
    config = {"r": 3, "lora_alpha": 6, "target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    saved = FIXTURES / family / "lora" / f"{family}_lora.ckpt"
    (tmp_path / "adapter_model.ckpt").write_bytes(saved.read_bytes())
    (adapter,) = open_adapters(tmp_path, CONFIGS[family]).values()
    expected = np.load(FIXTURES / family / "expected.npz")
    found = run(backend(family, "plain", adapter=adapter), expected, 1)[:, 0]
    assert relative_error(found, expected["lora_logits"]) <= TOLERANCE[family]
    assert relative_error(expected["logits"][:, 0], expected["lora_logits"]) > 0.1


@pytest.fixture
def saved_folder(tmp_path: Path) -> Callable[[str], Path]:
    """A family's folder as save_pretrained leaves it, use_past True, and a tokenizer in it."""

    def copy(family: str) -> Path:
        folder = shutil.copytree(FIXTURES / family / "past", tmp_path / family)
        words = {f"w{id}": id for id in range(64)}
        model = tokenizers.models.WordLevel(words, unk_token="w0")
        tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
        return folder

    return copy


def prompts_of(expected: Any) -> list[list[int]]:
    pairs = zip(expected["prompts"], expected["lengths"], strict=True)
    return [row[:length].tolist() for row, length in pairs]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_of_save_pretrained_is_a_model(
    family: str, saved_folder: Callable[[str], Path]
) -> None:
    expected = np.load(FIXTURES / family / "expected.npz")
    prompts = prompts_of(expected)
    found = AutoModel.from_pretrained(saved_folder(family)).generate(prompts, max_new_tokens=6)
    for prompt, ids, tokens in zip(prompts, found, expected["tokens"].tolist(), strict=True):
        assert ids == prompt + tokens  # one ends with the end token


def test_a_finetuned_checkpoint_holds_its_adapter(saved_folder: Callable[[str], Path]) -> None:
    """As MindFormers saves a network with LoRA: all parameters; its yaml has a pet_config."""
    folder = saved_folder("llama")
    source = FIXTURES / "llama"
    whole = open_ckpt(source / "plain/llama.ckpt") | open_ckpt(source / "lora/llama_lora.ckpt")
    write_ckpt(folder / "llama.ckpt", whole)
    settings = yaml.safe_load((folder / "llama.yaml").read_text(encoding="utf-8"))
    settings["model"]["model_config"]["pet_config"] = {
        "pet_type": "lora",
        "lora_rank": 3,
        "lora_alpha": 6,
        "lora_dropout": 0.05,
        "target_modules": ".*wq|.*wv|.*w2",
    }
    (folder / "llama.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    expected = np.load(source / "expected.npz")
    model = AutoModel.from_pretrained(folder)
    chosen = [ids[-1] for ids in model.generate(prompts_of(expected), max_new_tokens=1)]
    assert chosen == expected["lora_logits"].argmax(axis=-1).tolist()
    assert chosen != expected["tokens"][:, 0].tolist()
