"""AutoTokenizer: calls, padding and decoding of one text and of several."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner import AutoModel, AutoTokenizer, LlamaTokenizer
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizer:
    return AutoTokenizer.from_pretrained("tiny_llama")


def test_one_text_and_several(tokenizer: PreTrainedTokenizer) -> None:
    assert tokenizer("ab") == {"input_ids": [97, 98], "attention_mask": [1, 1]}
    assert tokenizer(["ab", "c"])["input_ids"] == [[97, 98], [99]]
    assert tokenizer.encode("ab") == [97, 98]
    assert tokenizer(["ab"], return_tensors=None, add_special_tokens=False)["input_ids"] == [
        [97, 98]
    ]


def test_padding(tokenizer: PreTrainedTokenizer) -> None:
    padded = tokenizer(["ab", "c"], max_length=3, padding="max_length")
    assert padded["input_ids"] == [[97, 98, 258], [99, 258, 258]]
    assert padded["attention_mask"] == [[1, 1, 0], [1, 0, 0]]
    assert tokenizer(["ab", "c"], padding=True)["input_ids"] == [[97, 98], [99, 258]]
    cut = tokenizer("abcd", max_length=2, padding="max_length", truncation=True)
    assert cut["input_ids"] == [97, 98]
    array = tokenizer(["ab", "c"], padding=True, return_tensors="np")["input_ids"]
    assert array.dtype == np.int32 and array.shape == (2, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_length": 1, "padding": "max_length"}, "a text has 2 tokens"),
        ({"padding": "max_length"}, "needs a max_length"),
        ({"padding": "most"}, "padding: got 'most'"),
        ({"return_tensors": "np"}, "several lengths"),
        ({"return_tensors": "pt", "padding": True}, "return_tensors: got 'pt'"),
    ],
)
def test_what_cannot_be_padded(tokenizer: PreTrainedTokenizer, options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tokenizer(["ab", "c"], **options)


def test_decoding_one_and_several(tokenizer: PreTrainedTokenizer) -> None:
    assert tokenizer.decode([256, 97, 98]) == "<s>ab"
    assert tokenizer.decode([256, 97], skip_special_tokens=True) == "a"
    assert tokenizer.decode([[97], [98, 257]]) == ["a", "b</s>"]
    assert tokenizer.decode(np.array([[97, 98]])) == ["ab"]
    assert tokenizer.decode(np.array([97, 98])) == "ab"
    assert tokenizer.decode([]) == ""
    assert tokenizer.batch_decode([[97], []]) == ["a", ""]


def test_from_a_file(tmp_path, tokenizer: PreTrainedTokenizer) -> None:
    for name, text in byte_tokenizer().files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = LlamaTokenizer.from_pretrained(path)
        assert loaded.encode("é<s>") == tokenizer.encode("é<s>")
        assert loaded.pad_token_id == 258
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="no tokenizer in"):
        AutoTokenizer.from_pretrained(tmp_path / "empty")
    with pytest.raises(ConfigError, match="did you mean tiny_gpt2"):
        AutoTokenizer.from_pretrained("tiny_gpt")


def test_the_hub_gives_a_tokenizer_without_its_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: PreTrainedTokenizer,
    write_tiny_llama: Callable[..., Path],
) -> None:
    import huggingface_hub

    remote = write_tiny_llama("remote")
    for name, text in byte_tokenizer().files().items():
        (remote / name).write_text(text, encoding="utf-8")
    local = tmp_path / "snapshot"
    local.mkdir()

    def snapshot_download(repository: str, *, allow_patterns: list[str], **options: Any) -> str:
        for pattern in allow_patterns:
            for path in remote.glob(pattern):
                shutil.copy(path, local)
        return str(local)

    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_args, **_options: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = AutoTokenizer.from_pretrained("hf://owner/name")
    assert loaded.encode("é<s>") == tokenizer.encode("é<s>") and loaded.pad_token_id == 258
    assert (local / "config.json").is_file() and not (local / "model.safetensors").exists()
    AutoModel.from_pretrained("hf://owner/name")  # fetches the rest
    assert (local / "model.safetensors").is_file()
    (local / "config.json").unlink()
    (remote / "config.json").unlink()
    with pytest.raises(ArtifactError, match="holds no sizes of its model"):
        AutoTokenizer.from_pretrained("hf://owner/name")
