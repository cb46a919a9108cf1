"""SentencePiece vocabularies converted to `tokenizers` tokenizers with the same ids.

The pieces come from a tokenizer.model (a protobuf) or a GGUF file. Known differences from the
sentencepiece library: ties between unigram segmentations, compiled normalization rules across a
letter and its combining marks, and the space prefix, which also follows special and user-defined
tokens (as in transformers and llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.text.spelling import SPACE, PieceType, sentencepiece_decoder
from lite_runner.text.tokenizer import SpecialTokens, special_tokens
from lite_runner.text.tokenizer_cost import check_splits

_BREAK = "<ret>"  # iFlytekSpark's line break
SPARK_END = "<end>"  # of its turns
SPARK_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == ('user', 'assistant')[loop.index0 % 2] -%}
{{ ('<User> ', '<Bot> ')[loop.index0 % 2] }}{{ message.content }}<end>
{%- else -%}
{{ raise_exception('iFlytekSpark: expected user and assistant in turns, and no system') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<Bot> ' }}{% endif -%}"""


@dataclass(frozen=True)
class Vocabulary:
    """Pieces by id and the normalization settings."""

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]  # of PieceType
    unigram: bool = False  # else BPE
    character_map: bytes = b""  # compiled normalization rules; empty: none
    add_space_prefix: bool = True
    remove_extra_spaces: bool = False
    space_after_special: bool = True  # also add the prefix after each special token
    spells_breaks: bool = False  # line breaks are a piece, and tabs four spaces
    special: SpecialTokens = field(default_factory=SpecialTokens)

    def ids_of(self, kind: PieceType) -> list[int]:
        return [id for id, type in enumerate(self.types) if type == kind]


def build_tokenizer(vocabulary: Vocabulary, *, source: str) -> tokenizers.Tokenizer:
    """The tokenizer of `vocabulary`. Raises ArtifactError naming `source` if it is inconsistent."""
    count = len(vocabulary.pieces)
    if not count == len(vocabulary.scores) == len(vocabulary.types):
        raise ArtifactError(
            f"{source}: {count} pieces, {len(vocabulary.scores)} scores and "
            f"{len(vocabulary.types)} types; the three must be of one length"
        )
    ids = {piece: id for id, piece in enumerate(vocabulary.pieces)}
    if len(ids) < count:
        raise ArtifactError(f"{source}: {count - len(ids)} of {count} pieces occur twice")
    unknown = vocabulary.ids_of(PieceType.UNKNOWN)
    byte_fallback = len(vocabulary.ids_of(PieceType.BYTE)) == 256
    model: models.BPE | models.Unigram
    if vocabulary.unigram:
        if not unknown:
            raise ArtifactError(f"{source}: no piece for unknown text, which unigram needs")
        model = models.Unigram(
            list(zip(vocabulary.pieces, vocabulary.scores, strict=True)), unknown[0], byte_fallback
        )
    else:
        check_splits(vocabulary.pieces, source)
        model = models.BPE(
            ids,
            _merges(vocabulary, ids),
            unk_token=vocabulary.pieces[unknown[0]] if unknown else None,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    backend = tokenizers.Tokenizer(model)
    try:
        _set_normalizer(backend, vocabulary)
    except Exception as error:  # the library has no class of its own for it
        raise ArtifactError(f"{source}: not a sentencepiece model: {error}") from error
    backend.decoder = sentencepiece_decoder(vocabulary.add_space_prefix)
    if vocabulary.spells_breaks:
        steps = [decoders.Replace(_BREAK, "\n"), backend.decoder]
        backend.decoder = decoders.Sequence(steps)
    special = [vocabulary.pieces[id] for id in unknown + vocabulary.ids_of(PieceType.CONTROL)]
    backend.add_special_tokens(special_tokens(special))
    # Matched before pre-tokenization; inner spaces are spelled as in the normalized text.
    backend.add_tokens(
        [
            AddedToken(piece, normalized=SPACE in piece or piece == _BREAK)
            for piece in (vocabulary.pieces[id] for id in vocabulary.ids_of(PieceType.USER_DEFINED))
        ]
    )
    return backend


def _set_normalizer(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    steps: list[normalizers.Normalizer] = []
    if vocabulary.spells_breaks:
        steps += [normalizers.Replace("\n", _BREAK), normalizers.Replace("\t", " " * 4)]
    if vocabulary.character_map:
        steps.append(normalizers.Precompiled(vocabulary.character_map))
    once = vocabulary.add_space_prefix and not vocabulary.space_after_special
    if vocabulary.remove_extra_spaces:
        # Only spaces: the rules above may have turned a line break into one.
        leading = "" if once else r"\A +|"  # one is kept, as the possible prefix
        steps.append(normalizers.Replace(Regex(rf"{leading}[ {SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if vocabulary.add_space_prefix and not once:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    if once and vocabulary.remove_extra_spaces:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif once:
        # A Metaspace adds no prefix to text that starts with its marker, sentencepiece does. So the
        # first adds a space, of which there is no other, and the second replaces it by the marker.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
                pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
            ]
        )


def _merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """BPE merges, best first.

    SentencePiece merges the pair whose merged piece scores best, the leftmost on ties. So a pair
    ranks by the score of the merged piece.
    """
    mergeable = {
        piece: vocabulary.scores[id]
        for piece, id in ids.items()
        if vocabulary.types[id] in (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.UNUSED)
    }

    def pairs() -> Iterator[tuple[float, int, int, str, str]]:
        for piece, score in mergeable.items():
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in mergeable and right in mergeable:
                    yield -score, ids[left], ids[right], left, right

    return [(left, right) for *_, left, right in sorted(pairs())]


def read_model(path: Path, *, space_after_special: bool = True) -> Vocabulary:
    """The vocabulary of a tokenizer.model. Raises ArtifactError unless it is a valid unigram or BPE
    model."""
    from sentencepiece import sentencepiece_model_pb2

    from lite_runner.system.protobuf import parse_message

    try:
        proto = parse_message(sentencepiece_model_pb2.ModelProto, path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: not a sentencepiece model: {error}") from error
    if not proto.pieces:
        raise ArtifactError(f"{path}: not a sentencepiece model: it has no pieces")
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        name = trainer.ModelType.Name(trainer.model_type)
        raise ArtifactError(f"{path}: a sentencepiece model of type {name}, not UNIGRAM or BPE")
    return Vocabulary(
        pieces=[piece.piece for piece in proto.pieces],
        scores=[piece.score for piece in proto.pieces],
        types=[piece.type for piece in proto.pieces],
        unigram=trainer.model_type == trainer.UNIGRAM,
        character_map=normalizer.precompiled_charsmap,
        add_space_prefix=normalizer.add_dummy_prefix,
        remove_extra_spaces=normalizer.remove_extra_whitespaces,
        space_after_special=space_after_special,
        special=SpecialTokens(
            bos=trainer.bos_piece if trainer.bos_id >= 0 else None,
            eos=(trainer.eos_piece,) if trainer.eos_id >= 0 else (),
            pad=trainer.pad_piece if trainer.pad_id >= 0 else None,
            unk=trainer.unk_piece,
            add_bos=True,
            add_eos=False,
        ),
    )
