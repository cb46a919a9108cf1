"""The kinds of tokens in a vocabulary, and the bytes that each stands for.

If every token maps to bytes, decoding is concatenating them, so streaming is simple and exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import IntEnum

from tokenizers import decoders

from lite_runner.records import dataclass

SPACE = "\u2581"  # how sentencepiece spells a space
LONGEST_RUN = 80  # of spaces, in ChatGLM-6B's vocabulary
# How ChatGLM-6B spells white space; shorter runs spell themselves.
CHATGLM_SPELLING = {"<n>": "\n", "<|tab|>": "\t", f"<|blank_{LONGEST_RUN}|>": " " * LONGEST_RUN}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class PieceType(IntEnum):
    """Piece types, with the same numbers in sentencepiece_model.proto and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Spelling:
    """`to_bytes` of a token; `strips_space`: one leading space of the decoded text is dropped."""

    to_bytes: Callable[[str], bytes]
    strips_space: bool = False


def spelling_of(decoder: decoders.Decoder | None) -> Spelling | None:
    """The spelling that `decoder` inverts: GPT-2's, sentencepiece's or ChatGLM-6B's; None for any
    other."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return Spelling(_byte_level)
    for strips_space in (True, False):
        if state == json.loads(sentencepiece_decoder(strips_space).__getstate__()):
            return Spelling(_sentencepiece, strips_space)
    if state == json.loads(chatglm_decoder().__getstate__()):
        return Spelling(_chatglm, strips_space=True)
    return None


def sentencepiece_decoder(strips_space: bool) -> decoders.Decoder:
    """The decoder from pieces to text, as in the tokenizer.json of such a vocabulary."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)


def chatglm_decoder() -> decoders.Decoder:
    """The same for ChatGLM-6B."""
    steps = [decoders.Replace(piece, text) for piece, text in CHATGLM_SPELLING.items()]
    return decoders.Sequence([*steps, sentencepiece_decoder(strips_space=True)])


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte 0..255.

    Printable Latin-1 bytes map to themselves, the others to U+0100 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def byte_spellings(text: str) -> tuple[list[str], list[str]]:
    """The tokens of the bytes of a text: sentencepiece's, and GPT-2's."""
    data, alphabet = text.encode(), byte_alphabet()
    return [f"<0x{byte:02X}>" for byte in data], [alphabet[byte] for byte in data]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token is spelled literally
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


def _chatglm(token: str) -> bytes:
    text = CHATGLM_SPELLING.get(token)
    return _sentencepiece(token) if text is None else text.encode()
