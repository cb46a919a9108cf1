"""AutoTokenizer: calls, padding and decoding of one text and of several."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from lite_runner import AutoModel, AutoProcessor, AutoTokenizer, GPT2TokenizerFast, LlamaTokenizer
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.weights.repository import Repository
from tests.tokenizer_files import write_tokenizer


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
    ("options", "message"),
    [
        ({"max_length": 1, "padding": "max_length"}, "a text has 2 tokens"),
        ({"padding": "max_length"}, "needs a max_length"),
        ({"max_length": -1, "truncation": True}, "max_length: got -1, expected an integer >= 0"),
        ({"max_length": "3", "truncation": True}, "max_length: got '3', expected an integer >= 0"),
        ({"padding": "most"}, "padding: got 'most'"),
        ({"return_tensors": "np"}, "different lengths"),
        ({"return_tensors": "pt", "padding": True}, "return_tensors: got 'pt'"),
    ],
)
def test_invalid_padding(tokenizer: PreTrainedTokenizer, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenizer(["ab", "c"], **options)


def test_what_a_script_sets_is_followed() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny_llama", eos_token=None)
    tokenizer.pad_token = "</s>"
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{{ messages[0].content }}!"
    assert tokenizer(["ab", "c"], padding=True)["input_ids"] == [[97, 98], [257, 99]]
    chat = [{"role": "user", "content": "a"}]
    ids = tokenizer.apply_chat_template(chat, add_special_tokens=True)
    assert ids == [97, 33] == tokenizer.core.encode_chat(chat)
    for name, value in (("padding_side", "lft"), ("pad_token", "<no>")):
        with pytest.raises(ConfigError, match=f"{name}: "):
            setattr(tokenizer, name, value)


def test_decoding_one_and_several(tokenizer: PreTrainedTokenizer) -> None:
    assert tokenizer.decode([256, 97, 98]) == "<s>ab"
    assert tokenizer.decode([256, 97], skip_special_tokens=True) == "a"
    assert tokenizer.decode([[97], [98, 257]]) == ["a", "b</s>"]
    assert tokenizer.decode(np.array([[97, 98]])) == ["ab"]
    assert tokenizer.decode(np.array([97, 98])) == "ab"
    assert tokenizer.decode([]) == ""
    assert tokenizer.batch_decode([[97], []]) == ["a", ""]


def test_from_a_file(tmp_path, tokenizer: PreTrainedTokenizer) -> None:
    write_tokenizer(byte_tokenizer(), tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = LlamaTokenizer.from_pretrained(path)
        assert loaded.encode("é<s>") == tokenizer.encode("é<s>")
        assert loaded.pad_token_id == 258
        named = GPT2TokenizerFast(vocab_file=str(path))
        assert isinstance(named, PreTrainedTokenizer) and named("é")["input_ids"] == [195, 169]
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
    remote = write_tiny_llama("remote")
    write_tokenizer(byte_tokenizer(), remote)
    local = tmp_path / "snapshot"
    local.mkdir()

    def fetch(repository: Repository, *, weights: bool) -> Path:
        for name in repository.needed([path.name for path in remote.iterdir()], weights=weights):
            shutil.copy(remote / name, local)
        return local

    monkeypatch.setattr(Repository, "fetch", fetch)
    loaded = AutoTokenizer.from_pretrained("hf://owner/name")
    assert loaded.encode("é<s>") == tokenizer.encode("é<s>") and loaded.pad_token_id == 258
    assert (local / "config.json").is_file() and not (local / "model.safetensors").exists()
    AutoModel.from_pretrained("hf://owner/name")  # fetches the rest
    assert (local / "model.safetensors").is_file()
    (local / "config.json").unlink()
    (remote / "config.json").unlink()
    with pytest.raises(ArtifactError, match="holds no sizes of its model"):
        AutoTokenizer.from_pretrained("hf://owner/name")


def test_a_processor_has_the_tokenizer() -> None:
    processor = AutoProcessor.from_pretrained("tiny_llama")
    assert processor.tokenizer("ab") == AutoTokenizer.from_pretrained("tiny_llama")("ab")


CHAT = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_variables_and_tools_of_a_chat_template(tokenizer: PreTrainedTokenizer) -> None:
    template = "{{ tools[0].name }} {% if enable_thinking is false %}no{% endif %}"
    asked: dict[str, Any] = {"chat_template": template, "tools": [{"name": "f"}]}
    found = tokenizer.apply_chat_template(CHAT, tokenize=False, enable_thinking=False, **asked)
    assert found == "f no"
    ids = tokenizer.apply_chat_template(
        CHAT, enable_thinking=True, max_length=9, padding="max_length", **asked
    )
    assert len(ids) == 9 and tokenizer.decode(ids, skip_special_tokens=True) == "f "
    with pytest.raises(ConfigError, match="does not read 'thinking'"):
        tokenizer.apply_chat_template(CHAT, thinking=False, **asked)


def test_chat_templates(tokenizer: PreTrainedTokenizer, tmp_path: Path) -> None:
    text = "<s>user: Hi</s>"
    shown = tokenizer.apply_chat_template(CHAT, TEMPLATE, tokenize=False)
    assert shown == text
    ids = tokenizer.apply_chat_template(CHAT, chat_template=TEMPLATE)
    assert ids == tokenizer.encode(text, add_special_tokens=False) and ids[0] == 256
    asked = {"chat_template": TEMPLATE, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, **asked)
    assert prompt == text + "assistant:"
    tensor = tokenizer.apply_chat_template(CHAT, return_tensors="ms", **asked)
    assert isinstance(tensor, ms.Tensor) and tensor.shape == (1, len(prompt.encode()) - 5)
    both = tokenizer.apply_chat_template([CHAT, CHAT], tokenize=False, **asked)
    assert both == [prompt, prompt]
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    own = AutoTokenizer.from_pretrained(tmp_path)
    assert own.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False) == prompt
    with pytest.raises(ConfigError, match="has no chat template"):
        tokenizer.apply_chat_template(CHAT)
    with pytest.raises(ConfigError, match="expected a list of messages"):
        own.apply_chat_template("Hi")


def test_tensors_and_what_comes_with_the_ids(tokenizer: PreTrainedTokenizer) -> None:
    found = tokenizer(["ab", "c"], padding=True, return_tensors="ms", return_token_type_ids=True)
    assert found.input_ids.dtype == ms.int32 and found["input_ids"].shape == (2, 2)
    assert found.attention_mask.asnumpy().tolist() == [[1, 1], [1, 0]]
    assert not found["token_type_ids"].asnumpy().any()
    assert tokenizer("ab", return_attention_mask=False) == {"input_ids": [97, 98]}
    assert tokenizer.encode("ab", return_tensors="np").tolist() == [[97, 98]]
    assert tokenizer.encode_plus("ab") == tokenizer.batch_encode_plus(["ab"], padding=True) | {
        "input_ids": [97, 98],
        "attention_mask": [1, 1],
    }
    for ids in (found["input_ids"], [found["input_ids"][0], found["input_ids"][1]]):
        assert tokenizer.decode(ids, skip_special_tokens=True) == ["ab", "c"]
    assert tokenizer.decode(ms.Tensor([97, 98])) == "ab" and tokenizer.decode(97) == "a"
    assert tokenizer.decode([np.int32(97)]) == "a"
    assert tokenizer.decode(list(b"so , it 's"), clean_up_tokenization_spaces=True) == "so, it's"


def test_tokens_and_ids(tokenizer: PreTrainedTokenizer, tmp_path: Path) -> None:
    assert tokenizer.convert_tokens_to_ids("<s>") == 256
    assert tokenizer.convert_tokens_to_ids(["a", "</s>", "nothing"]) == [97, 257, None]
    assert tokenizer.convert_ids_to_tokens(97) == "a"
    ids = ms.Tensor([256, 97])
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "a"]
    assert tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True) == ["a"]
    assert tokenizer.convert_tokens_to_string(["<s>", "a", "b"]) == "<s>ab"
    assert tokenizer.all_special_tokens == ["<s>", "</s>", "<pad>"]
    assert tokenizer.special_tokens_map == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    assert tokenizer.get_vocab()["a"] == 97
    for ids in ([-1], [1 << 40]):
        with pytest.raises(ConfigError, match="expected one from 0 on"):
            tokenizer.decode(ids)
        with pytest.raises(ConfigError, match="expected one from 0 on"):
            tokenizer.convert_ids_to_tokens(ids)
    with pytest.raises(ConfigError, match="got the id 5000"):
        tokenizer.convert_ids_to_tokens(5000)
    paths = tokenizer.save_pretrained(tmp_path / "saved")
    assert [Path(path).name for path in paths] == ["tokenizer.json", "tokenizer_config.json"]
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("é") == tokenizer("é")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_pair": "x"}, "text_pair='x' is not available"),
        ({"return_offsets_mapping": True}, "return_offsets_mapping=true is not available"),
        ({"truncation": "some"}, "truncation: got 'some'"),
        ({"paddin": True}, "paddin: a tokenizer has no such argument"),
    ],
)
def test_unavailable_call_arguments(
    tokenizer: PreTrainedTokenizer, options: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenizer("ab", **options)
