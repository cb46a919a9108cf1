from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import model_config_of
from lite_runner.weights.formats import INDEX
from lite_runner.weights.formats.hugging_face import (
    from_hugging_face,
    open_index,
    shapes_in_files,
    to_hugging_face,
)
from lite_runner.weights.formats.safetensors_file import Entry, write_entries, write_safetensors
from tests.paths import REFERENCE

Values = Callable[..., dict[str, LazyTensor]]


def lazy(array: np.ndarray) -> LazyTensor:
    return LazyTensor(array.shape, "F32", lambda: array)


def stored(config: Decoder) -> dict[str, LazyTensor]:
    """A Hugging Face checkpoint in which every value is different."""
    tensors, start = {}, 0
    for name, shape in shapes_in_files(config).items():
        size = int(np.prod(shape))
        tensors[name] = lazy(np.arange(start, start + size, dtype=np.float32).reshape(shape))
        start += size
    return tensors


def test_bloom_splits_heads_by_three(configs: Mapping[str, Decoder]) -> None:
    theirs = stored(configs["bloom"])
    ours = from_hugging_face(theirs, configs["bloom"], "x")
    block = "transformer.h.1.self_attention.query_key_value"
    weight, bias = (theirs[f"{block}.{kind}"].read() for kind in ("weight", "bias"))
    assert weight.shape == (96, 32)
    for part in range(3):
        split = ours[f"blocks.1.attention.dense{part + 1}.weight"].read()
        split_bias = ours[f"blocks.1.attention.dense{part + 1}.bias"].read()
        for head in range(4):
            for i in range(8):
                row = head * 24 + part * 8 + i
                np.testing.assert_array_equal(split[head * 8 + i], weight[row])
                assert split_bias[head * 8 + i] == bias[row]
    mapping = ours["blocks.1.output.mapping.weight"].read()
    np.testing.assert_array_equal(
        mapping, theirs["transformer.h.1.mlp.dense_h_to_4h.weight"].read().T
    )
    assert mapping.flags.c_contiguous


def test_gpt2_splits_columns(configs: Mapping[str, Decoder]) -> None:
    theirs = stored(configs["gpt2"])
    ours = from_hugging_face(theirs, configs["gpt2"], "x")
    fused = theirs["transformer.h.0.attn.c_attn.weight"].read()
    assert fused.shape == (32, 96)  # Conv1D: [in, 3 * out]
    bias = theirs["transformer.h.0.attn.c_attn.bias"].read()
    for part in range(3):
        name = f"backbone.blocks.0.attention.dense{part + 1}"
        columns = slice(32 * part, 32 * (part + 1))
        np.testing.assert_array_equal(ours[f"{name}.weight"].read(), fused[:, columns].T)
        np.testing.assert_array_equal(ours[f"{name}.bias"].read(), bias[columns])
    # Both keep these [in, out].
    assert (
        ours["backbone.blocks.0.output.mapping.weight"] is theirs["transformer.h.0.mlp.c_fc.weight"]
    )


def test_llama_only_renames(configs: Mapping[str, Decoder]) -> None:
    theirs = stored(configs["qwen2"])
    ours = from_hugging_face(theirs, configs["qwen2"], "x")
    for name, their_name in {
        "model.tok_embeddings.embedding_weight": "model.embed_tokens.weight",
        "model.layers.0.attention.wk.bias": "model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.attention.wo.weight": "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.feed_forward.w1.weight": "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.feed_forward.w2.weight": "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.feed_forward.w3.weight": "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.attention_norm.weight": "model.layers.0.input_layernorm.weight",
        "model.layers.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "model.norm_out.weight": "model.norm.weight",
    }.items():
        assert ours[name] is theirs[their_name]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_there_and_back(
    dtype: str, config: Decoder, values: Values, same: Callable[..., None]
) -> None:
    ours = values(config, dtype)
    theirs = to_hugging_face(ours, config)
    assert {name: tensor.shape for name, tensor in theirs.items()} == shapes_in_files(config)
    same(from_hugging_face(theirs, config, "x"), ours)
    same(to_hugging_face(from_hugging_face(theirs, config, "x"), config), theirs)


def test_names_without_prefix_and_buffers(configs: Mapping[str, Decoder]) -> None:
    for family in ("bloom", "gpt2", "qwen2"):
        config = configs[family]
        bare = {
            name.removeprefix("transformer.").removeprefix("model."): tensor
            for name, tensor in stored(config).items()
        }
        buffer = lazy(np.ones((1, 1, 4, 4), np.float32))
        bare |= {"h.0.attn.bias": buffer, "h.0.attn.masked_bias": buffer}
        bare["layers.0.self_attn.rotary_emb.inv_freq"] = buffer
        found = from_hugging_face(bare, config, "x")
        assert found.keys() == from_hugging_face(stored(config), config, "x").keys()


def test_both_with_and_without_prefix(configs: Mapping[str, Decoder]) -> None:
    theirs = stored(configs["gpt2"])
    theirs["wte.weight"] = theirs["transformer.wte.weight"]
    with pytest.raises(ArtifactError, match=r"transformer.wte.weight occurs twice"):
        from_hugging_face(theirs, configs["gpt2"], "x")


def test_tied_head_may_be_there_but_not_differ(configs: Mapping[str, Decoder]) -> None:
    theirs = stored(configs["qwen2"])
    embedding = theirs["model.embed_tokens.weight"].read()
    theirs["lm_head.weight"] = lazy(embedding.copy())
    assert "lm_head.weight" not in from_hugging_face(theirs, configs["qwen2"], "x")
    changed = embedding.copy()
    changed[-1, -1] = 0.5
    theirs["lm_head.weight"] = lazy(changed)
    with pytest.raises(ArtifactError, match="head differs from the word embedding") as caught:
        from_hugging_face(theirs, configs["qwen2"], "x")
    assert "tie_word_embeddings=false" in caught.value.hint


def test_missing_unexpected_misshapen_in_the_file_s_own_names(
    configs: Mapping[str, Decoder],
) -> None:
    theirs = stored(configs["llama"])
    del theirs["lm_head.weight"]
    theirs["model.layers.0.self_attn.q_proj.bias"] = lazy(np.ones(64, np.float32))
    theirs["model.norm.weight"] = lazy(np.ones(31, np.float32))
    with pytest.raises(ArtifactError) as caught:
        from_hugging_face(theirs, configs["llama"], "x")
    assert "1 missing: lm_head.weight [40, 32]" in str(caught.value)
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias [64]" in str(caught.value)
    assert "model.norm.weight: got [31], expected [32]" in str(caught.value)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_parts_of_different_types_are_fused_as_float32(
    dtype: str, configs: Mapping[str, Decoder], values: Values
) -> None:
    config = configs["gpt2"]
    ours, name = values(config), "backbone.blocks.0.attention.dense2.weight"
    for mixed in (
        ours | {name: values(config, dtype)[name]},
        values(config, dtype) | {name: ours[name]},
    ):
        found = from_hugging_face(to_hugging_face(mixed, config), config, "x")
        for one, tensor in mixed.items():
            np.testing.assert_array_equal(found[one].float32(), tensor.float32(), one)


def sharded(folder: Path, tensors: Mapping[str, LazyTensor]) -> Path:
    names = list(tensors)
    weight_map = {}
    for number, half in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in half}, {"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    return write_index(folder, weight_map)


def write_index(folder: Path, weight_map: Any) -> Path:
    index = folder / INDEX
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8")
    return index


def test_shards(tmp_path: Path, config: Decoder) -> None:
    theirs = stored(config)
    found = open_index(sharded(tmp_path, theirs))
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(found[name].read(), tensor.read())


def test_shards_may_be_links(tmp_path: Path, configs: Mapping[str, Decoder]) -> None:
    (tmp_path / "blobs").mkdir()
    index = sharded(tmp_path / "blobs", stored(configs["gpt2"]))
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():  # as the hub's cache lays them out
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert len(open_index(tmp_path / "snapshot" / index.name)) == len(stored(configs["gpt2"]))


def test_missing_shard(tmp_path: Path, configs: Mapping[str, Decoder]) -> None:
    index = sharded(tmp_path, stored(configs["gpt2"]))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ArtifactError, match=r"the shard model-00002-of-00002.safetensors is missing"
    ):
        open_index(index)


def test_a_shard_that_is_not_the_one_described(
    tmp_path: Path, configs: Mapping[str, Decoder]
) -> None:
    theirs = stored(configs["gpt2"])
    index = sharded(tmp_path, theirs)
    weight_map = json.loads(index.read_text())["weight_map"]
    moved = dict.fromkeys(weight_map, "model-00001-of-00002.safetensors")
    with pytest.raises(ArtifactError, match="it lacks 14 tensors"):
        open_index(write_index(tmp_path, moved))
    first = next(iter(weight_map))
    del weight_map[first]
    with pytest.raises(ArtifactError, match=f"it also holds 1 tensors: {first}"):
        open_index(write_index(tmp_path, weight_map))


@pytest.mark.parametrize("dtype", ["F32", "I8"])
def test_a_tensor_that_the_index_gives_to_another_shard(dtype: str, tmp_path: Path) -> None:
    """Of integers, too: parts of a quantized matrix may lie in several shards."""
    array = np.ones((2, 2), {"F32": np.float32, "I8": np.int8}[dtype])
    held = {1: ("a", "m.weight"), 2: ("b", "m.weight")}
    for number, names in held.items():
        entries = [Entry(name, dtype, array.shape, lambda: iter([array])) for name in names]
        write_entries(tmp_path / f"model-0000{number}-of-00002.safetensors", entries, {})
    files = {"a": 1, "m.weight": 1, "b": 2}
    index = write_index(
        tmp_path, {name: f"model-0000{at}-of-00002.safetensors" for name, at in files.items()}
    )
    with pytest.raises(ArtifactError, match=r"00002-of.*it also holds 1 tensors: m\.weight"):
        open_index(index)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "sub/x.safetensors",
        ".hidden.safetensors",
        "x.bin",
        "x.safetensors\n",
        "x\0.safetensors",
        "",
        7,
        None,
    ],
)
def test_an_index_stays_in_its_folder(file: object, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "secret.safetensors", {"w": lazy(np.ones(1, np.float32))}, {})
    with pytest.raises(
        ArtifactError, match=r"expected the name of a .safetensors file in the same"
    ):
        open_index(write_index(folder, {"w": file}))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": [1]}', "[" * 9999]
)
def test_broken_index(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text, "utf-8")
    with pytest.raises(ArtifactError, match="index"):
        open_index(tmp_path / INDEX)


@pytest.mark.parametrize("text", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_one_that_reads_images(text: str) -> None:
    config = model_config_of(REFERENCE / "gemma3")
    assert config is not None
    plain = stored(config)
    whole = {name.replace("model.", text, 1): tensor for name, tensor in plain.items()}
    whole["language_model.lm_head.weight"] = plain["model.embed_tokens.weight"]
    whole |= dict.fromkeys(
        ("vision_tower.x.bias", "model.multi_modal_projector.y.weight"), lazy(np.zeros(3))
    )
    found, expected = from_hugging_face(whole, config, "x"), from_hugging_face(plain, config, "x")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].read(), tensor.read(), name)


def test_keys_of_a_layer_that_takes_those_of_another() -> None:
    """Published Gemma 4 files have them; no layer without borrowed keys may have more."""
    config = model_config_of(REFERENCE / "gemma4_sides")
    assert config is not None
    borrows = [one.attention.borrowed is not None for one in config.blocks]
    last, first = (f"model.layers.{at}.self_attn." for at in (len(borrows) - 1, 0))
    assert borrows[-1] and not borrows[0]
    plain, more = stored(config), lazy(np.zeros((3, 3)))
    names = [f"{last}{part}.weight" for part in ("k_proj", "v_proj", "k_norm")]
    whole = plain | dict.fromkeys(names, more)
    expected = from_hugging_face(plain, config, "x")
    assert from_hugging_face(whole, config, "x").keys() == expected.keys()
    prefix = "model.language_model."  # as in a model that reads images and sound
    whole = {name.replace("model.", prefix, 1): tensor for name, tensor in whole.items()}
    whole |= dict.fromkeys(("model.audio_tower.x.weight", "model.embed_vision.y.weight"), more)
    assert from_hugging_face(whole, config, "x").keys() == expected.keys()
    with pytest.raises(ArtifactError, match="x_proj"):
        from_hugging_face(plain | {f"{last}x_proj.weight": more}, config, "x")
    del plain[f"{first}k_norm.weight"]
    with pytest.raises(ArtifactError, match="k_norm"):
        from_hugging_face(plain, config, "x")


def test_weights_of_norms_that_are_stored_less_one() -> None:
    config = model_config_of(REFERENCE / "gemma2")
    assert config is not None
    theirs = stored(config)
    ours = from_hugging_face(theirs, config, "x")
    norm, matrix = "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(
        ours["model.layers.0.attention_norm.weight"].read(), theirs[norm].read() + 1
    )
    back = to_hugging_face(ours, config)
    for name in (norm, matrix):
        np.testing.assert_array_equal(back[name].read(), theirs[name].read(), name)
    half = LazyTensor((32,), "BF16", lambda: np.full(32, 0x3B80, np.uint16))  # 2^-8
    widened = from_hugging_face(theirs | {norm: half}, config, "x")
    assert set(widened["model.layers.0.attention_norm.weight"].read()) == {1 + 2.0**-8}
