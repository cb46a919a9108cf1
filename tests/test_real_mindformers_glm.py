"""Loading a ChatGLM2 of the real MindFormers 1.0.2: tests/fixtures/README.md says
how it was made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from lite_runner import AutoModel, GLMChatModel, GLMConfig, GLMForPreTraining
from lite_runner.app import main
from lite_runner.architectures import chatglm
from lite_runner.architectures.quantization import CacheType
from lite_runner.architectures.reference import forward
from lite_runner.architectures.settings import LearnedKeySettings
from lite_runner.backends import Backend, Row
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.learned_keys import learned_keys, with_learned_keys
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.lora.adapter import merged
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from lite_runner.weights.write import convert
from tests.paths import FIXTURES

GLM2 = FIXTURES / "mindformers" / "glm2"
CONFIG = chatglm.decoder(
    vocab_size=130,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    n_kv_heads=2,
    head_dim=12,
    intermediate_size=80,
    seq_length=48,
    norm_eps=1e-5,
    rope_ratio=1.0,
    qkv_bias=True,
    tie_word_embeddings=False,
    eos_token_id=(2,),
    pad_token_id=0,
)
TABLE = "transformer.embedding.embedding_table"  # as 1.0.2 calls it; 1.3.2 has embedding_weight
Error = Callable[[NDArray, NDArray], float]


@pytest.fixture(scope="module")
def expected() -> Any:
    return np.load(GLM2 / "expected.npz")


def backend(kind: str, *, kernels: bool) -> Backend:
    tensors = open_checkpoint(GLM2 / kind / "glm2.ckpt", CONFIG)
    if kernels:
        layers = pack(CONFIG, QuantizedWeights(tensors, CONFIG))
        return NativeBackend(CONFIG, layers, NativeOptions(slots=1, length=48))
    return MindSporeBackend(CONFIG, ReadAhead(tensors), MindSporeOptions(slots=1, length=48))


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [("plain", True), ("past", True), ("plain", False)],
    ids=["own operators", "with its cache", "MindSpore's"],
)
def test_logits_at_each_position(
    kind: str, kernels: bool, expected: Any, relative_error: Error
) -> None:
    model = backend(kind, kernels=kernels)
    for prompt, length, logits in zip(
        expected["prompts"], expected["lengths"], expected["logits"], strict=True
    ):
        half = length // 2 + 1
        found = [model.forward([Row(0, prompt[:half], 0)])[0]]
        for place in range(half, length):
            found.append(model.forward([Row(0, prompt[place : place + 1], place)])[0])
        assert relative_error(np.stack(found), logits[half - 1 : length]) <= 1e-5


def prompts_of(expected: Any) -> list[list[int]]:
    pairs = zip(expected["prompts"], expected["lengths"], strict=True)
    return [row[:length].tolist() for row, length in pairs]


@pytest.mark.parametrize("kind", ["plain", "past"])
def test_a_folder_of_save_pretrained_gives_its_tokens(kind: str, expected: Any) -> None:
    prompts = prompts_of(expected)
    found = AutoModel.from_pretrained(GLM2 / kind).generate(prompts, max_new_tokens=14)
    for prompt, ids, tokens in zip(prompts, found, expected["tokens"].tolist(), strict=True):
        assert ids == prompt + tokens


def same_bits(found: Path, wanted: Path) -> None:
    ours, theirs = open_ckpt(found), open_ckpt(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name].read(), tensor.read())


def test_both_names_of_the_embedding(tmp_path: Path) -> None:
    saved = open_ckpt(GLM2 / "plain" / "glm2.ckpt")
    newer = {name.replace(TABLE, TABLE.replace("table", "weight")): saved[name] for name in saved}
    write_ckpt(tmp_path / "newer.ckpt", newer)
    ours = open_checkpoint(GLM2 / "plain" / "glm2.ckpt", CONFIG)
    for name, tensor in open_checkpoint(tmp_path / "newer.ckpt", CONFIG).items():
        np.testing.assert_array_equal(tensor.read(), ours[name].read())
    convert(GLM2 / "plain" / "glm2.ckpt", CONFIG, tmp_path / "back.ckpt", "ckpt")
    same_bits(tmp_path / "back.ckpt", tmp_path / "newer.ckpt")


def test_to_hugging_face_and_back(tmp_path: Path) -> None:
    """Fused as both have it, with any steps between."""
    convert(GLM2 / "plain" / "glm2.ckpt", CONFIG, tmp_path / "theirs", "huggingface")
    convert(tmp_path / "theirs", CONFIG, tmp_path / "back.ckpt", "ckpt")
    convert(GLM2 / "plain" / "glm2.ckpt", CONFIG, tmp_path / "once.ckpt", "ckpt")
    same_bits(tmp_path / "back.ckpt", tmp_path / "once.ckpt")


def test_an_adapter_of_the_fused_modules(tmp_path: Path) -> None:
    """Merged here it gives what the sum of the fused matrices gives."""
    rng = np.random.default_rng(1)
    saved = open_ckpt(GLM2 / "plain" / "glm2.ckpt")
    adapter: dict[str, LazyTensor] = {}
    for layer in range(2):
        for name in ("self_attention.query_key_value", "mlp.dense_h_to_4h"):
            module = f"transformer.encoder.layers.{layer}.{name}"
            weight = saved[f"{module}.weight"]
            a, b = (rng.normal(0, 0.3, size).astype(np.float32) for size in ((4, 48), (1, 4)))
            b = np.repeat(b, weight.shape[0], 0) * rng.normal(0, 1, (weight.shape[0], 1))
            b = b.astype(np.float32)
            adapter |= {f"{module}.lora_a": held(a), f"{module}.lora_b": held(b)}
            saved[f"{module}.weight"] = held(weight.float32() + 2 * b @ a)
    write_ckpt(tmp_path / "merged.ckpt", saved)
    write_ckpt(tmp_path / "adapter_model.ckpt", adapter)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ".*query_key_value|.*dense_h_to_4h"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (opened,) = open_adapters(tmp_path, CONFIG).values()
    found = merged(open_checkpoint(GLM2 / "plain" / "glm2.ckpt", CONFIG), opened, CONFIG)
    for name, tensor in open_checkpoint(tmp_path / "merged.ckpt", CONFIG).items():
        np.testing.assert_allclose(found[name].float32(), tensor.float32(), rtol=1e-5, atol=1e-6)


def held(array: NDArray[np.float32]) -> LazyTensor:
    return LazyTensor(array.shape, "F32", lambda: array)


@pytest.mark.parametrize("backend", ["native", "ms"])
def test_greedy_tokens_of_chatglm_6b(backend: str) -> None:
    """Of prompts with both mask tokens, with several, and with text behind what ends the prefix."""
    folder = FIXTURES / "reference/chatglm_6b"
    expected = json.loads((folder / "greedy.json").read_text(encoding="utf-8"))
    model = AutoModel.from_pretrained(folder, backend=backend)
    found = model.generate(expected["prompts"], max_new_tokens=14)
    for prompt, ids, tokens in zip(expected["prompts"], found, expected["tokens"], strict=True):
        assert ids == prompt + tokens


def test_a_chatglm_6b_by_mindformers_names() -> None:
    """Its config as a script gives it, with the sizes and tokens of the fixture."""
    folder = FIXTURES / "reference/chatglm_6b"
    expected = json.loads((folder / "greedy.json").read_text(encoding="utf-8"))
    tokens = {"bos_token_id": 124, "eos_token_id": 125, "pad_token_id": 3}
    masks = {"mask_token_id": 120, "gmask_token_id": 121}
    sizes = {"vocab_size": 130, "hidden_size": 48, "num_layers": 2, "num_heads": 4}
    config = GLMConfig(
        **(sizes | tokens | masks),
        inner_hidden_size=192,
        seq_length=48,
        checkpoint_name_or_path=str(folder / "model.safetensors"),
    )
    for kind in (GLMForPreTraining, GLMChatModel):
        (found,) = kind(config).generate(expected["prompts"][:1], max_new_tokens=14)
        assert found == expected["prompts"][0] + expected["tokens"][0]
    assert type(AutoModel.from_config(config)) is GLMForPreTraining


PTUNING = {"pet_type": "ptuning2", "pre_seq_len": 5, "prefix_projection": True, "projection_dim": 6}


@pytest.fixture(scope="module")
def tuned() -> ModelFiles:
    """A ChatGLM2 with p-tuning v2, as scripts/make_glm2_reference.py makes it."""
    files = ModelFiles("", GLM2 / "ptuning2" / "glm2.ckpt", CONFIG, 0)
    return with_learned_keys(files, LearnedKeySettings(**PTUNING))


def texts_with_logits() -> Iterator[tuple[NDArray[np.int32], int, NDArray[np.float32]]]:
    """Tokens, those of the prompt, and the logits behind it."""
    expected = np.load(GLM2 / "ptuning2" / "expected.npz")
    names = ("prompts", "lengths", "continuations", "logits")
    for prompt, length, more, logits in zip(*(expected[name] for name in names), strict=True):
        yield np.concatenate([prompt[:length], more]), length, logits


@pytest.mark.parametrize(("cache", "most"), [("fp32", 1e-5), ("fp16", 2e-3), ("int8", 5e-2)])
def test_learned_keys(
    tuned: ModelFiles, cache: CacheType, most: float, relative_error: Error
) -> None:
    """In slots that are used again and copied, in chunks, and beside others."""
    weights = QuantizedWeights(tuned.tensors(), CONFIG)
    assert tuned.learned_keys is not None
    learned = learned_keys(tuned.learned_keys, tuned.model)
    options = NativeOptions(slots=3, length=43, cache=cache)
    model = NativeBackend(tuned.model, pack(CONFIG, weights), options, learned=learned)
    texts = list(texts_with_logits())
    for slot, (tokens, length, _) in enumerate(texts):
        model.forward([Row(slot, tokens[:length], 0)])
    for slot, (tokens, length, logits) in enumerate(texts):
        found = [model.forward([Row(slot, tokens[length - 1 : length], length - 1)])[0]]
        model.release(slot, length - 1)
        model.copy([slot], [(slot + 1) % 3])  # over another's text, which is written again
        rows = [Row((slot + 1) % 3, tokens[length - 1 :], length - 1, logits=len(logits))]
        np.testing.assert_array_equal(model.forward(rows)[0], found[0])
        assert relative_error(model.forward(rows), logits) <= most
        model.release(slot, 0)
        other = texts[(slot + 1) % 3]
        model.forward([Row((slot + 1) % 3, other[0][: other[1]], 0), Row(slot, tokens[:length], 0)])
    if cache == "fp32":
        by_name = {name: one.float32() for name, one in tuned.tensors().items()}
        for tokens, length, logits in texts:
            wanted = forward(tuned.model, by_name, tokens, learned)[length - 1 :]
            assert relative_error(wanted, logits) <= 1e-5


def test_a_yaml_with_learned_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy tokens by MindFormers' yaml; without its pet_config the checkpoint is refused, and
    what cannot hold learned keys says so."""
    raw = yaml.safe_load((GLM2 / "plain" / "glm2.yaml").read_text(encoding="utf-8"))
    model, checkpoint = raw["model"], tmp_path / "glm2.ckpt"
    model["arch"]["type"] = "ChatGLM2WithPtuning2"
    model["model_config"] |= {"pre_seq_len": 5, "prefix_projection": True, "pet_config": PTUNING}
    shutil.copy(GLM2 / "ptuning2" / "glm2.ckpt", checkpoint)
    file = tmp_path / "glm2.yaml"
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    tuned = AutoModel.from_pretrained(tmp_path)
    for tokens, length, logits in texts_with_logits():
        (found,) = tuned.generate([tokens[:length].tolist()], max_new_tokens=1)
        assert found[length:] == [int(logits[0].argmax())]
    line = ["--config", str(file), "--load_checkpoint", str(checkpoint), "run_mode=convert"]
    assert main([*line, "convert_format=ckpt", f"convert_output={tmp_path / 'c.ckpt'}"]) == 4
    assert "holds learned keys" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="in front of each sequence need backend=native"):
        AutoModel.from_pretrained(tmp_path, backend="ms").generate([[3]])
    model["model_config"]["pet_config"] = PTUNING | {"pre_seq_len": 4}
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(ArtifactError, match="its learned keys are"):
        AutoModel.from_pretrained(tmp_path)
    del model["model_config"]["pet_config"]
    del model["model_config"]["pre_seq_len"], model["model_config"]["prefix_projection"]
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(ArtifactError, match="holds learned keys"):
        AutoModel.from_pretrained(tmp_path).generate([[3]])
