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
from lite_runner.model.locate import locate, locate_cached, locate_for_plan
from lite_runner.weights import source
from lite_runner.weights.formats import gguf_metadata
from tests.models import reference_model
from tests.paths import REFERENCE
from tests.tiny_gguf import write_tiny_gguf

Configure = Callable[..., RunConfig]
HUB = "load_checkpoint=hf://someone/model"
LLAMA = f"load_checkpoint={REFERENCE / 'llama'}"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("something is fetched")

    monkeypatch.setattr(source, "_fetch_from_hub", fail)


def test_the_sizes_are_the_checkpoints(configure: Configure) -> None:
    files = locate(configure("model=auto", LLAMA))
    assert (files.path, files.model) == (REFERENCE / "llama", reference_model("llama"))


def test_random_weights_need_a_named_model(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="name a model"):
        locate(replace(configure("model=auto", LLAMA), load_checkpoint="random"))


def test_another_model_than_the_checkpoint_is_refused(configure: Configure) -> None:
    with pytest.raises(ArtifactError, match="num_layers: the config says"):
        locate(configure("model=llama2_7b", LLAMA))


def test_a_checkpoint_without_sizes_needs_a_named_model(configure: Configure) -> None:
    Path("model").mkdir()
    shutil.copy(REFERENCE / "llama/model.safetensors", "model")
    with pytest.raises(ArtifactError, match=r"^model: holds no sizes of its model"):
        locate(configure("model=auto", "load_checkpoint=model"))


@pytest.mark.usefixtures("no_network")
def test_what_is_not_in_the_cache_has_no_path(configure: Configure) -> None:
    files = locate_cached(configure("model=tiny_llama", HUB))
    assert files.path is None and not files.is_here
    assert files.location() == "hf://someone/model: would be fetched"
    assert locate_for_plan(configure("model=tiny_llama", HUB, "dry_run=true")) == files
    with pytest.raises(ArtifactError, match="not in the cache"):
        locate_cached(configure("model=auto", HUB))


@pytest.mark.usefixtures("no_network")
def test_what_is_here_is_located_without_the_network(configure: Configure) -> None:
    config = configure("model=auto", LLAMA)
    assert locate_cached(config) == locate(config) == locate_for_plan(config)


@pytest.mark.parametrize(
    "line",
    [
        ["predict_data=the end"],
        ["predict_data=the end", "context.kernels=false"],
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
    parsed, header = [], gguf_metadata._Reader.header

    def counted(reader: gguf_metadata._Reader) -> gguf_metadata.GGUFHeader:
        parsed.append(reader._path)
        return header(reader)

    monkeypatch.setattr(gguf_metadata._Reader, "header", counted)
    assert main(["verbosity=0", "model=auto", "load_checkpoint=model.gguf", *line]) == 0
    assert parsed == [Path("model.gguf")]
