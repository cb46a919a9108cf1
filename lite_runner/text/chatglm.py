"""The tokenizers of ChatGLM2 and ChatGLM3, with special tokens behind the pieces of a sentencepiece
model, and of ChatGLM-6B, where pieces spell line breaks, tabs and runs of spaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from lite_runner.errors import ArtifactError
from lite_runner.text.chatglm_chat import PREFIX, ROLES, ChatForm, role_tag
from lite_runner.text.sentencepiece import Vocabulary, build_tokenizer
from lite_runner.text.spelling import (
    CHATGLM_SPELLING,
    LONGEST_RUN,
    SPACE,
    PieceType,
    chatglm_decoder,
)
from lite_runner.text.tokenizer import SpecialTokens, enclose, special_tokens

_ADDED = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *map(role_tag, ROLES))
DEFAULTS = SpecialTokens(eos=("</s>",), pad="<unk>", unk="<unk>")
ENDING_6B = ("[gMASK]", "<sop>")
_PIECES_6B = {"<n>", "<|tab|>", "<|blank_2|>", "<eop>", "<pad>", *ENDING_6B}
SPECIAL_6B = SpecialTokens(bos="<sop>", eos=("<eop>",), pad="<pad>", unk="<unk>")
# Runs of spaces spell themselves, except the longest, which is matched first.
_RUNS = {f"<|blank_{count}|>": " " * count for count in range(2, LONGEST_RUN)}
# The first query is the prompt as it is; later ones follow the rounds before.
TEMPLATE_6B = """\
{%- if messages | length == 1 and messages[0].role == 'user' -%}
{{ messages[0].content }}
{%- else -%}
{%- for message in messages -%}
{%- if message.role == 'user' and loop.index0 % 2 == 0 -%}
[Round {{ loop.index0 // 2 }}]\n问\uff1a{{ message.content }}\n答\uff1a
{%- elif message.role == 'assistant' and loop.index0 % 2 == 1 -%}
{{ message.content }}{{ '\\n' }}
{%- else -%}
{{ raise_exception('ChatGLM-6B: expected user and assistant in turns, and no system') }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
[gMASK]<sop>"""


def add_tokens(backend: tokenizers.Tokenizer, source: str) -> None:
    """Add the special tokens, and the two that every prompt begins with.

    Raises ArtifactError naming `source` where other tokens have their ids.
    """
    first = backend.get_vocab_size(with_added_tokens=False)
    backend.add_special_tokens(special_tokens(_ADDED))
    for id, token in enumerate(_ADDED, first):
        if backend.token_to_id(token) != id:
            raise ArtifactError(
                f"{source}: {token} has the id {backend.token_to_id(token)}, expected {id} behind "
                f"the {first} pieces: not the tokenizer of a ChatGLM2 or ChatGLM3"
            )
    enclose(backend, PREFIX, (), source=source)


def with_ends(special: SpecialTokens, form: ChatForm) -> SpecialTokens:
    """A ChatGLM3 also ends its turn by opening another's."""
    if form == "chatglm2":
        return special
    others = (role_tag("user"), role_tag("observation"))
    return replace(special, eos=(*special.eos, *(one for one in others if one not in special.eos)))


def is_chatglm_6b(vocabulary: Vocabulary) -> bool:
    """True if its pieces are those of ChatGLM-6B's ice_text.model."""
    return set(vocabulary.pieces) >= _PIECES_6B


def build_6b(vocabulary: Vocabulary, *, source: str) -> tokenizers.Tokenizer:
    """The tokenizer of such a vocabulary. Raises ArtifactError naming `source`."""
    pieces = [_RUNS.get(piece, piece) for piece in vocabulary.pieces]
    # As pieces of their own they are matched in the normalized text, and no space precedes what
    # follows them, as it would with added tokens.
    whole = {pieces[id] for id in vocabulary.ids_of(PieceType.USER_DEFINED)} - {*_RUNS.values()}
    types = [
        PieceType.NORMAL if type == PieceType.USER_DEFINED else type for type in vocabulary.types
    ]
    backend = build_tokenizer(replace(vocabulary, pieces=pieces, types=types), source=source)
    backend.normalizer = normalizers.Sequence(list(_normalizers_6b(vocabulary)))
    longest_first = sorted({*whole, *CHATGLM_SPELLING}, key=len, reverse=True)
    patterns = [*map(re.escape, longest_first), f" {{2,{LONGEST_RUN}}}"]
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(patterns)), "isolated")
    if isinstance(backend.model, models.BPE):
        backend.model.ignore_merges = True  # a whole piece is one token, whatever its merges
    backend.decoder = chatglm_decoder()
    enclose(backend, (), ENDING_6B, source=source)
    return backend


def _normalizers_6b(vocabulary: Vocabulary) -> Iterator[normalizers.Normalizer]:
    """White space is spelled before what sentencepiece does; only single spaces are its own."""
    for piece, text in CHATGLM_SPELLING.items():
        yield normalizers.Replace(text, piece)
    if vocabulary.remove_extra_spaces:
        yield normalizers.Replace(Regex(r"\A (?! )|(?<! ) \z"), "")
    if vocabulary.character_map:
        yield normalizers.Precompiled(vocabulary.character_map)
    if vocabulary.add_space_prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(Regex("(?<! ) (?! )"), SPACE)
