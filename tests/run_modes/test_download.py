from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from lite_runner.app import main
from tests.download_server import Behaviour, serving
from tests.paths import REFERENCE, ROOT

ADAPTER = ROOT / "tests/fixtures/adapters/llama/all"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    """A hub with a model and an adapter; the cache is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "theirs"))
    folders = {"owner/name": REFERENCE / "llama", "owner/adapter": ADAPTER}
    repositories = {
        name: {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for name, folder in folders.items()
    }
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    repositories["owner/name"]["tokenizer.json"] = tokenizer.to_str().encode()
    behaviour = Behaviour(repositories=repositories)
    with serving(behaviour) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield behaviour


def test_runs_of_what_was_downloaded_need_no_network(
    hub: Behaviour,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["model=hf://owner/name", "adapter_path=hf://owner/adapter"]
    assert main(["run_mode=download", *words]) == 0
    stdout = capsys.readouterr().out
    assert (
        "ready" in stdout
        and f"of {(tmp_path / 'cache').resolve()}/hub/models--owner--adap" in stdout
    )
    assert not (tmp_path / "outputs").exists()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["run_mode=download", *words]) == 0
    assert capsys.readouterr().out == stdout


def test_a_dry_run_fetches_nothing(hub: Behaviour, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run_mode=download", "model=tiny_llama", "dry_run=true"]
    assert main([*words, "load_checkpoint=hf://owner/name"]) == 0
    stdout = capsys.readouterr().out
    assert "would be fetched" in stdout and "downloads" in stdout and "ready" not in stdout
    assert not hub.files_asked


def test_random_weights_are_nothing_to_download(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run_mode=download", "model=tiny_llama"]) == 2
    assert "model=tiny_llama has random weights" in capsys.readouterr().err
