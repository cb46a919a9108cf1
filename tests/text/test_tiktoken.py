"""GLM-4's and Llama 3's tokenizer.model, against tiktoken's algorithm as it is written down, a
tokenizer.json and a GGUF."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from lite_runner.errors import ArtifactError
from lite_runner.text import load_tokenizer
from lite_runner.text.spelling import byte_alphabet
from lite_runner.text.tokenizer import Tokenizer
from tests.paths import FIXTURES
from tests.tokenizer_files import write_tokenizer

WORDS = (  # as in the model's own code
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
NAMES += [f"<|{role}|>" for role in ("system", "user", "assistant", "observation")]
Ranks = dict[bytes, int]
LETTERS = byte_alphabet()


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """Learned from a text: the bytes, then what was merged, in this order."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, initial_alphabet=LETTERS)
    text = (FIXTURES / "text/lighthouse.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator([text, "aaaaaaaaaaaa 你好你好 1234 123 12"] * 3, trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    # In another order two tokens may merge in several ways, and tokens are whole words only.
    tokens = [bytes(map(LETTERS.index, text)) for text, _ in learned]
    tokens[300:] = reversed(tokens[300:])
    return {token: rank for rank, token in enumerate([*tokens, b"xyzzyx"])}


@pytest.fixture
def folder(tmp_path: Path, ranks: Ranks) -> Path:
    """As THUDM/glm-4-9b-chat is published, but for its template."""
    write_ranks(tmp_path, ranks)
    added = {str(len(ranks) + i): {"content": n, "special": True} for i, n in enumerate(NAMES)}
    write_config(tmp_path, tokenizer_class="ChatGLM4Tokenizer", added_tokens_decoder=added)
    return tmp_path


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def by_rank(ranks: Ranks, word: bytes) -> list[int]:
    """The ids of a word: the leftmost pair of the lowest rank is merged, until there is none."""
    if word in ranks:
        return [ranks[word]]
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        pairs = [(ranks.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [pair for pair in pairs if pair[0] is not None]
        if not known:
            return [ranks[part] for part in parts]
        _, at = min(known)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def expected(ranks: Ranks, text: str) -> list[int]:
    words = pre_tokenizers.Split(Regex(WORDS), "isolated").pre_tokenize_str(text)
    return [id for word, _ in words for id in by_rank(ranks, word.encode())]


def test_ids_are_those_of_the_ranks(folder: Path, ranks: Ranks, texts: list[str]) -> None:
    tokenizer = load_tokenizer(folder, model_vocab=None)
    prefix = [len(ranks) + 2, len(ranks) + 4]
    story = (FIXTURES / "text/lighthouse.txt").read_text(encoding="utf-8")
    for text in [*texts, story, story.upper(), "xyzzyx XYZZYX xyzzyxx", "a" * 57, "12345 it'S"]:
        ids = expected(ranks, text)
        assert tokenizer.encode(text, False) == ids
        assert tokenizer.encode(text) == prefix + ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == (len(ranks),) and tokenizer.pad_token_id == len(ranks)
    assert tokenizer.encode("<|user|>", False) == [len(ranks) + 7]


def test_chat(folder: Path, ranks: Ranks) -> None:
    """The roles of ChatGLM3, where the folder has no template."""
    tokenizer = load_tokenizer(folder, model_vocab=None)
    chat = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "metadata": "tool", "content": "f()"},
    ]
    first = len(ranks)
    assert tokenizer.encode_chat(chat) == [
        *(first + 2, first + 4),
        *(first + 6, *expected(ranks, "\nBe brief")),
        *(first + 7, *expected(ranks, "\nHi")),
        *(first + 8, *expected(ranks, "tool\nf()")),
        first + 8,
    ]
    with pytest.raises(ArtifactError, match="expected the roles system, user"):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])


def test_written_and_read_again(folder: Path, texts: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder, model_vocab=None)
    (tmp_path / "again").mkdir()
    write_tokenizer(tokenizer, tmp_path / "again")
    again = load_tokenizer(tmp_path / "again", model_vocab=None)
    for text in texts:
        assert again.encode(text) == tokenizer.encode(text)
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("pre", ["chatglm-bpe", "glm4"])
def test_the_same_as_a_gguf(
    pre: str, folder: Path, ranks: Ranks, texts: list[str], write_gguf: Callable[..., Path]
) -> None:
    """As llama.cpp writes one: no tokens are put before a prompt but by its template."""
    tokenizer = load_tokenizer(folder, model_vocab=None)
    content = json.loads(tokenizer.files()["tokenizer.json"])["model"]
    tokens = [*sorted(content["vocab"], key=content["vocab"].__getitem__), *NAMES]
    path = write_gguf(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[1] * len(ranks) + [3] * len(NAMES),
        merges=[" ".join(pair) for pair in content["merges"]],
        eos_token_id=len(ranks),
        eot_token_id=len(ranks) + 7,
    )
    found: Tokenizer = load_tokenizer(path, model_vocab=None)
    for text in [*texts, "12345 it'S"]:
        assert found.encode(text) == tokenizer.encode(text, False)
    assert found.eos_token_ids == (len(ranks), len(ranks) + 7)


def write_ranks(folder: Path, ranks: Ranks) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tokenizer.model").write_text("".join(lines), encoding="ascii")


def as_json(ranks: Ranks) -> tokenizers.Tokenizer:
    """As transformers converts a Llama 3: the two parts that a token's bytes merge to, by rank."""
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            parts = by_rank({one: id for one, id in ranks.items() if id < rank}, token)
            spelled = [list(ranks)[part] for part in parts]
            merges.append(tuple("".join(map(LETTERS.__getitem__, one)) for one in spelled))
    vocab = {"".join(map(LETTERS.__getitem__, token)): rank for token, rank in ranks.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_llama3_ids_are_those_of_the_ranks_and_of_a_tokenizer_json(
    ranks: Ranks, texts: list[str], tmp_path: Path
) -> None:
    learned = {token: rank for token, rank in ranks.items() if rank < 300}  # in merging order
    write_ranks(tmp_path, learned)
    added = {"300": {"content": "<|begin_of_text|>"}, "301": {"content": "<|end_of_text|>"}}
    write_config(tmp_path, added_tokens_decoder=added, eos_token="<|end_of_text|>")
    tokenizer, same = load_tokenizer(tmp_path, model_vocab=None), as_json(learned)
    story = (FIXTURES / "text/lighthouse.txt").read_text(encoding="utf-8")
    for text in [*texts, story, "a" * 57, "12345 it'S"]:
        ids = expected(learned, text)
        assert tokenizer.encode(text, False) == same.encode(text).ids == ids
        assert tokenizer.encode(text) == [300, *ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == (301,)


def test_llama3_ranks_without_other_files(tmp_path: Path) -> None:
    """As Meta publishes them: 128,000 ranks, then the special tokens of MindFormers' class."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([a, b]) for a in range(256) for b in range(256)]
    tokens += [b"abc" + bytes([a, b]) for a in range(243) for b in range(256)]
    write_ranks(tmp_path, {token: rank for rank, token in enumerate(tokens[:128_000])})
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model", model_vocab=128_256)
    assert tokenizer.vocab_size == 128_256
    names = {"<|begin_of_text|>": 0, "<|reserved_special_token_0|>": 2, "<|start_header_id|>": 6}
    names |= {"<|end_header_id|>": 7, "<|eot_id|>": 9, "<|reserved_special_token_250|>": 255}
    for name, place in names.items():
        assert tokenizer.encode(name, False) == [128_000 + place]
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 128_000
    assert tokenizer.eos_token_ids == (128_001, 128_009) and tokenizer.pad_token_id == 128_002


def test_invalid_vocabularies_are_refused(folder: Path) -> None:
    path = folder / "tokenizer.model"
    good = path.read_text(encoding="ascii")
    long = [
        f"{base64.b64encode(b'~' * length).decode()} {1000 + length}\n" for length in range(4, 1025)
    ]
    for text, message in (
        (good + "YQ== x\n", "is not a token in base64 and its rank"),
        (good + "YWI 900\n", "is not base64"),
        (good + "YQ== 900\n", "repeats a token"),
        (good + "cXFxcXE= 3\n", "two tokens have one rank"),
        (good + f"{base64.b64encode(b'a' * 1025).decode()} 900\n", "a token of 1025 bytes"),
        (good[good.index("\n") + 1 :], "no token for 1 of 256 bytes"),
        (good + "".join(long), "the splits of its tokens have 358,[0-9,]+ characters"),
    ):
        path.write_text(text, encoding="ascii")
        with pytest.raises(ArtifactError, match=message):
            load_tokenizer(folder, model_vocab=None)
    path.write_text(good, encoding="ascii")
    write_config(folder)
    with pytest.raises(ArtifactError, match=r"no token \[gMASK\] or <sop>") as caught:
        load_tokenizer(folder, model_vocab=None)
    assert "tokenizer_config.json" in caught.value.hint
