"""PEFT's format to MindFormers' and back; peft's own files are what they must come to."""

from __future__ import annotations

import json
from pathlib import Path

import mindspore as ms
import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Release
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights.checkpoint import model_config_in
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.lora.adapter_writer import write_adapters
from tests.paths import FIXTURES
from tests.sizes import ModelConfig

NO_COPIES = ("all", "rank_64", "second_layer", "attention", "feed_forward", "rank_1")


def opened(name: str, path: Path | None = None) -> tuple[dict[str, Adapter], Decoder]:
    model = model_config_in(FIXTURES / "reference" / name)
    assert model is not None
    return open_adapters(path or FIXTURES / "adapters" / name, model), model


def assert_same(found: Adapter, expected: Adapter) -> None:
    assert list(found.pairs) == list(expected.pairs)
    for name, pair in expected.pairs.items():
        got = found.pairs[name]
        assert got.scale == pair.scale
        for kind in ("a", "b"):
            one, other = getattr(got, kind), getattr(pair, kind)
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.read().tobytes() == other.read().tobytes()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "glm", "bloom", "gpt2"])
def test_there_and_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    adapters, model = opened(name)
    adapters.pop("patterns", None)  # MindFormers has no word for them
    write_adapters(adapters, model, tmp_path / "mf", "mindformers", listed=True)
    middle, _ = opened(name, tmp_path / "mf")
    write_adapters(middle, model, tmp_path / "peft", "peft", listed=True)
    after, _ = opened(name, tmp_path / "peft" / "lora_adapter.json")
    assert list(after) == list(adapters)
    for key, adapter in adapters.items():
        assert_same(middle[key], adapter)
        assert_same(after[key], adapter)
        if key in NO_COPIES:
            file = f"{key}/adapter_model.safetensors"
            original = FIXTURES / "adapters" / name / file
            assert (tmp_path / "peft" / file).read_bytes() == original.read_bytes()


def test_the_files_of_mindformers(tmp_path: Path) -> None:
    adapters, model = opened("bloom")
    write_adapters({"x": adapters["all"]}, model, tmp_path / "x", "mindformers", listed=False)
    settings = json.loads((tmp_path / "x/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (8, 16)
    names = {"dense1", "dense2", "dense3", "mapping", "projection"}
    assert set(settings["target_modules"]) == names
    held = ms.load_checkpoint(str(tmp_path / "x/adapter_model.ckpt"))
    assert held["blocks.1.attention.dense3.lora_a"].shape == (8, 32)
    assert held["blocks.1.output.mapping.lora_b"].shape == (128, 8)
    assert len(held) == 2 * 2 * 2 * 6  # under each of the two names


@pytest.mark.parametrize(
    ("release", "names"),
    [
        ("1.0.2", ["mindpet_delta_lora_a"]),
        (1.3, ["lora_a"]),
        (None, ["lora_a", "mindpet_delta_lora_a"]),
    ],
)
def test_mindformers_releases_have_names_of_their_own(
    release: str | float | None, names: list[str], tmp_path: Path
) -> None:
    adapters, model = opened("llama")
    one = {"x": adapters["all"]}
    folder = tmp_path / "x"
    write_adapters(one, model, folder, "mindformers", listed=False, release=Release.of(release))
    held = ms.load_checkpoint(str(folder / "adapter_model.ckpt"))
    wanted = [f"model.layers.1.attention.wq.{name}" for name in names]
    assert [
        name for name in held if "layers.1.attention.wq" in name and name.endswith("a")
    ] == wanted
    assert_same(opened("llama", folder)[0]["x"], one["x"])


def test_an_adapter_of_mindformers_is_written_unchanged(tmp_path: Path) -> None:
    theirs = FIXTURES / "mindformers/gpt2/lora/gpt2_lora.ckpt"
    sizes = {"num_heads": 2, "n_kv_heads": 2, "head_dim": 8, "intermediate_size": 64}
    sizes |= {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "seq_length": 16}
    model = ModelConfig("gpt2", **sizes, norm_eps=1e-5, tie_word_embeddings=True)
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "adapter_model.ckpt").write_bytes(theirs.read_bytes())
    config = {"r": 3, "lora_alpha": 6, "target_modules": ["dense1", "mapping"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    one, release = open_adapters(folder, model), Release.of("1.0.2")
    write_adapters(one, model, tmp_path / "x", "mindformers", listed=False, release=release)
    written, given = ms.load_checkpoint(str(tmp_path / "x/adapter_model.ckpt")), open_ckpt(theirs)
    assert written.keys() == given.keys()
    for name, tensor in given.items():
        assert written[name].asnumpy().tobytes() == tensor.read().tobytes()


def test_ranks_and_scales_that_differ_stay_in_pefts_format(tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        adapters, model = opened(name)
        only = {"patterns": adapters["patterns"]}
        with pytest.raises(ArtifactError, match=r"has \d pairs of rank and alpha"):
            write_adapters(only, model, tmp_path / "mf", "mindformers", listed=False)
        write_adapters(only, model, tmp_path / name / "patterns", "peft", listed=False)
        assert_same(opened(name, tmp_path / name / "patterns")[0]["patterns"], only["patterns"])
    assert not (tmp_path / "mf").exists()


def test_q_k_and_v_apart_are_no_module_of_hugging_face(tmp_path: Path) -> None:
    adapters, model = opened("bloom")
    whole = adapters["rank_64"]
    some = Adapter("some", whole.folder, dict(list(whole.pairs.items())[:2]))
    with pytest.raises(ArtifactError, match="with one A for all; this adapter has not all of them"):
        write_adapters({"some": some}, model, tmp_path / "x", "peft", listed=False)
    key = "blocks.0.attention.dense2.weight"
    mixed = Adapter("mixed", whole.folder, {**whole.pairs, key: adapters["all"].pairs[key]})
    with pytest.raises(ArtifactError, match="this adapter has another A or scale for each"):
        write_adapters({"mixed": mixed}, model, tmp_path / "x", "peft", listed=False)
    assert not (tmp_path / "x").exists()
    write_adapters({"some": some}, model, tmp_path / "x", "mindformers", listed=False)
    assert_same(opened("bloom", tmp_path / "x")[0]["x"], some)


def test_a_folder_in_use_is_replaced_only_when_asked(tmp_path: Path) -> None:
    adapters, model = opened("gpt2")
    one = {"all": adapters["all"]}
    write_adapters(one, model, tmp_path / "x", "mindformers", listed=False)
    for name in ("notes.txt", "config.json"):  # a model's, whose folder it may be
        (tmp_path / "x" / name).write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_adapters(one, model, tmp_path / "x", "peft", listed=False)
    write_adapters(one, model, tmp_path / "x", "peft", listed=False, overwrite=True)
    assert sorted(file.name for file in (tmp_path / "x").iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "config.json", "notes.txt")
    ]
