"""The tokenizer inside a GGUF file, read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from lite_runner.errors import ArtifactError
from lite_runner.system.files import parse_json
from lite_runner.text.spelling import SPACE, PieceType
from lite_runner.text.tokenizer import SpecialTokens, Tokenizer, special_tokens
from lite_runner.weights.formats.gguf_file import looks_like_gguf, read_metadata

_KEY = "tokenizer.ggml."
_HINT = "give a folder with a tokenizer.json instead (processor.tokenizer.tokenizer_file=)"

# Behind a call of gpt-oss and of Gemma 4, and behind Gemma 4's turns: their files have no keys for
# these, and llama.cpp's converter makes one of them a token of the user's, so that it is shown.
_CALL_ENDS = ("<|call|>", "<|tool_response>", "<turn|>")
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
    """A tokenizer that spells bytes as GPT-2's does; `pre`: one of PRE_TOKENIZERS."""
    backend = tokenizers.Tokenizer(model)
    if pre in _QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def load_gguf(path: Path) -> Tokenizer:
    """The tokenizer in the GGUF file `path`. Raises ArtifactError if it is of an unknown kind."""
    fields = _Fields(read_metadata(path), str(path))
    kind = fields.get("model", str, "")
    if kind == "gpt2":
        backend, size = _byte_level_bpe(fields), len(fields.tokens)
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
        self._metadata = metadata
        self.source = source
        self.tokens = self.strings("tokens")
        self.types = self.numbers("token_type") or [PieceType.NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ArtifactError(f"{source}: {len(self.tokens)} tokens, {len(self.types)} types")

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(_KEY + name, default)
        if not isinstance(value, kind):
            raise ArtifactError(
                f"{self.source}: {_KEY}{name} is {value!r}, expected a {kind.__name__}"
            )
        return value

    def strings(self, name: str) -> list[str]:
        """A required list of strings."""
        values: list[str] = self.get(name, list, [])
        if not values or not isinstance(values[0], str):
            raise ArtifactError(f"{self.source}: no list of strings {_KEY}{name}", hint=_HINT)
        return values

    def numbers(self, name: str) -> list[Any]:
        values: list[Any] = self.get(name, list, [])
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
        """The end tokens that the file names, and those without a key."""
        named = self.tokens_of("eos_token_id", "eot_token_id", "eom_token_id")
        kinds = (PieceType.CONTROL, PieceType.USER_DEFINED)
        apart = [token for kind in kinds for token in self.tokens_of_type(kind)]
        return tuple(dict.fromkeys((*named, *(one for one in _CALL_ENDS if one in apart))))

    def tokens_of_type(self, kind: PieceType) -> list[str]:
        return [token for token, type in zip(self.tokens, self.types, strict=True) if type == kind]

    def chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None


def _merged_bpe(fields: _Fields) -> tokenizers.Tokenizer:
    """Of Gemma 4: a sentencepiece vocabulary with the merges of a BPE."""
    model = _bpe(
        fields, byte_fallback=True, fuse_unk=True, unk_token=fields.token("unknown_token_id")
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_special(backend, fields)


def _byte_level_bpe(fields: _Fields) -> tokenizers.Tokenizer:
    pre = fields.get("pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ArtifactError(
            f"{fields.source}: pre-tokenizer {pre!r} is not known; these are: {known}",
            hint=_HINT,
        )
    model = _bpe(fields, ignore_merges=pre in _LLAMA3_NAMES)
    return _with_special(byte_level_bpe(model, pre), fields)


def _bpe(fields: _Fields, **options: Any) -> models.BPE:
    vocab = {token: id for id, token in enumerate(fields.tokens)}
    if len(vocab) < len(fields.tokens):
        twice = len(fields.tokens) - len(vocab)
        raise ArtifactError(f"{fields.source}: {twice} tokens occur twice")
    merges = []
    for line in fields.strings("merges"):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # a merge of tokens missing from the vocabulary
        raise ArtifactError(f"{fields.source}: broken vocabulary: {error}") from error


def _with_special(backend: tokenizers.Tokenizer, fields: _Fields) -> tokenizers.Tokenizer:
    """With the tokens that are found in texts as they are spelled."""
    backend.add_special_tokens(special_tokens(fields.tokens_of_type(PieceType.CONTROL)))
    own = fields.tokens_of_type(PieceType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, normalized=False) for token in own])
    return backend


def _sentencepiece_bpe(fields: _Fields) -> tokenizers.Tokenizer:
    from lite_runner.text.sentencepiece import Vocabulary, build_tokenizer

    vocabulary = Vocabulary(
        pieces=fields.tokens,
        scores=fields.numbers("scores"),
        types=fields.types,
        add_space_prefix=fields.get("add_space_prefix", bool, True),
        remove_extra_spaces=fields.get("remove_extra_whitespaces", bool, False),
    )
    return build_tokenizer(vocabulary, source=fields.source)


# Tells the pre-tokenizers apart.
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
        raise _unwritable(tokenizer, "it is no BPE of bytes, or of spelled spaces")
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
