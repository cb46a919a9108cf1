from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Release
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.weights import DType, LazyTensor, narrowed, widened
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.formats.hugging_face import to_hugging_face
from lite_runner.weights.formats.safetensors_file import open_safetensors, write_safetensors
from lite_runner.weights.write import convert
from tests import references

Values = Callable[..., dict[str, LazyTensor]]
Same = Callable[..., None]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_round_trip_through_every_format_is_bit_exact(
    dtype: str, config: Decoder, values: Values, same: Same, tmp_path: Path
) -> None:
    tensors = values(config, dtype)
    theirs = to_hugging_face(tensors, config)
    write_safetensors(tmp_path / "start.safetensors", theirs, {"format": "pt"})
    convert(tmp_path / "start.safetensors", config, tmp_path / "a.ckpt", "ckpt")
    convert(tmp_path / "a.ckpt", config, tmp_path / "b.safetensors", "safetensors")
    convert(tmp_path / "b.safetensors", config, tmp_path / "hf", "huggingface")
    for step in ("a.ckpt", "b.safetensors", "hf"):
        same(open_checkpoint(tmp_path / step, config), tensors)
    start, end = tmp_path / "start.safetensors", tmp_path / "hf" / "model.safetensors"
    assert end.read_bytes() == start.read_bytes()
    assert model_config_of(tmp_path / "hf") == config


def test_mindspore_loads_a_converted_checkpoint(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    import mindspore

    config = configs["qwen2"]
    write_ckpt(tmp_path / "x.ckpt", values(config))
    convert(tmp_path / "x.ckpt", config, tmp_path / "y.safetensors", "safetensors")
    one = mindspore.load_checkpoint(str(tmp_path / "x.ckpt"))
    two = mindspore.load_checkpoint(str(tmp_path / "y.safetensors"), format="safetensors")
    assert one.keys() == values(config).keys() == two.keys() - {"lm_head.weight"}
    for name, tensor in values(config).items():
        np.testing.assert_array_equal(one[name].asnumpy(), tensor.read())
        np.testing.assert_array_equal(two[name].asnumpy(), tensor.read())


@pytest.mark.parametrize(
    ("release", "family", "head"),
    [
        *((None, "qwen2", True), ("1.0.2", "qwen2", True), (1.3, "qwen2", False)),
        *((None, "bloom", False), ("1.0", "gpt2", False), ("2.1.0", "llama", True)),
    ],
)
def test_the_head_is_written_where_mindformers_cannot_tie_it(
    release: str | float | None,
    family: str,
    head: bool,
    configs: Mapping[str, Decoder],
    values: Values,
    same: Same,
    tmp_path: Path,
) -> None:
    config, tensors = configs[family], values(configs[family])
    write_ckpt(tmp_path / "x.ckpt", tensors)
    source, target, lines = tmp_path / "x.ckpt", tmp_path / "y.ckpt", list[str]()
    convert(source, config, target, "ckpt", release=Release.of(release), report=lines.append)
    assert any("lm_head.weight is written, though" in line for line in lines) == (
        head and config.tie_word_embeddings
    )
    stored = open_ckpt(tmp_path / "y.ckpt")
    assert ("lm_head.weight" in stored) == head
    if head and config.tie_word_embeddings:
        embedding = stored["model.tok_embeddings.embedding_weight"].read()
        np.testing.assert_array_equal(stored["lm_head.weight"].read(), embedding)
    same(open_checkpoint(tmp_path / "y.ckpt", config), tensors)


def test_tokenizer_files_come_along(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    config = configs["gpt2"]
    write_ckpt(tmp_path / "x.ckpt", values(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("no")
    convert(tmp_path / "x.ckpt", config, tmp_path / "out" / "hf", "huggingface")
    written = sorted(item.name for item in (tmp_path / "out" / "hf").iterdir())
    assert written == ["config.json", "model.safetensors", "tokenizer.json"]
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["hf"]
    raw = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    assert raw["architectures"] == ["GPT2LMHeadModel"]


def test_a_tokenizer_that_is_given_takes_the_place_of_its_files(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    write_ckpt(tmp_path / "x.ckpt", values(configs["gpt2"]))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    given = {"tokenizer.json": b'{"text": "mine"}', "config.json": b"{}"}
    convert(tmp_path / "x.ckpt", configs["gpt2"], tmp_path / "hf", "huggingface", beside=given)
    assert sorted(item.name for item in (tmp_path / "hf").iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json")
    ]
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == given["tokenizer.json"]


STALE = ("model.safetensors.index.json", "quantization.json")


def test_existing_targets(
    configs: Mapping[str, Decoder], values: Values, same: Same, tmp_path: Path
) -> None:
    config = configs["gpt2"]
    source = tmp_path / "x.ckpt"
    write_ckpt(source, values(config))
    with pytest.raises(ConfigError, match="exists already") as caught:
        convert(source, config, source, "ckpt")
    assert "overwrite=true" in caught.value.hint
    convert(source, config, source, "ckpt", overwrite=True)  # onto itself
    same(open_checkpoint(source, config), values(config))
    folder = tmp_path / "hf"
    folder.mkdir()
    convert(source, config, folder, "huggingface")  # an empty folder is free
    (folder / "mine.txt").touch()
    for name in STALE:
        (folder / name).write_text("of another model")
    with pytest.raises(ConfigError, match="exists already"):
        convert(source, config, folder, "huggingface")
    convert(source, config, folder, "huggingface", overwrite=True)
    assert (folder / "mine.txt").exists()
    assert not any((folder / name).exists() for name in STALE)
    same(open_checkpoint(folder, config), values(config))


def test_targets_of_the_wrong_kind(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    config = configs["gpt2"]
    source = tmp_path / "x.ckpt"
    write_ckpt(source, values(config))
    for target, form in (
        ("y.safetensors", "ckpt"),
        ("y", "safetensors"),
        ("x.ckpt", "huggingface"),
        ("y.onnx", "onnx"),
    ):
        with pytest.raises(ConfigError, match="expected"):
            convert(source, config, tmp_path / target, form, overwrite=True)  # type: ignore[arg-type]
    assert [item.name for item in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.mark.parametrize(
    ("target", "form"),
    [("y.ckpt", "ckpt"), ("y.safetensors", "safetensors"), ("hf", "huggingface")],
)
def test_nothing_is_written_on_too_small_a_disk(
    target: str,
    form: str,
    configs: Mapping[str, Decoder],
    values: Values,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_ckpt(tmp_path / "x.ckpt", values(configs["gpt2"]))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=1000, total=1 << 30)
    )
    with pytest.raises(EnvironmentFault, match="disk is too small"):
        convert(tmp_path / "x.ckpt", configs["gpt2"], tmp_path / target, form)  # type: ignore[arg-type]
    assert [item.name for item in tmp_path.iterdir()] == ["x.ckpt"]


def test_a_full_disk_in_the_middle(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    def full() -> np.ndarray:
        raise OSError(28, "No space left on device")

    tensors = values(configs["gpt2"])
    name = next(iter(tensors))
    broken = tensors | {name: LazyTensor(tensors[name].shape, "F32", full)}
    with pytest.raises(EnvironmentFault, match="cannot be written: No space left on device"):
        write_ckpt(tmp_path / "x.ckpt", broken)
    assert list(tmp_path.iterdir()) == []


def test_wrong_source_leaves_no_target(
    configs: Mapping[str, Decoder], values: Values, tmp_path: Path
) -> None:
    write_ckpt(tmp_path / "x.ckpt", values(configs["gpt2"]))
    with pytest.raises(ArtifactError, match="not those of the model"):
        convert(tmp_path / "x.ckpt", configs["bloom"], tmp_path / "hf", "huggingface")
    assert [item.name for item in tmp_path.iterdir()] == ["x.ckpt"]


def test_models_that_transformers_computes_differently_are_not_written_for_it(
    configs: Mapping[str, Decoder], tmp_path: Path
) -> None:
    model = configs["bloom"]
    fast = replace(model.feed_forward, activation="quick_gelu")
    model = replace(model, blocks=tuple(replace(one, feed_forward=fast) for one in model.blocks))
    with pytest.raises(ConfigError, match="transformers' bloom has no hidden_act=fast_gelu"):
        convert(tmp_path / "x.ckpt", model, tmp_path / "hf", "huggingface")


def test_progress(configs: Mapping[str, Decoder], values: Values, tmp_path: Path) -> None:
    write_ckpt(tmp_path / "x.ckpt", values(configs["llama"]))
    lines: list[str] = []
    convert(
        tmp_path / "x.ckpt",
        configs["llama"],
        tmp_path / "y.safetensors",
        "safetensors",
        report=lines.append,
    )
    assert 2 <= len(lines) <= 10
    assert lines[-1] == "converted 100 % of 21 tensors"


def test_gguf_becomes_mindspore(
    configs: Mapping[str, Decoder],
    values: Values,
    same: Same,
    write_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config = configs["llama"]
    arrays = {name: tensor.read() for name, tensor in values(config).items()}
    write_gguf(tmp_path / "x.gguf", config, "llama", arrays, kind="Q4_1")
    convert(tmp_path / "x.gguf", config, tmp_path / "y.ckpt", "ckpt")
    same(open_checkpoint(tmp_path / "y.ckpt", config), open_checkpoint(tmp_path / "x.gguf", config))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_gguf_to_hugging_face_keeps_16_bits(
    configs: Mapping[str, Decoder],
    values: Values,
    write_gguf: Callable[..., Path],
    tmp_path: Path,
    kind: DType,
) -> None:
    """GGUF files have vectors in F32, whatever type they had before; one that would lose bits in
    16 stays as it is."""
    config = configs["llama"]
    arrays = {
        name: widened(narrowed(tensor.read(), kind)) for name, tensor in values(config).items()
    }
    fine = next(name for name, array in arrays.items() if array.ndim == 1)
    arrays[fine][0] = 1 + 2**-20
    write_gguf(tmp_path / "x.gguf", config, "llama", arrays, kind=kind)
    convert(tmp_path / "x.gguf", config, tmp_path / "hf", "huggingface")
    found = open_checkpoint(tmp_path / "hf", config)
    for name, tensor in open_checkpoint(tmp_path / "x.gguf", config).items():
        np.testing.assert_array_equal(found[name].float32(), tensor.float32())
    assert {name for name, tensor in found.items() if tensor.dtype != kind} == {fine}


def test_a_published_form_through_mindformers_names_and_back(
    subtests: pytest.Subtests, same: Same, tmp_path: Path
) -> None:
    """Bit for bit; norms to which 1 was added within the rounding of that sum."""
    for case in references.every():
        (tmp_path / case).mkdir()
        with subtests.test(case=case):
            check_round_trip(references.REFERENCE / case, same, tmp_path / case)


def check_round_trip(folder: Path, same: Same, tmp_path: Path) -> None:
    config = model_config_of(folder)
    assert config is not None
    convert(folder, config, tmp_path / "a.ckpt", "ckpt")
    convert(tmp_path / "a.ckpt", config, tmp_path / "hf", "huggingface")
    tensors = open_checkpoint(folder, config)
    for step in ("a.ckpt", "hf"):
        same(open_checkpoint(tmp_path / step, config), tensors)
    assert model_config_of(tmp_path / "hf") == config
    read = open_safetensors(folder / "model.safetensors")
    given = references.with_projections(
        {name.removeprefix("transformer."): tensor.read() for name, tensor in read.items()}, config
    )
    written = open_safetensors(tmp_path / "hf" / "model.safetensors")
    assert written
    for name, tensor in written.items():
        found, wanted = tensor.read(), given[name.removeprefix("transformer.")]
        if architecture_of(config).norms_less_one and "norm" in name:
            assert np.abs(found - wanted).max() <= 2.0**-23  # of sums below 4
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=name)
