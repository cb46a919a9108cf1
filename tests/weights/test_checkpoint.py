from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import (
    model_config_in,
    model_config_of,
    open_checkpoint,
    weights_file,
)
from lite_runner.weights.formats import INDEX, hf_from_model_config
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.formats.hugging_face import full_name, is_buffer, to_hugging_face
from lite_runner.weights.formats.safetensors_file import open_safetensors, write_safetensors
from tests import references
from tests.paths import REFERENCE
from tests.sizes import resized

Values = Callable[..., dict[str, LazyTensor]]
Same = Callable[..., None]


def scalar(value: float) -> LazyTensor:
    return LazyTensor((), "F32", lambda: np.array(value, np.float32))


def test_canonical_names_in_either_format(
    config: Decoder, values: Values, same: Same, tmp_path: Path
) -> None:
    tensors = values(config)
    write_ckpt(tmp_path / "x.ckpt", tensors)
    write_safetensors(tmp_path / "x.safetensors", tensors, {})
    same(open_checkpoint(tmp_path / "x.ckpt", config), tensors)
    same(open_checkpoint(tmp_path / "x.safetensors", config), tensors)


def test_format_is_told_by_content(
    config: Decoder, values: Values, same: Same, tmp_path: Path
) -> None:
    tensors = values(config)
    write_ckpt(tmp_path / "one", tensors)
    write_safetensors(tmp_path / "two.bin", to_hugging_face(tensors, config), {})
    same(open_checkpoint(tmp_path / "one", config), tensors)
    same(open_checkpoint(tmp_path / "two.bin", config), tensors)


def test_order_is_the_model_s(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    tensors = values(configs["llama"])
    write_ckpt(tmp_path / "x.ckpt", dict(reversed(tensors.items())))
    assert list(open_checkpoint(tmp_path / "x.ckpt", configs["llama"])) == list(tensors)


def test_hugging_face_folder_and_shards(
    config: Decoder, values: Values, same: Same, tmp_path: Path
) -> None:
    theirs = to_hugging_face(values(config), config)
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", theirs, {})
    weight_map = dict.fromkeys(theirs, "model-00001-of-00001.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    same(open_checkpoint(tmp_path, config), values(config))
    same(open_checkpoint(tmp_path / INDEX, config), values(config))
    write_safetensors(tmp_path / "model.safetensors", theirs, {})
    assert weights_file(tmp_path).name == "model.safetensors"  # as transformers prefers


def test_mindspore_folder_and_gguf_folder(
    configs: Mapping[str, Decoder],
    values: Values,
    same: Same,
    write_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config = configs["llama"]
    (tmp_path / "ms").mkdir()
    write_ckpt(tmp_path / "ms" / "llama.ckpt", values(config))
    same(open_checkpoint(tmp_path / "ms", config), values(config))
    (tmp_path / "gguf").mkdir()
    arrays = {name: tensor.read() for name, tensor in values(config).items()}
    write_gguf(tmp_path / "gguf" / "x.gguf", config, "llama", arrays)
    same(open_checkpoint(tmp_path / "gguf", config), values(config))
    assert model_config_of(tmp_path / "gguf") == config


def test_training_state_and_mindformers_prefix(
    configs: Mapping[str, Decoder], values: Values, same: Same, tmp_path: Path
) -> None:
    config = configs["bloom"]
    tensors = values(config)
    saved = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    saved |= {"loss_scale": scalar(8.0), "learning_rate": scalar(0.1)}
    saved["adam_m.transformer.ln_f.gamma"] = tensors["ln_f.gamma"]
    write_ckpt(tmp_path / "x.ckpt", saved)
    same(open_checkpoint(tmp_path / "x.ckpt", config), tensors)


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_training_state_of_mindformers_is_left_out(
    form: str,
    configs: Mapping[str, Decoder],
    values: Values,
    same: Same,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caches = {
        "bloom": ["blocks.0.key_past", "transformer.blocks.1.value_past", "beta1_power"],
        "gpt2": ["backbone.blocks.0.key_past", "backbone.blocks.1.attention.masked_beta"],
        "llama": [
            *("model.layers.0.attention.kvcache_mgr.key_past", "global_step"),
            *("model.layers.1.attention.infer_attention.paged_attention_mgr.key_cache",),
            *("adam_v.model.norm_out.weight", "exp_avg_sq.model.norm_out.weight", "state_step"),
        ],
    }
    write = write_ckpt if form == "ckpt" else lambda path, found: write_safetensors(path, found, {})
    for family, names in caches.items():
        config = configs[family]
        path = tmp_path / f"{family}.{form}"
        write(path, values(config) | dict.fromkeys(names, scalar(0.0)))
        same(open_checkpoint(path, config), values(config))
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{path}: {len(names)} tensors are not weights and are left out: ")
    assert line.endswith(" ...")


def test_the_head_that_mindformers_conversion_of_bloom_writes(
    configs: Mapping[str, Decoder], values: Values, same: Same, tmp_path: Path
) -> None:
    config = configs["bloom"]
    tensors = values(config)
    saved = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    saved["head.weight"] = tensors["embedding.word_embedding.embedding_table"]
    write_ckpt(tmp_path / "combine.ckpt", saved)
    same(open_checkpoint(tmp_path, config), tensors)


def test_tied_head_in_canonical_names(
    configs: Mapping[str, Decoder], values: Values, same: Same, tmp_path: Path
) -> None:
    config = configs["qwen2"]
    tensors = values(config)
    embedding = tensors["model.tok_embeddings.embedding_weight"]
    write_ckpt(tmp_path / "x.ckpt", tensors | {"lm_head.weight": embedding})
    same(open_checkpoint(tmp_path / "x.ckpt", config), tensors)
    other = values(config, seed=1)["model.tok_embeddings.embedding_weight"]
    write_ckpt(tmp_path / "x.ckpt", tensors | {"lm_head.weight": other})
    with pytest.raises(ArtifactError, match="head differs"):
        open_checkpoint(tmp_path / "x.ckpt", config)


def test_incomplete_checkpoints(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    config = configs["bloom"]
    tensors = values(config)
    del tensors["blocks.1.attention.dense2.weight"]
    write_ckpt(tmp_path / "x.ckpt", tensors)
    with pytest.raises(
        ArtifactError, match=r"1 missing: blocks.1.attention.dense2.weight \[32, 32"
    ):
        open_checkpoint(tmp_path / "x.ckpt", config)
    with pytest.raises(ArtifactError, match=r"(?s)36 missing: .* 36 unexpected: "):
        open_checkpoint(tmp_path / "x.ckpt", resized(config, family="gpt2"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights"])
def test_pickles_are_refused(name: str, configs: Mapping[str, Decoder], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02.")
    with pytest.raises(ArtifactError, match="a pickle, which can run any code") as caught:
        open_checkpoint(tmp_path / name, configs["gpt2"])
    assert ".safetensors" in caught.value.hint
    if name != "weights":
        with pytest.raises(ArtifactError, match=f"{name}: a pickle"):
            open_checkpoint(tmp_path, configs["gpt2"])
    (tmp_path / name).write_bytes(b"\x80\x04\x95 old torch.save")
    with pytest.raises(ArtifactError, match="a pickle"):
        open_checkpoint(tmp_path / name, configs["gpt2"])


def test_a_pickle_beside_safetensors_does_not_matter(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    config = configs["gpt2"]
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    write_safetensors(tmp_path / "model.safetensors", to_hugging_face(values(config), config), {})
    assert len(open_checkpoint(tmp_path, config)) == len(values(config))


def test_folders_that_are_no_checkpoint(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    config = configs["gpt2"]
    with pytest.raises(ArtifactError, match="the folder holds no checkpoint"):
        open_checkpoint(tmp_path, config)
    for name in ("a.ckpt", "b.ckpt"):
        write_ckpt(tmp_path / name, values(config))
    with pytest.raises(ArtifactError, match=r"2 checkpoints \(a.ckpt, b.ckpt\), expected one"):
        open_checkpoint(tmp_path, config)
    for rank in range(3):
        (tmp_path / f"rank_{rank}").mkdir()
    with pytest.raises(ArtifactError, match=r"sharded for 3 ranks .* expected a whole one"):
        open_checkpoint(tmp_path, config)


def test_missing_paths_and_files_without_weights(
    configs: Mapping[str, Decoder], tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="no such file or folder"):
        open_checkpoint(tmp_path / "x", configs["gpt2"])
    (tmp_path / "x").write_bytes(b"hello world")
    with pytest.raises(ArtifactError, match="not a checkpoint: it starts with b'hello wo'"):
        open_checkpoint(tmp_path / "x", configs["gpt2"])
    for suffix, expected in (
        ("safetensors", "not a valid safetensors file"),
        ("gguf", "not a GGUF file"),
        ("ckpt", "not a valid MindSpore checkpoint"),
    ):
        file = tmp_path / f"x.{suffix}"
        file.write_bytes(b"hello world, hello world")
        with pytest.raises(ArtifactError, match=expected):
            open_checkpoint(file, configs["gpt2"])


def test_config_beside_the_weights(config: Decoder, values: Values, tmp_path: Path) -> None:
    write_ckpt(tmp_path / "x.ckpt", values(config))
    assert model_config_of(tmp_path) is None
    assert model_config_of(tmp_path / "x.ckpt") is None
    (tmp_path / "config.json").write_text(json.dumps(hf_from_model_config(config)))
    assert model_config_of(tmp_path) == config
    assert model_config_of(tmp_path / "x.ckpt") == config
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7], "top_k": 5}')
    assert model_config_of(tmp_path) == replace(config, eos_token_id=(2, 7))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", "[" * 100_000, '{"model_type": "mamba"}', "\xff"),
        '{"model_type": "llama", "rope_theta": 1' + "0" * 400 + "}",
        '{"model_type": "llama", "rope_theta": 1e999}',
        '{"model_type": "llama", "rope_theta": NaN}',
        '{"model_type": "llama", "rms_norm_eps": 1' + "0" * 5000 + "}",
    ],
)
def test_broken_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"\x0a")
    (tmp_path / "config.json").write_text(text, "latin-1")
    with pytest.raises(ArtifactError, match=r"config.json"):
        model_config_of(tmp_path)


def test_a_bare_infinity_is_read_where_nothing_is_computed_with_it(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"\x0a")
    config = '{"model_type": "mamba2", "time_step_limit": [0, Infinity]}'
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ArtifactError, match="model_type is 'mamba2', expected one of"):
        model_config_of(tmp_path)


def test_a_checkpoint_of_transformers_survives_a_conversion(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    for case in references.every():
        with subtests.test(case=case):
            check_conversion(REFERENCE / case, tmp_path)


def check_conversion(folder: Path, tmp_path: Path) -> None:
    config = model_config_of(folder)
    assert config is not None
    write_ckpt(tmp_path / "x.ckpt", open_checkpoint(folder, config))
    restored = to_hugging_face(open_checkpoint(tmp_path / "x.ckpt", config), config)
    found = open_safetensors(folder / "model.safetensors", is_buffer)
    original = references.with_projections(
        {full_name(name, restored): tensor.read() for name, tensor in found.items()}, config
    )
    assert restored.keys() == original.keys()
    for name, wanted in original.items():
        again = restored[name].read()
        assert again.shape == wanted.shape
        if architecture_of(config).norms_less_one and "norm" in name:
            assert np.abs(again - wanted).max() <= 2.0**-23  # 1 was added: the rounding of sums
        else:
            assert again.tobytes() == wanted.tobytes()


def test_code_of_a_checkpoint_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.loads((REFERENCE / "llama/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "modeling.py").write_text("raise SystemExit('run')")
    plain = model_config_in(tmp_path)
    assert "auto_map" not in capsys.readouterr().err
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert model_config_in(tmp_path) == plain
    assert "the Python code that auto_map names there is not run" in capsys.readouterr().err
