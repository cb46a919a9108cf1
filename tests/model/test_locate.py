"""Which model a config names, where it is, and what is not fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.locate import (
    check_same_model,
    locate,
    locate_cached,
    locate_for_plan,
    quantization_of,
)
from lite_runner.weights.formats import gguf_file
from lite_runner.weights.repository import Repository
from tests.models import model_named, reference_model
from tests.paths import REFERENCE
from tests.tiny_gguf import write_tiny_gguf

Configure = Callable[..., RunConfig]
HUB = "load_checkpoint=hf://someone/model"
LLAMA = f"load_checkpoint={REFERENCE / 'llama'}"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("something is fetched")

    monkeypatch.setattr(Repository, "fetch", fail)


def test_the_sizes_are_the_checkpoints(configure: Configure) -> None:
    files = locate(configure("model=auto", LLAMA).source)
    assert (files.path, files.model) == (REFERENCE / "llama", reference_model("llama"))


def test_random_weights_need_a_named_model(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="name a model"):
        locate(replace(configure("model=auto", LLAMA), load_checkpoint="random").source)


def test_another_model_than_the_checkpoint_is_refused(configure: Configure) -> None:
    with pytest.raises(ArtifactError, match="num_layers: the config says"):
        locate(configure("model=llama2_7b", LLAMA).source)


def test_a_checkpoint_without_sizes_needs_a_named_model(configure: Configure) -> None:
    Path("model").mkdir()
    shutil.copy(REFERENCE / "llama/model.safetensors", "model")
    with pytest.raises(ArtifactError, match=r"^model: holds no sizes of its model"):
        locate(configure("model=auto", "load_checkpoint=model").source)


@pytest.mark.usefixtures("no_network")
def test_an_uncached_source_has_no_path(configure: Configure) -> None:
    files = locate_cached(configure("model=tiny_llama", HUB).source)
    assert files.path is None and not files.is_here
    assert files.location() == "hf://someone/model: would be fetched"
    assert locate_for_plan(configure("model=tiny_llama", HUB, "dry_run=true").source) == files
    with pytest.raises(ArtifactError, match="not in the cache"):
        locate_cached(configure("model=auto", HUB).source)


@pytest.mark.usefixtures("no_network")
def test_a_cached_source_is_located_without_the_network(configure: Configure) -> None:
    config = configure("model=auto", LLAMA)
    assert locate_cached(config.source) == locate(config.source) == locate_for_plan(config.source)


@pytest.fixture
def from_hub(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that hf://someone/model comes to: a config.json, and maybe what a test adds."""
    folder = Path("snapshot")
    folder.mkdir()
    shutil.copy(REFERENCE / "llama/config.json", folder)
    monkeypatch.setattr(Repository, "fetch", lambda self, **options: folder)
    return folder


def test_without_weights_a_folder_from_the_hub_needs_none(
    configure: Configure, from_hub: Path
) -> None:
    files = locate(configure("model=auto", HUB).source, weights=False)
    assert (files.path, files.model, files.gguf) == (from_hub, reference_model("llama"), None)
    with pytest.raises(ArtifactError, match="snapshot"):
        locate(configure("model=auto", HUB).source)


def test_with_weights_a_folder_from_the_hub_is_read_as_another(
    configure: Configure, from_hub: Path
) -> None:
    """The sizes of a GGUF are in it; config.json is of the weights that are not there."""
    (from_hub / "config.json").unlink()
    write_tiny_gguf(from_hub / "model.gguf")
    files = locate(configure("model=auto", HUB).source)
    assert files.gguf is not None and files.model == locate_at(configure, from_hub).model


def locate_at(configure: Configure, path: Path, **options: bool) -> ModelFiles:
    return locate(configure("model=auto", f"load_checkpoint={path}").source, **options)


def test_without_weights_a_file_here_says_the_sizes(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    files = locate_at(configure, Path("model.gguf"), weights=False)
    assert files.gguf is not None and files.model == locate_at(configure, Path("model.gguf")).model


def test_a_damaged_file_is_told_where_weights_are_wanted(configure: Configure) -> None:
    Path("model").mkdir()
    shutil.copy(REFERENCE / "llama/config.json", "model")
    Path("model/model.safetensors").write_bytes(bytes(7))
    assert locate_at(configure, Path("model"), weights=False).path == Path("model")
    with pytest.raises(ArtifactError, match=r"^model/model.safetensors: "):
        locate_at(configure, Path("model"))
    Path("model/config.json").unlink()  # what is missing beside it is not what is wrong
    with pytest.raises(ArtifactError, match=r"^model/model.safetensors: "):
        locate_at(configure, Path("model"))


def test_the_key_of_a_missing_source_is_named(configure: Configure) -> None:
    for key in ("load_checkpoint", "pretrained_model_dir"):
        Path("gone").mkdir()
        config = configure("model=tiny_llama", f"{key}=gone")
        Path("gone").rmdir()
        with pytest.raises(ArtifactError, match=rf"^{key}: .*gone"):
            locate(config.source)


def test_reading_shards_follows_the_config(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = locate(configure("model=auto", LLAMA).source)
    assert plain.strategy is None and not plain.auto_trans
    assert locate(configure("model=auto", LLAMA, "auto_trans_ckpt=true").source).auto_trans
    monkeypatch.setenv("HOME", str(Path.cwd()))
    Path("strategy").mkdir()
    strategy = "src_strategy_path_or_dir=~/strategy"
    found = locate(configure("model=auto", LLAMA, strategy, "auto_trans_ckpt=true").source)
    assert found.strategy == Path.cwd() / "strategy"


def test_a_sharded_checkpoint_is_located_without_its_files(configure: Configure) -> None:
    """Each rank opens its own; with the sizes in a manifest no file of weights is."""
    words = ("run_mode=shard", "model=auto", LLAMA, "parallel=tp2", "shard_output=cut")
    assert main([*words, "verbosity=0"]) == 0
    files = locate_at(configure, Path("cut"))
    assert files.gguf is None and files.model == reference_model("llama")


def test_an_adapter_is_merged_into_weights_only(configure: Configure) -> None:
    pet = "{pet_type: lora, lora_rank: 8, lora_alpha: 16, target_modules: .*wq}"
    config = configure("model=auto", LLAMA, f"model.model_config.pet_config={pet}")
    assert locate(config.source, weights=False).adapter is None
    with pytest.raises(ArtifactError, match="holds no LoRA weights"):
        locate(config.source)


@pytest.mark.parametrize(
    "line",
    [
        ["predict_data=the end"],
        ["predict_data=the end", "context.cache=false"],
        ["predict_data=the end", "quant=a16w8"],
        ["predict_data=the end", "dry_run=true"],
        ["run_mode=convert", "convert_format=huggingface", "convert_output=hf"],
        ["run_mode=convert", "convert_output=x.ckpt", "convert_format=ckpt", "dry_run=true"],
        ["run_mode=quantize", "quant=a16w8", "quantize_output=q"],
        ["run_mode=shard", "parallel=tp2", "shard_output=ranks"],
        ["run_mode=eval", "eval_data=text.txt"],
    ],
    ids=" ".join,
)
def test_the_header_of_a_gguf_is_parsed_once_in_a_run(
    line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(Path("model.gguf"))
    Path("text.txt").write_text("the end of the text", encoding="utf-8")
    parsed, header = [], gguf_file._Reader.header

    def counted(reader: gguf_file._Reader) -> gguf_file.GGUFHeader:
        parsed.append(reader._path)
        return header(reader)

    monkeypatch.setattr(gguf_file._Reader, "header", counted)
    assert main(["verbosity=0", "model=auto", "load_checkpoint=model.gguf", *line]) == 0
    assert parsed == [Path("model.gguf")]


def test_context_and_special_tokens_are_the_runs_to_choose() -> None:
    model = model_named("tiny_llama")
    check_same_model(replace(model, seq_length=7, eos_token_id=(5,)), model, Path("x"))
    with pytest.raises(ArtifactError, match=r"^x is another model than the config's: .*vocab_size"):
        check_same_model(model, reference_model("llama"), Path("x"))


def test_a_quantized_checkpoint_says_how(configure: Configure) -> None:
    line = ["model=tiny_llama", "load_checkpoint=random"]
    assert main(["run_mode=quantize", *line, "quant=a16w4", "quantize_output=q"]) == 0
    stored = quantization_of(configure("model=tiny_llama").source, Path("q"))
    assert (stored.quant, stored.group) == ("a16w4", 32)
    same = configure("model=tiny_llama", "quant=a16w4")
    assert quantization_of(same.source, Path("q")) == stored
    with pytest.raises(ArtifactError, match=r"leave quant= out, or give .*load_checkpoint=random"):
        quantization_of(configure("model=tiny_llama", "quant=a16w8").source, Path("q"))
    Path("plain").mkdir()
    assert quantization_of(same.source, Path("plain")) == same.quantization


def test_a_pretrained_folder_without_a_config_is_named(configure: Configure) -> None:
    Path("empty").mkdir()
    given = ("model=auto", f"load_checkpoint={REFERENCE / 'llama'}", "pretrained_model_dir=empty")
    with pytest.raises(ArtifactError, match=r"pretrained_model_dir: empty has no config\.json"):
        locate(configure(*given).source)
