"""The tokenizer inside a GGUF file, read and written."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from lite_runner.errors import ArtifactError
from lite_runner.system.files import parse_json
from lite_runner.system.user_cache import of_file
from lite_runner.text.spelling import SPACE, PieceType, byte_alphabet
from lite_runner.text.tokenizer import SpecialTokens, Tokenizer, special_tokens
from lite_runner.weights.formats.gguf_file import Array, looks_like_gguf, read_header, read_metadata

_KEY = "tokenizer.ggml."
_HINT = "give a folder with a tokenizer.json instead (processor.tokenizer.tokenizer_file=)"

# Behind a call of gpt-oss and of Gemma 4, and behind Gemma 4's turns: their files have no keys for
# these, and llama.cpp's converter makes one of them a token of the user's, so that it is shown.
_CALL_ENDS = ("<|call|>", "<|tool_response>", "<turn|>")
_SHORT_TEXT, _SHORT_WORD = 4096, 64  # characters, and bytes
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_CONTRACTED}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{_CONTRACTED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_FALCON = (
    r"[\p{P}$+<=>^~|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[0-9][0-9][0-9]",
)
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(*patterns: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


# Pre-tokenizers by tokenizer.ggml.pre.
PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
    "chatglm-bpe": _split(_LLAMA3),
    "glm4": _split(_LLAMA3),
    "bloom": _split(_BLOOM),
    "phi-2": _gpt2,
    "olmo": _gpt2,
    "exaone4": _gpt2,
    "command-r": _single_digits,
    "falcon": _split(*_FALCON),
    "stablelm2": _split(_QWEN2),
    "hunyuan": _split(_QWEN2),
    "seed-coder": _split(_SEED),
    "gpt-4o": _split(_GPT_4O),
    "deepseek-v3": _split(*_DEEPSEEK_V3),
    "hunyuan-dense": _split(*_DEEPSEEK_V3),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")


def byte_level_bpe(model: models.BPE, pre: str) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer as GPT-2's; `pre`: one of PRE_TOKENIZERS."""
    backend = tokenizers.Tokenizer(model)
    if pre in _QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def load_gguf(path: Path) -> Tokenizer:
    """The tokenizer in the GGUF file `path`. Raises ArtifactError if it is of an unknown kind."""
    fields = _Fields(read_header(path).metadata, str(path))
    kind = fields.get("model", str, "")
    backend: tokenizers.Tokenizer | LazyTokenizer
    if kind == "gpt2":
        backend, size = _lazy_bpe(path, fields), len(fields.tokens)
        add_bos = fields.get("pre", str, "default") in _LLAMA3_NAMES
    elif kind == "llama":
        backend, size = _sentencepiece_bpe(fields), None
        add_bos = True
    elif kind == "gemma4":
        backend, size = _merged_bpe(fields), len(fields.tokens)
        add_bos = True
    else:
        raise ArtifactError(
            f"{path}: tokenizer of kind {kind!r}; 'gpt2', 'llama' and 'gemma4' are known",
            hint=_HINT,
        )
    return Tokenizer(
        backend,
        SpecialTokens(
            bos=fields.token("bos_token_id"),
            eos=fields.end_tokens(),
            pad=fields.token("padding_token_id"),
            unk=fields.token("unknown_token_id"),
            add_bos=fields.get("add_bos_token", bool, add_bos),
            add_eos=fields.get("add_eos_token", bool, False),
        ),
        source=str(path),
        chat_template=fields.chat_template(),
        vocab_size=size,
    )


class _Fields:
    """The tokenizer's keys, type-checked."""

    def __init__(self, metadata: dict[str, Any], source: str) -> None:
        self._metadata = {
            key: value.in_memory() if isinstance(value, Array) else value
            for key, value in metadata.items()
            if key.startswith("tokenizer.")
        }
        self.source = source
        self.tokens = self.strings("tokens")
        self.types = self.numbers("token_type") or [PieceType.NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ArtifactError(f"{source}: {len(self.tokens)} tokens, {len(self.types)} types")
        normal = int(PieceType.NORMAL)  # an enum's comparison takes five times as long
        places = [place for place, type in enumerate(self.types) if type != normal]
        self.apart = {self.tokens[place]: place for place in places}

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(_KEY + name, default)
        if kind is list and isinstance(value, Array):
            return value
        if not isinstance(value, kind):
            raise ArtifactError(
                f"{self.source}: {_KEY}{name} is {value!r}, expected a {kind.__name__}"
            )
        return value

    def strings(self, name: str) -> Array:
        """A required list of strings."""
        values: Array = self.get(name, list, [])
        if not values or not isinstance(values[0], str):
            raise ArtifactError(f"{self.source}: no list of strings {_KEY}{name}", hint=_HINT)
        return values

    def numbers(self, name: str) -> list[Any]:
        values = list(self.get(name, list, []))
        if values and isinstance(values[0], str):
            raise ArtifactError(f"{self.source}: {_KEY}{name} holds strings, expected numbers")
        return values

    def token(self, name: str) -> str | None:
        """The token whose id is in the key `name`."""
        id = self.get(name, int, -1)
        if id >= len(self.tokens):
            raise ArtifactError(
                f"{self.source}: {_KEY}{name} is {id}, beyond the {len(self.tokens)} tokens"
            )
        return self.tokens[id] if id >= 0 else None

    def tokens_of(self, *names: str) -> tuple[str, ...]:
        tokens = (self.token(name) for name in names)
        return tuple(dict.fromkeys(token for token in tokens if token is not None))

    def end_tokens(self) -> tuple[str, ...]:
        """The end tokens that the file names, and known ones without a key."""
        named = self.tokens_of("eos_token_id", "eot_token_id", "eom_token_id")
        apart = self.tokens_of_type(PieceType.CONTROL, PieceType.USER_DEFINED)
        return tuple(dict.fromkeys((*named, *(one for one in _CALL_ENDS if one in apart))))

    def tokens_of_type(self, *kinds: PieceType) -> list[str]:
        """The tokens of one of these kinds, none of which is NORMAL."""
        return [token for token, id in self.apart.items() if self.types[id] in kinds]

    def vocabulary(self, wanted: Collection[str] | None = None) -> dict[str, int]:
        """The id of each token, or of the `wanted` ones."""
        every = _strings(self.tokens, wanted)
        return {token: id for id, token in every if wanted is None or token in wanted}

    def merges(self, wanted: Collection[str] | None = None) -> list[tuple[str, str]]:
        """The merges in their order, or those that make the `wanted` tokens."""
        every = (line.partition(" ") for _, line in _strings(self.strings("merges"), wanted, 1))
        if wanted is None:
            return [(left, right) for left, _, right in every]
        return [(left, right) for left, _, right in every if left + right in wanted]

    def chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None


def _strings(
    strings: Array, wanted: Collection[str] | None, spaces: int = 0
) -> Iterable[tuple[int, str]]:
    """The strings with their places: all, or those that, but for spaces, may be `wanted`."""
    if wanted is None:
        return enumerate(strings)
    return ((place, strings[place]) for place in strings.places_like(wanted, spaces))


def _merged_bpe(fields: _Fields) -> tokenizers.Tokenizer:
    """Gemma 4's tokenizer: a sentencepiece vocabulary with BPE merges."""
    model = _bpe(
        fields, byte_fallback=True, fuse_unk=True, unk_token=fields.token("unknown_token_id")
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_special(backend, fields)


def _byte_level_bpe(
    fields: _Fields,
    vocabulary: dict[str, int] | None = None,
    merges: Sequence[tuple[str, str]] | None = None,
) -> tokenizers.Tokenizer:
    """With all tokens of the file, or some."""
    pre = fields.get("pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ArtifactError(
            f"{fields.source}: pre-tokenizer {pre!r} is not known; these are: {known}", hint=_HINT
        )
    model = _bpe(fields, vocabulary, merges, ignore_merges=pre in _LLAMA3_NAMES)
    return _with_special(byte_level_bpe(model, pre), fields)


def _bpe(
    fields: _Fields,
    vocabulary: dict[str, int] | None = None,
    merges: Sequence[tuple[str, str]] | None = None,
    **options: Any,
) -> models.BPE:
    if vocabulary is None:
        vocabulary = fields.vocabulary()
        if len(vocabulary) < len(fields.tokens):
            twice = len(fields.tokens) - len(vocabulary)
            raise ArtifactError(f"{fields.source}: {twice} tokens occur twice")
    if merges is None:
        merges = fields.merges()
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # a merge of tokens missing from the vocabulary
        raise ArtifactError(f"{fields.source}: broken vocabulary: {error}") from error


def _lazy_bpe(path: Path, fields: _Fields) -> tokenizers.Tokenizer | LazyTokenizer:
    """A large file is seen to make a tokenizer once; after that one is made where it is needed."""
    opened = []

    def works() -> bool:
        opened.append(_byte_level_bpe(fields))
        return True

    of_file("makes a tokenizer", path, works)
    return opened[0] if opened else LazyTokenizer(fields)


class LazyTokenizer:
    """Stands for the `tokenizers.Tokenizer` of a byte-level BPE, which it makes where something is
    asked that takes the whole vocabulary.

    The first text, if short, is encoded by a tokenizer of the tokens that it may have: those whose
    spelling is a part of one of its words, with the merges that make them. No other merge can
    apply, so the ids are those of the whole. For a prompt that takes a fifth of the time.
    """

    def __init__(self, fields: _Fields) -> None:
        self._fields = fields
        # Tells words apart, for which its letters may have any ids.
        letters = [one for one in byte_alphabet() if one not in fields.apart]
        ids = {letter: id for id, letter in enumerate(letters, len(fields.tokens))}
        self._words = _byte_level_bpe(fields, fields.apart | ids, [])
        self._whole: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self._encoded = False
        self.encode_special_tokens = False
        self.post_processor: Any = None
        self.decoder = self._words.decoder
        self.get_added_tokens_decoder = self._words.get_added_tokens_decoder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy and pickle, before there is anything
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def whole(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._whole is None:
                self._whole = self._like_this(_byte_level_bpe(self._fields))
            return self._whole

    def no_truncation(self) -> None:
        """A file has none."""

    no_padding = no_truncation

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[tokenizers.Encoding]:
        """As the library's."""
        with self._lock:
            first, self._encoded = not self._encoded, True
            part = self._part_for(texts[0]) if first and len(texts) == 1 else None
        encoder = self.whole() if part is None else part
        return encoder.encode_batch(texts, add_special_tokens=add_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """As the library's; of special tokens at once."""
        id = self._fields.apart.get(token)
        return self.whole().token_to_id(token) if id is None else id

    def id_to_token(self, id: int) -> str | None:
        """As the library's."""
        tokens = self._fields.tokens
        return tokens[id] if 0 <= id < len(tokens) else None

    def _part_for(self, text: str) -> tokenizers.Tokenizer | None:
        """A tokenizer for this text; None where it is long, or odd."""
        if self._whole is not None or len(text) > _SHORT_TEXT:
            return None
        self._like_this(self._words)
        (letters,) = self._words.encode_batch([text], add_special_tokens=False)
        by_place: dict[int | None, str] = {}
        for letter, place in zip(letters.tokens, letters.word_ids, strict=True):
            by_place[place] = by_place.get(place, "") + letter
        words = set(by_place.values())
        if max(map(len, words), default=0) > _SHORT_WORD:
            return None
        parts = {
            word[start:end]
            for word in words
            for start in range(len(word))
            for end in range(start + 1, len(word) + 1)
        }
        vocabulary = self._fields.apart | self._fields.vocabulary(parts)
        if not vocabulary.keys() >= {letter for word in words for letter in word}:
            return None  # the whole leaves this letter out, and those beside it may be merged
        part = _byte_level_bpe(self._fields, vocabulary, self._fields.merges(parts))
        return self._like_this(part)

    def _like_this(self, other: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        other.encode_special_tokens = self.encode_special_tokens
        if self.post_processor is not None:
            other.post_processor = self.post_processor
        return other


def _with_special(backend: tokenizers.Tokenizer, fields: _Fields) -> tokenizers.Tokenizer:
    """Add the tokens that are matched in texts as they are spelled."""
    backend.add_special_tokens(special_tokens(fields.tokens_of_type(PieceType.CONTROL)))
    own = fields.tokens_of_type(PieceType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, normalized=False) for token in own])
    return backend


def _sentencepiece_bpe(fields: _Fields) -> tokenizers.Tokenizer:
    from lite_runner.text.sentencepiece import Vocabulary, build_tokenizer

    vocabulary = Vocabulary(
        pieces=list(fields.tokens),
        scores=fields.numbers("scores"),
        types=fields.types,
        add_space_prefix=fields.get("add_space_prefix", bool, True),
        remove_extra_spaces=fields.get("remove_extra_whitespaces", bool, False),
    )
    return build_tokenizer(vocabulary, source=fields.source)


# A text that all pre-tokenizers split differently.
_PROBE = (
    "Hello world's 12345 3.14, don't DON'T 7th\t x_y\u00c4\u00d6\u00e9e\u0301 \u4f60\u597d\u3002"
    "\n\n  \r\n ...!! (a)[b] 'll I'VE\n   end "
)


def gguf_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys of a GGUF file that hold this tokenizer; those of its own file, where it is from
    one. Raises ArtifactError for a kind that such a file cannot hold."""
    source = Path(tokenizer.source)
    if source.is_file() and looks_like_gguf(source):
        metadata = read_metadata(source)
        return {key: one for key, one in metadata.items() if key.startswith("tokenizer.")}
    whole = parse_json(tokenizer.files()["tokenizer.json"])
    model, decoder = whole["model"], whole.get("decoder") or {}
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges") or ()]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    spelled = bool(model.get("byte_fallback")) and whole.get("normalizer") == spaces
    if (
        model.get("type") != "BPE"
        or not (spelled or decoder.get("type") == "ByteLevel")
        or not merges
    ):
        raise _unwritable(tokenizer, "it is neither a byte-level BPE nor a sentencepiece BPE")
    tokens = [f"[PAD{id}]" for id in range(tokenizer.vocab_size)]
    types = [int(PieceType.UNUSED)] * len(tokens)
    for token, id in model["vocab"].items():
        is_byte = spelled and re.fullmatch("<0x[0-9A-F]{2}>", token)
        tokens[id], types[id] = token, int(PieceType.BYTE if is_byte else PieceType.NORMAL)
    for one in whole.get("added_tokens") or ():
        kind = PieceType.CONTROL if one["special"] else PieceType.USER_DEFINED
        tokens[one["id"]], types[one["id"]] = one["content"], int(kind)
    empty = tokenizer.encode("")
    found: dict[str, Any] = {
        f"{_KEY}model": "gemma4" if spelled else "gpt2",
        f"{_KEY}tokens": tokens,
        f"{_KEY}token_type": types,
        f"{_KEY}merges": merges,
        f"{_KEY}add_bos_token": tokenizer.bos_token_id in empty,
        f"{_KEY}add_eos_token": empty[-1:] != [] and empty[-1] in tokenizer.eos_token_ids,
    }
    eos = tokenizer.eos_token_ids
    named = {"bos": tokenizer.bos_token_id, "padding": tokenizer.pad_token_id}
    named |= dict(zip(("eos", "eot", "eom"), eos, strict=False))
    found |= {f"{_KEY}{name}_token_id": id for name, id in named.items() if id is not None}
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    if spelled:
        unknown = tokenizer.id_of(model.get("unk_token"))
        return found | ({} if unknown is None else {f"{_KEY}unknown_token_id": unknown})
    own = tokenizers.Tokenizer.from_str(json.dumps(whole))
    expected = _splits(own), bool(model.get("ignore_merges"))
    for pre in PRE_TOKENIZERS:
        alike = byte_level_bpe(models.BPE(), pre)
        if pre != "default" and (_splits(alike), pre in _LLAMA3_NAMES) == expected:
            return {**found, f"{_KEY}pre": pre}
    raise _unwritable(tokenizer, "no pre-tokenizer that llama.cpp names splits texts as it does")


def _splits(backend: tokenizers.Tokenizer) -> list[str]:
    normalizer, splitter = backend.normalizer, backend.pre_tokenizer
    text = _PROBE if normalizer is None else normalizer.normalize_str(_PROBE)
    return [piece for piece, _ in splitter.pre_tokenize_str(text)] if splitter else [text]


def _unwritable(tokenizer: Tokenizer, why: str) -> ArtifactError:
    return ArtifactError(
        f"{tokenizer.source}: a GGUF file cannot hold this tokenizer: {why}",
        "quantize.format=folder",
    )
