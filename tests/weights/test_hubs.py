from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path

import pytest

from lite_runner.errors import ArtifactError
from lite_runner.weights import hubs
from lite_runner.weights.hubs import HUBS, check_reachable, hugging_face_cache
from lite_runner.weights.source import fetch
from tests.download_server import Behaviour, serving

VARIABLES = {
    "hf": "HF_ENDPOINT",
    "ms": "MODELSCOPE_ENDPOINT",
    "modelscope": "MODELSCOPE_ENDPOINT",
    "modelers": "OPENMIND_HUB_ENDPOINT",
}
WEIGHTS = bytes(range(256)) * 1000
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "sub/deeper/x.gguf": b"GGUF"}
BLOCKED = "http://127.0.0.1:9"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    """A server of the hub that `use` names; the others are out of reach."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "theirs"))
    behaviour = Behaviour(repositories={"owner/name": FILES})
    with serving(behaviour):
        for variable in VARIABLES.values():
            monkeypatch.setenv(variable, BLOCKED)
        yield behaviour


def use(scheme: str, server: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES[scheme], server.address)


@pytest.mark.parametrize("scheme", VARIABLES)
def test_files_of_a_repository(
    scheme: str, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(scheme, server, monkeypatch)
    found = fetch(f"{scheme}://owner/name")
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "model.safetensors"]
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    blob = (found / "model.safetensors").readlink().name
    assert blob == hashlib.sha256(WEIGHTS).hexdigest()  # which was verified
    assert fetch(f"{scheme}://owner/name/sub/deeper/x.gguf").read_bytes() == b"GGUF"
    asked = len(server.files_asked)
    assert fetch(f"{scheme}://owner/name") == found and len(server.files_asked) == asked == 3
    monkeypatch.setenv(VARIABLES[scheme], BLOCKED)
    assert fetch(f"{scheme}://owner/name") == found  # without a network
    with pytest.raises(ArtifactError, match=f"://owner/other: .*{BLOCKED}"):
        fetch(f"{scheme}://owner/other")


@pytest.mark.parametrize("scheme", ["hf", "ms", "modelers"])
def test_a_broken_download_goes_on(
    scheme: str, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(scheme, server, monkeypatch)
    server.cut = 200_000
    found = fetch(f"{scheme}://owner/name")
    assert (found / "model.safetensors").read_bytes() == WEIGHTS
    assert server.sent == len(WEIGHTS) + len(b"{}")


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [("hf", "HF_TOKEN"), ("ms", "MODELSCOPE_API_TOKEN"), ("modelers", "OPENMIND_HUB_TOKEN")],
)
def test_a_token_goes_to_its_own_hub_alone(
    scheme: str, variable: str, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(scheme, server, monkeypatch)
    server.key = "Bearer secret"
    with pytest.raises(ArtifactError, match="401"):
        fetch(f"{scheme}://owner/name")
    for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "OPENMIND_HUB_TOKEN"):
        monkeypatch.setenv(name, "secret" if name == variable else "other")
    assert fetch(f"{scheme}://owner/name").is_dir()
    others = [hub for hub in HUBS.values() if hub.scheme != scheme]
    assert all("secret" not in str(hub.headers()) for hub in others)


def test_the_token_of_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert not HUBS["hf"].headers()
    (tmp_path / "token").write_text("kept\n")
    assert HUBS["hf"].headers() == {"Authorization": "Bearer kept"}


def test_the_cache_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hugging_face_cache() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert hugging_face_cache() == tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert hugging_face_cache() == tmp_path / "other"


def test_a_revision_that_modelscope_lacks(
    server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("ms", server, monkeypatch)
    with pytest.raises(ArtifactError, match="no files at revision v9"):
        fetch("ms://owner/name@v9")


@pytest.mark.parametrize("variable", ["MODELSCOPE_DOMAIN", "MODELSCOPE_ENDPOINT"])
def test_an_address_without_its_scheme(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODELSCOPE_ENDPOINT", raising=False)
    monkeypatch.setenv(variable, "www.modelscope.ai/")
    assert HUBS["ms"].endpoint == "https://www.modelscope.ai"


def test_a_firewall_that_drops_packets_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "CONNECT_SECONDS", 0.05)

    def never(*place: object) -> socket.socket:
        time.sleep(0.5)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", never)
    with pytest.raises(OSError, match=r"no connection within 0\.05 s"):
        check_reachable("https://huggingface.co")


def test_offline_by_hugging_faces_own_variable(
    server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("hf", server, monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ArtifactError, match="HF_HUB_OFFLINE is set"):
        fetch("hf://owner/name")
    assert not server.asked


@pytest.mark.parametrize(
    "path", ["../x.json", "a/../config.json", "/etc/x", "a//b", "a\\b", "a\nb", "."]
)
def test_a_path_that_leaves_the_folder_is_not_listed(path: str) -> None:
    assert not hubs._safe({path: hubs.HubFile("", None, "")})


@pytest.mark.parametrize(
    "answer", ["[]", "{}", '{"sha": "../x", "siblings": []}', '{"sha": "a", "siblings": [1]}', "<"]
)
def test_an_answer_that_is_none(
    answer: str, server: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("hf", server, monkeypatch)
    server.body = answer.encode()
    with pytest.raises(ArtifactError, match="could not be fetched"):
        fetch("hf://owner/name")


def test_a_listing_of_too_many_folders(server: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "MAX_FOLDERS", 3)
    files = {f"sub/{number}/x": b"" for number in range(5)}
    server.repositories = {"owner/name": files | {"sub/x.gguf": b"GGUF"}}
    use("modelers", server, monkeypatch)
    with pytest.raises(ArtifactError, match="more than 3 folders"):
        fetch("modelers://owner/name/sub/x.gguf")
    assert len(server.asked) == 2  # none of those folders


def test_a_listing_that_is_cut_short(server: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    use("hf", server, monkeypatch)

    def cut_short(*_: object) -> None:
        raise IncompleteRead(b"{")

    monkeypatch.setattr(hubs, "open_url", cut_short)
    with pytest.raises(ArtifactError, match=r"could not be fetched.*ended before the answer did"):
        fetch("hf://owner/name")
