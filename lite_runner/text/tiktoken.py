"""tiktoken's ranks of byte sequences: the tokenizer.model of GLM-4 and of Llama 3."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode

import tokenizers
from tokenizers import models

from lite_runner.errors import ArtifactError
from lite_runner.text.gguf import byte_level_bpe
from lite_runner.text.spelling import byte_alphabet
from lite_runner.text.tokenizer import SpecialTokens, enclose, special_tokens
from lite_runner.text.tokenizer_cost import check_splits

_GLM4_PREFIX = ("[gMASK]", "<sop>")  # of every prompt
_LLAMA3_RANKS = 128_000  # of every Llama 3
_LLAMA3_ADDED = (  # with the ids behind the ranks, unless tokenizer_config.json lists others
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
# For a GLM-4 folder without a template: the roles of ChatGLM3.
_GLM4_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages -%}
{%- if message.role not in ('system', 'user', 'assistant', 'observation') -%}
{{ raise_exception('GLM-4: expected the roles system, user, assistant and observation') }}
{%- endif -%}
<|{{ message.role }}|>{{ message.metadata }}{{ '\\n' }}{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]{1,9}\r?")
_MOST_BYTES = 1024  # bytes of a token; all ways to split it in two are looked up
_ALPHABET = byte_alphabet()


def is_ranks(data: bytes) -> bool:
    """True for a file of tokens with ranks, rather than a sentencepiece model."""
    return _LINE.fullmatch(data.partition(b"\n")[0]) is not None


def read_ranks(data: bytes, source: str) -> tokenizers.Tokenizer:
    """The byte-level BPE of such a file; a token's id is its rank.

    The two neighbours whose union has the lowest rank are merged first, and a word that is a token
    is not cut at all. Raises ArtifactError naming `source`.
    """
    ranks = _ranks(data, source)
    vocab = {_spelled(token): rank for token, rank in ranks.items()}
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ArtifactError(f"{source}: no token for {len(missing)} of 256 bytes")
    check_splits(ranks, source)
    # GLM-4 has the same pre-tokenizer.
    return byte_level_bpe(models.BPE(vocab, _merges(ranks), ignore_merges=True), "llama3")


def add_special_tokens(
    backend: tokenizers.Tokenizer, source: str
) -> tuple[SpecialTokens, str | None]:
    """Add what the model's own code adds to the ranks and to the tokens of tokenizer_config.json;
    the defaults of special tokens and of the chat template.

    Raises ArtifactError naming `source` where the model is neither a GLM-4 nor a Llama 3.
    """
    absent = [token for token in _GLM4_PREFIX if backend.token_to_id(token) is None]
    if not absent:
        enclose(backend, _GLM4_PREFIX, (), source=source)
        return SpecialTokens(eos=("<|endoftext|>",), pad="<|endoftext|>"), _GLM4_TEMPLATE
    listed = backend.token_to_id(_LLAMA3_ADDED[0]) is not None
    if not listed and backend.get_vocab_size() != _LLAMA3_RANKS:
        raise ArtifactError(
            f"{source}: tiktoken's ranks, and no token {' or '.join(absent)} in"
            " tokenizer_config.json: neither a GLM-4's nor a Llama 3's, of which alone such a file"
            " is read",
            "put the model's own tokenizer_config.json beside it, or give its tokenizer.json",
        )
    if not listed:
        backend.add_special_tokens(special_tokens(_LLAMA3_ADDED))
    bos, *eos, pad = (
        one if backend.token_to_id(one) is not None else None
        for one in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", _LLAMA3_ADDED[2])
    )
    return SpecialTokens(bos, tuple(one for one in eos if one), pad, add_bos=True), None


def _ranks(data: bytes, source: str) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for number, line in enumerate(data.rstrip().split(b"\n"), 1):
        if not _LINE.fullmatch(line):
            raise ArtifactError(f"{source}: line {number} is not a token in base64 and its rank")
        text, rank = line.split()
        try:
            token = b64decode(text, validate=True)
        except binascii.Error as error:
            raise ArtifactError(f"{source}: line {number} is not base64: {error}") from error
        if len(token) > _MOST_BYTES:
            raise ArtifactError(
                f"{source}: line {number} is a token of {len(token)} bytes, at most {_MOST_BYTES}"
                " are expected"
            )
        found[token] = int(rank)
        if len(found) < number:
            raise ArtifactError(f"{source}: line {number} repeats a token")
    if len({*found.values()}) < len(found):
        raise ArtifactError(f"{source}: two tokens have one rank")
    return found


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Every way to split a token into two others, by the token's rank."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:place], token[place:]) for place in range(1, len(token)))
        both = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        both.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_spelled(left), _spelled(right)) for left, right in both]
    return merges


def _spelled(token: bytes) -> str:
    return "".join(map(_ALPHABET.__getitem__, token))
