"""Text: tokenizers, chat templates and streaming detokenization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, models

from lite_runner.errors import ArtifactError
from lite_runner.system.files import read_json_object
from lite_runner.text.gguf import byte_level_bpe, load_gguf
from lite_runner.text.spelling import StreamDecoder
from lite_runner.text.tokenizer import SpecialTokens, Tokenizer, byte_tokenizer, special_tokens
from lite_runner.weights.formats.gguf_file import is_split

if TYPE_CHECKING:
    from lite_runner.text.chatglm_chat import ChatForm

__all__ = ["SpecialTokens", "StreamDecoder", "Tokenizer", "byte_tokenizer", "load_tokenizer"]

# Readers of each kind of file are imported when there is such a file.
_MERGES = "merges.txt"
_JSON, _MODEL, _CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
CHAT_FORMS: Mapping[str, ChatForm] = {  # by tokenizer_class
    "ChatGLM2Tokenizer": "chatglm2",
    "ChatGLM3Tokenizer": "chatglm3",
}
_ICE = "ice_text.model"  # ChatGLM-6B's
_VOCAB = "vocab.json"  # slow GPT-2-style tokenizer, needs merges.txt
_MAX_FILE_BYTES = 512 * 2**20
_MAX_IDS = 1 << 24
_HINT = (
    f"give processor.tokenizer.tokenizer_file= a folder with {_JSON} or {_MODEL}, one of these "
    "files, or a .gguf"
)
_END = "<|endoftext|>"
# Chat tokens, which Qwen2's vocab.json lacks.
_QWEN2_ADDED = (_END, "<|im_start|>", "<|im_end|>")


def load_tokenizer(
    path: Path,
    *,
    model_vocab: int | None,
    chat_form: ChatForm | None = None,
    spelling: str | None = None,
) -> Tokenizer:
    """The tokenizer at `path`: a folder, a tokenizer.json, a .model of sentencepiece or
    of a GLM-4, or a .gguf.

    `chat_form`: that of a ChatGLM, whose files do not always tell; nor do they tell an
    architecture's `spelling`: see there. `model_vocab` is the model's
    vocabulary size; a tokenizer with a higher id is rejected. Raises ArtifactError if it is
    missing, broken, too large or of an unknown kind.
    """
    tokenizer = _load(path, chat_form, spelling)
    if tokenizer.vocab_size > _MAX_IDS:
        raise ArtifactError(
            f"{tokenizer.source}: a tokenizer of {tokenizer.vocab_size:,} ids, at most "
            f"{_MAX_IDS:,} are expected",
            hint="use the tokenizer that was published with the model",
        )
    if model_vocab is not None and tokenizer.vocab_size > model_vocab:
        raise ArtifactError(
            f"{tokenizer.source}: the tokenizer has {tokenizer.vocab_size} ids, "
            f"the model's vocabulary {model_vocab}",
            hint="use the tokenizer that was published with the model",
        )
    return tokenizer


def holds_tokenizer(folder: Path) -> bool:
    """True if `load_tokenizer` finds a tokenizer in the folder, valid or not."""
    return _file_in(folder) is not None


def _load(path: Path, chat_form: ChatForm | None, spelling: str | None) -> Tokenizer:
    if path.is_dir():
        if (file := _file_in(path)) is None:
            raise ArtifactError(f"no tokenizer in {path}: neither {_JSON} nor {_MODEL}", hint=_HINT)
        return _load(file, chat_form, spelling)
    if not path.is_file():
        raise ArtifactError(f"no tokenizer at {path}: no such file or folder", hint=_HINT)
    if path.suffix == ".gguf":
        return load_gguf(path)
    if path.suffix in (".json", ".model"):
        return _load_file(path, chat_form, spelling)
    raise ArtifactError(f"{path} is not a tokenizer: its name ends in {path.suffix!r}", hint=_HINT)


def _file_in(folder: Path) -> Path | None:
    for name in (_JSON, _MODEL, _ICE):
        if (folder / name).is_file():
            return folder / name
    if (folder / _VOCAB).is_file() and (folder / _MERGES).is_file():
        return folder / _VOCAB
    ggufs = sorted(folder.glob("*.gguf"))
    return ggufs[0] if len(ggufs) == 1 or is_split(ggufs) else None


def _load_file(path: Path, chat_form: ChatForm | None, spelling: str | None) -> Tokenizer:
    """A tokenizer.json or tokenizer.model with the config files next to it."""
    from lite_runner.text import chatglm, tiktoken
    from lite_runner.text.sentencepiece import (
        SPARK_END,
        SPARK_TEMPLATE,
        build_tokenizer,
        read_model,
    )

    config = _Config(path.parent)
    form = chat_form or config.chat_form
    template = None  # for tokenizers published without one
    ranked = False
    if path.name == _VOCAB:
        backend, defaults = _read_vocab_and_merges(path, config.is_qwen2)
    elif path.suffix == ".json":
        backend = _read_json(path)
        defaults = SpecialTokens()
    elif tiktoken.is_ranks(data := _read(path)):
        form, ranked = None, True  # its chats use a template
        backend, defaults = tiktoken.read_ranks(data, str(path)), SpecialTokens()
    else:
        if spelling == "words":
            raise ArtifactError(
                f"{path}: its pieces are of texts that jieba has split into words, which is not"
                " supported",
                "give token ids in Python: AutoModel.from_pretrained(...).generate(ids)",
            )
        vocabulary = read_model(path, space_after_special=config.legacy)
        if chatglm.is_chatglm_6b(vocabulary):
            config.check_chatglm()
            form = None  # its class has ChatGLM2's name
            backend = chatglm.build_6b(vocabulary, source=str(path))
            defaults, template = chatglm.SPECIAL_6B, chatglm.TEMPLATE_6B
        else:
            breaks = spelling == "breaks"
            backend = build_tokenizer(replace(vocabulary, spells_breaks=breaks), source=str(path))
            defaults = replace(vocabulary.special, add_bos=not breaks)
            if breaks and backend.token_to_id(SPARK_END) is not None:
                defaults = replace(defaults, eos=(*defaults.eos, SPARK_END))
                template = SPARK_TEMPLATE
    if form is not None:
        chatglm.add_tokens(backend, str(path))
        defaults = chatglm.DEFAULTS
    config.add_tokens(backend)
    if ranked:
        defaults, template = tiktoken.add_special_tokens(backend, str(path))
    special = config.special_tokens(defaults)
    return Tokenizer(
        backend,
        special if form is None else chatglm.with_ends(special, form),
        source=str(path),
        chat_template=config.chat_template() or template if form is None else None,
        template_source=str(config.template_file),
        chat_form=form,
    )


def _read_json(path: Path) -> tokenizers.Tokenizer:
    from lite_runner.text.tokenizer_cost import check_tokenizer

    data = _read(path)
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
        check_tokenizer(backend)
        return backend
    except BaseException as error:
        # The library panics on some broken files; a panic is not an Exception.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ArtifactError(f"{path}: not a tokenizer: {error}", hint=_HINT) from error


def _read_vocab_and_merges(
    vocab: Path, is_qwen2: bool
) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    """The byte-level BPE of a vocab.json with the merges.txt next to it, and its special tokens.

    Raises ArtifactError if either is missing or broken.
    """
    merges = vocab.parent / _MERGES
    if not merges.is_file():
        raise ArtifactError(f"{vocab}: no {_MERGES} beside it", "a vocab.json needs its merges")
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # not JSON, a merge of unknown tokens, ...
        raise ArtifactError(f"{vocab}: not a vocabulary with merges: {error}") from error
    backend = byte_level_bpe(model, "qwen2" if is_qwen2 else "gpt-2")
    backend.add_special_tokens(special_tokens(_QWEN2_ADDED if is_qwen2 else (_END,)))
    bos = None if is_qwen2 else _END
    return backend, SpecialTokens(bos=bos, eos=(_END,), pad=_END, unk=_END)


class _Config:
    """tokenizer_config.json and related files of a folder; all are optional."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._values = {
            **_read_object(folder / "special_tokens_map.json"),
            **_read_object(folder / _CONFIG),
        }

    @property
    def legacy(self) -> bool:
        return self._values.get("legacy") is not False

    @property
    def chat_form(self) -> ChatForm | None:
        """The chat form of ChatGLM2 or ChatGLM3: both have one class, and only the newer has a
        template, a rough one."""
        kind = self._values.get("tokenizer_class")
        if kind == "ChatGLMTokenizer":
            named = "chatglm3" in str(self._values.get("name_or_path"))
            return "chatglm3" if named or self._values.get("chat_template") else "chatglm2"
        return CHAT_FORMS.get(kind) if isinstance(kind, str) else None

    @property
    def is_qwen2(self) -> bool:
        return str(self._values.get("tokenizer_class", "")).startswith("Qwen2Tokenizer")

    def special_tokens(self, defaults: SpecialTokens) -> SpecialTokens:
        eos = self._token("eos_token")
        return SpecialTokens(
            bos=self._token("bos_token") or defaults.bos,
            eos=(eos,) if eos else defaults.eos,
            pad=self._token("pad_token") or defaults.pad,
            unk=self._token("unk_token") or defaults.unk,
            add_bos=self._get("add_bos_token", bool, defaults.add_bos),
            add_eos=self._get("add_eos_token", bool, defaults.add_eos),
        )

    def add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Add the tokens that only the config lists, under its ids."""
        listed = self._get("added_tokens_decoder", dict, None) or {}
        for id, entry in sorted(listed.items(), key=lambda item: str(item[0]).zfill(12)):
            content = entry.get("content") if isinstance(entry, dict) else None
            if not isinstance(content, str) or not _is_id(str(id)):
                raise self._error(f"added_tokens_decoder[{str(id)[:20]!r}]", entry, "a token")
            if backend.token_to_id(content) is None:
                token = AddedToken(
                    content,
                    normalized=bool(entry.get("normalized", False)),
                    special=bool(entry.get("special", False)),
                )
                backend.add_tokens([token])
            if backend.token_to_id(content) != int(id):
                raise ArtifactError(
                    f"{self._folder / _CONFIG}: token {content!r} has id {id}, "
                    f"in the vocabulary {backend.token_to_id(content)}"
                )

    def check_chatglm(self) -> None:
        """Raise ArtifactError for settings of ChatGLM-6B's tokenizer that are not followed."""
        for name in ("remove_space", "do_lower_case", "num_image_tokens"):
            if self._values.get(name):
                # The last is the first release's, whose ids were 20,000 larger.
                raise self._error(name, self._values[name], "none: token ids would differ")

    @property
    def template_file(self) -> Path:
        """chat_template.jinja, else the config, which may have one or none."""
        file = self._folder / "chat_template.jinja"
        return file if file.is_file() else self._folder / _CONFIG

    def chat_template(self) -> str | None:
        """chat_template.jinja, else the (default) template in the config."""
        file = self.template_file
        if file.name != _CONFIG:
            try:
                return _read(file).decode()
            except UnicodeDecodeError as error:
                raise ArtifactError(f"{file}: not UTF-8: {error.reason}") from error
        value = self._values.get("chat_template")
        if value is None or isinstance(value, str):
            return value
        try:
            templates = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError) as error:
            raise self._error("chat_template", value, "a string or a list of named ones") from error
        template = templates.get("default")
        if template is not None and not isinstance(template, str):
            raise self._error("chat_template", template, "a string")
        return template

    def _token(self, name: str) -> str | None:
        """A special token, given as a string or an AddedToken object."""
        value = self._values.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise self._error(name, value, "a string")
        return value

    def _get(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self._error(name, value, f"a {kind.__name__}")
        return value

    def _error(self, name: str, value: Any, expected: str) -> ArtifactError:
        return ArtifactError(
            f"{self._folder / _CONFIG}: {name} is {repr(value)[:80]}, expected {expected}"
        )


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file."""
    return read_json_object(path, most=_MAX_FILE_BYTES) if path.is_file() else {}


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise ArtifactError(f"{path}: {size} bytes, at most {_MAX_FILE_BYTES} are expected")
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from error


def _is_id(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(_MAX_IDS))
