"""The kinds of tokens in a vocabulary, the bytes of each, and text decoded as tokens arrive.

If every token maps to bytes, decoding is concatenating them, so streaming is simple and exact. Text
is streamed once no later token can change it, and stop strings are looked for in it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from tokenizers import decoders

from lite_runner.records import dataclass

if TYPE_CHECKING:
    from lite_runner.text.tokenizer import Tokenizer

SPACE = "\u2581"  # sentencepiece's spelling of a space
LONGEST_RUN = 80  # of spaces, in ChatGLM-6B's vocabulary
# ChatGLM-6B's spelling of white space; shorter runs spell themselves.
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
    """The byte tokens of a text: sentencepiece's, and GPT-2's."""
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


_REPLACEMENT = "\ufffd"


class StreamDecoder:
    """Decodes a sequence token by token; the joined pieces equal `tokenizer.decode(all)`.

    Nearly every tokenizer maps tokens to bytes, which are decoded incrementally. For any other, the
    last emitted tokens are decoded again together with the new ones, since a token's text may
    depend on its neighbours; this window slides, so the cost is linear.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues: bool = False
    ) -> None:
        """`continues`: other text comes before, so a leading space is not dropped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Until the first text is emitted.
        spelling = tokenizer.spelling
        self._strip = not continues and spelling is not None and spelling.strips_space
        self._context: list[int] = []  # already emitted
        self._pending: list[int] = []

    def put(self, token_id: int) -> str:
        """The newly final text; empty while a character is incomplete."""
        if self._tokenizer.spelling is not None:
            data = self._tokenizer.token_bytes(token_id, self._skip_special_tokens)
            return self._strip_space(self._utf8.decode(data))
        self._pending.append(token_id)
        text = self._pending_text()
        return "" if text.endswith(_REPLACEMENT) else self._slide(text)

    def finish(self) -> str:
        """The remaining text; incomplete characters become U+FFFD."""
        rest = self._strip_space(self._utf8.decode(b"", final=True))
        return rest + self._slide(self._pending_text())

    def _strip_space(self, text: str) -> str:
        if not (self._strip and text):
            return text
        self._strip = False
        return text.removeprefix(" ")

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _slide(self, text: str) -> str:
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens) if ids else ""


class StopChecker:
    """Takes tokens, emits final text, and detects stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        continues: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`continues`: see StreamDecoder."""
        self.text = ""
        self.stop_string: str | None = None  # the stop string that was found
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens, continues=continues)
        self._stop = tuple(stop)
        self._buffer = ""  # may be the start of a stop string

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self.stop_string is not None

    def put(self, token_id: int) -> str:
        """The newly final text; empty after a stop string."""
        return "" if self.stopped else self._take(self._decoder.put(token_id))

    def finish(self) -> str:
        """The buffered text, once no token follows."""
        if self.stopped:
            return ""
        final = self._take(self._decoder.finish())
        rest, self._buffer = self._buffer, ""
        self.text += rest
        return final + rest

    def _take(self, piece: str) -> str:
        text = self._buffer + piece
        found = [(index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            place, self.stop_string = min(found)
            final, self._buffer = text[:place], ""
        else:
            kept = self._overlap(text)
            final, self._buffer = text[: len(text) - kept], text[len(text) - kept :]
        self.text += final
        return final

    def _overlap(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
