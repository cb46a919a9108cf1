"""MindFormers' names of tokenizers: from names, files and folders, and by their constructors."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from lite_runner import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BloomTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    LlamaTokenizerFast,
    Qwen2Tokenizer,
)
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint
from tests.tokenizer_files import write_tokenizer

TEXTS = ["I love Beijing, because", " two  spaces", "中国的首都是", "it's 1234\n", ""]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.model as Llama's, made by sentencepiece."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=written,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    file = tmp_path_factory.mktemp("llama") / "tokenizer.model"
    file.write_bytes(written.getvalue())
    return file


@pytest.fixture(scope="module")
def vocab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt as GPT-2's."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS * 20, vocab_size=300, special_tokens=["<|endoftext|>"])
    folder = tmp_path_factory.mktemp("gpt2")
    trained.save_model(str(folder))
    return folder


def test_llama_by_file_and_by_constructor(model_file: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    for ours in (
        LlamaTokenizer.from_pretrained(model_file),
        LlamaTokenizer(str(model_file)),
        LlamaTokenizerFast(vocab_file=str(model_file), add_bos_token=True, legacy=True),
    ):
        assert isinstance(ours, PreTrainedTokenizer)
        for text in TEXTS:
            assert ours(text)["input_ids"] == [1, *library.encode(text)]
            assert ours.decode(ours.encode(text), skip_special_tokens=True) == text
        assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<s>", "</s>", "<unk>")
        assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)
        assert (ours.pad_token_id, ours.pad_token) == (0, "<unk>")  # as MindFormers' own
        assert ours.vocab_size == len(ours) == 330
        assert ours.tokenize("I love") == library.encode("I love", out_type=str)
    assert isinstance(LlamaTokenizer.from_pretrained(model_file), LlamaTokenizer)
    bare = LlamaTokenizer(model_file, add_bos_token=False, add_eos_token=True, pad_token="</s>")
    assert bare("I")["input_ids"] == [*library.encode("I"), 2] and bare.pad_token_id == 2


def test_gpt2_of_a_vocabulary_and_merges(vocab_folder: Path) -> None:
    library = tokenizers.ByteLevelBPETokenizer.from_file(
        str(vocab_folder / "vocab.json"), str(vocab_folder / "merges.txt")
    )
    by_files = GPT2Tokenizer(str(vocab_folder / "vocab.json"), str(vocab_folder / "merges.txt"))
    for ours in (by_files, GPT2Tokenizer.from_pretrained(vocab_folder)):
        for text in TEXTS:
            assert ours(text)["input_ids"] == library.encode(text).ids
            assert ours.decode(ours.encode(text)) == text
        assert ours("a<|endoftext|>")["input_ids"][-1] == ours.eos_token_id == 0
        assert ours.bos_token == ours.pad_token == "<|endoftext|>"
    with pytest.raises(ConfigError, match=r"expected merges.txt beside"):
        GPT2Tokenizer(vocab_folder / "vocab.json", "elsewhere/merges.txt")


def test_qwen2_splits_otherwise(vocab_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "qwen2"
    folder.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text((vocab_folder / name).read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    ours = Qwen2Tokenizer(folder / "vocab.json", folder / "merges.txt")
    assert ours.bos_token is None and ours.pad_token == ours.eos_token == "<|endoftext|>"
    assert len(ours.tokenize("1234")) == 4  # a digit a token, whatever merges there are
    assert ours("<|im_start|>")["input_ids"] == [ours.vocab_size - 2]
    assert ours.decode(ours.encode("中国 it's 1234\n")) == "中国 it's 1234\n"
    (folder / "merges.txt").unlink()
    with pytest.raises(ArtifactError, match=r"no merges.txt beside it"):
        Qwen2Tokenizer(folder / "vocab.json")


def test_settings_of_a_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(byte_tokenizer(), tmp_path)
    tokenizer = BloomTokenizer.from_pretrained(tmp_path, padding_side="left", pad_token="</s>")
    assert tokenizer(["abc", "d"], padding=True)["input_ids"] == [[97, 98, 99], [257, 257, 100]]
    assert tokenizer(["abc", "d"], padding=True)["attention_mask"][1] == [0, 0, 1]
    short = AutoTokenizer.from_pretrained(tmp_path, model_max_length=2, use_fast=True)
    assert short("abc", truncation=True)["input_ids"] == [97, 98]
    with pytest.raises(ConfigError, match="did you mean pad_token"):
        AutoTokenizer.from_pretrained(tmp_path, pad_tokn="</s>")
    with pytest.raises(ConfigError, match="legacy=false is not supported"):
        AutoTokenizer.from_pretrained(tmp_path, legacy=False)
    with pytest.raises(ArtifactError, match="'<x>' is not in the vocabulary"):
        AutoTokenizer.from_pretrained(tmp_path, pad_token="<x>")
    with pytest.raises(ConfigError, match="padding_side: got 'up'"):
        AutoTokenizer.from_pretrained(tmp_path, padding_side="up")
    with pytest.raises(ConfigError, match="no vocab_file given"):
        BloomTokenizer()


def test_a_name_is_served_from_checkpoint_download(model_file: Path, tmp_path: Path) -> None:
    """As the documents say: nothing is fetched, with the tokenizer alone and with weights."""
    folder = tmp_path / "checkpoint_download/llama2"
    folder.mkdir(parents=True)
    shutil.copy(model_file, folder / "tokenizer.model")
    ids = LlamaTokenizer(str(model_file))(TEXTS)["input_ids"]
    for kind in (AutoTokenizer, LlamaTokenizer):
        assert kind.from_pretrained("llama2_7b")(TEXTS)["input_ids"] == ids
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 330}
    config = AutoConfig.from_pretrained("llama2_7b", **sizes, intermediate_size=32)
    model = config.run_config().model_config()
    assert model is not None
    write_ckpt(folder / "llama2_7b.ckpt", random_checkpoint(model, seed=3))
    rows = []
    for weights in ({}, {"checkpoint_name_or_path": folder / "llama2_7b.ckpt"}):
        network = AutoModel.from_pretrained(
            "llama2_7b", **sizes, intermediate_size=32, compute_dtype="float32", **weights
        )
        rows.append(network.generate(ids[0], max_new_tokens=4, eos_token_id=[]))
        assert network.tokenizer(TEXTS)["input_ids"] == ids
    assert rows[0] == rows[1] and len(rows[0][0]) == len(ids[0]) + 4
