from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lite_runner.errors import ArtifactError
from lite_runner.weights.checkpoint import config_folder
from lite_runner.weights.repository import Repository
from lite_runner.weights.source import cached, fetch, weights_to_fetch
from tests.download_server import COMMIT, Behaviour, serving
from tests.each import each

GGUFS = [
    "README.md",
    "mmproj-F16.gguf",
    "name-Q4_0.gguf",
    "name.Q4_K_M.gguf",
    "name-UD-Q4_K_XL.gguf",
    "Q8_0/name-Q8_0-00001-of-00002.gguf",
    "Q8_0/name-Q8_0-00002-of-00002.gguf",
    "BF16/name-00001-of-00001.gguf",
]


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache of owner/name."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "theirs"))
    return tmp_path / "theirs" / "models--owner--name"


@pytest.fixture
def hub(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    behaviour = Behaviour(repositories={"owner/name": {name: name.encode() for name in GGUFS}})
    with serving(behaviour) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield behaviour


@each(
    ("names", "needed"),
    [
        (["model.safetensors", "model.fp16.safetensors", "x.py"], ["model.safetensors"]),
        (
            ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "x.safetensors"],
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors"],
        ),
        (
            ["gptq_model-4bit-128g.safetensors", "quantize_config.json"],
            ["quantize_config.json", "gptq_model-4bit-128g.safetensors"],
        ),
        (["pytorch_model.bin", "training_args.bin", "name.gguf"], ["pytorch_model.bin"]),
        (
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
        ),
        (["name.ckpt", "config.json"], ["config.json", "name.ckpt"]),
        (
            ["model.safetensors", "quantization.json", "config.json"],
            ["config.json", "quantization.json", "model.safetensors"],
        ),
        (
            ["m.ckpt", "m.ckpt.files/config.json", "x/config.json"],
            ["m.ckpt.files/config.json", "m.ckpt"],
        ),
        (
            ["shard-1.safetensors", "shard-2.safetensors", "model.safetensors.index.json"],
            ["model.safetensors.index.json", "shard-1.safetensors", "shard-2.safetensors"],
        ),
        (["x-00001-of-00000.gguf"], ["x-00001-of-00000.gguf"]),
        (["name.gguf", "config.json"], ["name.gguf"]),
        (
            ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"],
            ["adapter_config.json", "adapter_model.safetensors"],
        ),
        (GGUFS, ["name.Q4_K_M.gguf"]),
    ],
)
def test_needed_files(names: list[str], needed: list[str]) -> None:
    assert Repository("owner/name").needed(names, weights=True) == needed


def test_a_tokenizer_needs_only_weights_that_contain_it() -> None:
    names = ["config.json", "tokenizer.json", "model.safetensors"]
    repository = Repository("owner/name")
    assert repository.needed(names, weights=False) == names[:2]
    assert repository.needed([*names[:2], "x.gguf"], weights=False) == names[:2]
    assert repository.needed(["config.json", "x.gguf"], weights=False) == ["x.gguf"]


@pytest.mark.parametrize(
    ("quantization", "needed"),
    [
        ("Q4_K_M", GGUFS[3:4]),
        ("q4_0", GGUFS[2:3]),
        ("Q8_0", GGUFS[5:7]),
        ("BF16", GGUFS[7:]),
        ("UD-Q4_K_XL", GGUFS[4:5]),
        ("Q4_K_XL", GGUFS[4:5]),
    ],
)
def test_a_quantization(quantization: str, needed: list[str]) -> None:
    found = Repository("owner/name", quantization=quantization).needed(GGUFS, weights=True)
    assert found == needed


@pytest.mark.parametrize(
    ("repository", "names", "error"),
    [
        (Repository("a/b"), ["README.md"], "no weights that can be read .* it has README.md"),
        (Repository("a/b"), ["x.safetensors", "y.safetensors"], "2 files of weights: x.safet"),
        (Repository("a/b", quantization="Q3_K"), GGUFS, r"a/b: it has no GGUF files of Q3_K"),
        (Repository("a/b"), ["x-Q2_K.gguf", "x-Q8_0.gguf"], "no GGUF files of Q4_K_M"),
        (Repository("a/b", quantization="K_M"), GGUFS, "no GGUF files of K_M"),
        (Repository("a/b", file="z.gguf"), GGUFS, "has no such file"),
        (Repository("a/b", quantization="Q8_0"), GGUFS[:6], "lacks Q8_0/name-Q8_0-00002-of"),
    ],
)
def test_missing_files(repository: Repository, names: list[str], error: str) -> None:
    names = [name for name in names if repository.quantization != "K_M" or "Q4_K_M" not in name]
    with pytest.raises(ArtifactError, match=error) as caught:
        repository.needed(names, weights=True)
    assert caught.value.exit_code == 4


def test_a_quantization_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ArtifactError) as caught:
        Repository("a/b", quantization="Q3_K").needed(GGUFS, weights=True)
    assert caught.value.hint.startswith("choose a quantization, hf://a/b:")
    assert "Q4_K_M" in caught.value.hint and "Q8_0" in caught.value.hint


def test_a_split_quantization_is_fetched_whole(hub: Behaviour) -> None:
    found = fetch("hf://owner/name:Q8_0")
    assert found.name == "name-Q8_0-00001-of-00002.gguf" and len(hub.files_asked) == 2
    assert found.with_name("name-Q8_0-00002-of-00002.gguf").read_bytes() == GGUFS[6].encode()
    assert cached("hf://owner/name:Q8_0") == found and cached("hf://owner/name:Q4_0") is None
    assert fetch("hf://owner/name/Q8_0/name-Q8_0-00002-of-00002.gguf") == found
    assert weights_to_fetch("hf://owner/name:Q4_0") is None  # its bytes do not tell


def test_a_file_and_what_is_beside_it(hub: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("m.ckpt", "m.ckpt.files/config.json", "n.safetensors", "config.json")
    hub.repositories = {"owner/name": dict.fromkeys(files, b"{}")}
    uri = "hf://owner/name/m.ckpt"
    found = fetch(uri, weights=False)
    assert config_folder(found) == found.with_name("m.ckpt.files")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch(uri, weights=False) == found == cached(uri, weights=False)
    assert cached(uri) is None and not found.exists()
    with pytest.raises(ArtifactError, match="could not be fetched"):
        fetch(uri)


def test_a_repository_without_what_a_tokenizer_needs(hub: Behaviour) -> None:
    hub.repositories = {"owner/name": {"model.safetensors": b"x"}}
    found = fetch("hf://owner/name", weights=False)
    assert found.is_dir() and not list(found.iterdir())
    assert cached("hf://owner/name", weights=False) is None


def test_equal_files_are_downloaded_once(hub: Behaviour) -> None:
    hub.repositories = {"owner/name": {"config.json": b"{}", "tokenizer_config.json": b"{}"}}
    found = fetch("hf://owner/name", weights=False)
    assert len(hub.files_asked) == 1 and len(list(found.iterdir())) == 2


def test_a_tokenizer_of_a_gguf(hub: Behaviour, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch("hf://owner/name", weights=False).name == "name.Q4_K_M.gguf"
    assert "hf://owner/name: name.Q4_K_M.gguf, of 5 GGUF files" in capsys.readouterr().err


def test_files_of_hugging_faces_cache_are_not_downloaded(hub: Behaviour, theirs: Path) -> None:
    (theirs / "blobs").mkdir(parents=True)
    content = b"weights"
    hub.repositories = {"owner/name": {"config.json": b"{}", "model.safetensors": content}}
    digest = hashlib.sha256(content).hexdigest()
    (theirs / "blobs" / digest).write_bytes(content)
    found = fetch("hf://owner/name")
    assert (found / "model.safetensors").resolve() == theirs / "blobs" / digest
    assert len(hub.files_asked) == 1
    (theirs / "blobs" / digest).unlink()
    assert fetch("hf://owner/name") == found and (found / "model.safetensors").is_file()
    assert len(hub.files_asked) == 2


def test_a_damaged_file_of_hugging_faces_cache_is_downloaded(hub: Behaviour, theirs: Path) -> None:
    (theirs / "blobs").mkdir(parents=True)
    hub.repositories = {"owner/name": {"model.safetensors": b"weights"}}
    (theirs / "blobs" / hashlib.sha256(b"weights").hexdigest()).write_bytes(b"weighty")
    found = fetch("hf://owner/name") / "model.safetensors"
    assert found.read_bytes() == b"weights" and theirs not in found.resolve().parents


def test_without_a_network_hugging_faces_cache_will_do(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    snapshot = theirs / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (theirs / "refs").mkdir()
    (theirs / "refs" / "main").write_text(COMMIT)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ArtifactError, match="could not be fetched"):
        fetch("hf://owner/name")  # a shard is not there yet
    (snapshot / "model-2.safetensors").touch()
    assert fetch("hf://owner/name") == snapshot.resolve()
