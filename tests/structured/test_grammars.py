"""Grammars over vocabularies of other kinds than the byte tokenizer's."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers

from lite_runner.structured.grammars import GrammarError, Grammars, of_regex, repeats
from lite_runner.text.spelling import SPACE, sentencepiece_decoder
from lite_runner.text.tokenizer import SpecialTokens, Tokenizer, byte_tokenizer
from tests.each import each


def spaced_tokenizer() -> Tokenizer:
    """As sentencepiece's: each text begins with a space, and bytes are tokens of last resort."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [SPACE, "P", "a", "r", "i", "s", "Pa", "Par", "Paris", f"{SPACE}P", f"{SPACE}Paris"]
    merges = [("P", "a"), ("Pa", "r"), (SPACE, "P")]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    backend.decoder = sentencepiece_decoder(strips_space=True)
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, SpecialTokens(eos=("</s>",)), source="a test's tokenizer")


@each("pattern", ["Paris", "Paris|Par Paris", "a{3} Paris", "é Paris"])
@each("kind", [spaced_tokenizer, byte_tokenizer])
def test_every_way_through_the_masks_is_a_text_of_the_grammar(kind: object, pattern: str) -> None:
    tokenizer = kind()  # type: ignore[operator]
    (end,) = tokenizer.eos_token_ids
    vocab = tokenizer.vocab_size + 5  # an embedding may have more rows
    make = Grammars(tokenizer, vocab, (end, 99_999)).compile(of_regex(pattern, "guided_regex"))
    random, texts = np.random.default_rng(1), set()
    for _ in range(30):
        guide, ids = make(), []
        while not ids or ids[-1] != end:
            scores = np.zeros(vocab, np.float32)
            guide.mask(scores)
            ids.append(int(random.choice(np.flatnonzero(scores == 0))))
            guide.take(ids[-1])
        texts.add(tokenizer.decode(ids))
    assert texts == {text.replace("a{3}", "aaa") for text in pattern.split("|")}


def test_missing_tokens_of_a_vocabulary_are_reported() -> None:
    grammar = of_regex("a", "guided_regex")
    with pytest.raises(GrammarError, match=r"guided_regex: not supported: .* has no end token"):
        Grammars(byte_tokenizer(), 259, ()).compile(grammar)
    tokenizer = byte_tokenizer()
    tokenizer.spelling = None
    with pytest.raises(GrammarError, match="does not spell tokens in bytes"):
        Grammars(tokenizer, 259, (257,)).compile(grammar)


def test_repeats_of_a_pattern() -> None:
    counts = {
        "a": 1,
        "(a{3}){4}b": 12,
        "((a{100}){100}){100}": 10**6,
        "[{2}]{5}": 5,
        r"\{3}": 1,
        "a{2}{3}": 6,
        "a{2,}": 2,
        "(a{ 50 }){ 5 , 60 }": 3000,
        "(a{5}[[b])]){6}[[a](]": 30,
        "(a{9}|b){2}(c{4})": 18,
        "(a{5})*{3}": 15,
        "(": 1,
        ")": 1,
    }
    assert {pattern: repeats(pattern) for pattern in counts} == counts
