"""Tokenizers: texts to ids and back, in the way of MindFormers and transformers, and padding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.config import show
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
# Arguments of a call that change nothing at these values, and are not supported at others.
_OFF: dict[str, tuple[Any, ...]] = {
    "is_split_into_words": (False,),
    "pad_to_multiple_of": (None,),
    "return_offsets_mapping": (False, None),
    "return_overflowing_tokens": (False, None),
    "return_special_tokens_mask": (False, None),
    "stride": (0,),
    "text_pair": (None,),
    "text_target": (None,),
}
# English without the spaces that a tokenizer may leave, as transformers cleans it up.
_CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)


class _Chat(str):
    """A rendered chat whose ids its text does not tell."""

    ids: list[int]

    def __new__(cls, text: str, ids: list[int]) -> _Chat:
        chat = super().__new__(cls, text)
        chat.ids = ids
        return chat


class PreTrainedTokenizer:
    """MindFormers' methods over `core`, the tokenizer that the rest of lite_runner uses."""

    is_fast = True

    def __init__(
        self,
        core: Tokenizer,
        pad_token_id: int | None = None,
        *,
        padding_side: str = "right",
        model_max_length: int | None = None,
    ) -> None:
        """`pad_token_id`: the model's, where the tokenizer's own files name none."""
        self.core = core
        ends, special = core.eos_token_ids, core.named_tokens()
        candidates = (core.pad_token_id, pad_token_id, *ends[:1])
        self.pad_token_id = next((id for id in candidates if id is not None), None)
        self.bos_token_id = core.bos_token_id
        self.eos_token_id = ends[0] if ends else None
        self.unk_token = special.get("unk_token")
        self.unk_token_id = core.id_of(self.unk_token)
        self.bos_token = special.get("bos_token")
        self.eos_token = special.get("eos_token")
        self.vocab_size = core.vocab_size
        self.name_or_path = core.source
        self.padding_side = padding_side
        self.model_max_length = model_max_length

    @property
    def pad_token(self) -> str | None:
        """The token that fills rows up. Setting it raises ConfigError for an unknown one."""
        return None if self.pad_token_id is None else self.core.token_of(self.pad_token_id)

    @pad_token.setter
    def pad_token(self, token: str) -> None:
        if (id := self.core.id_of(token)) is None:
            raise ConfigError(f"pad_token: {token!r} is not in the vocabulary")
        self.pad_token_id = id

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of `apply_chat_template` and LLM.chat."""
        return self.core.chat_template

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        self.core = self.core.with_special(chat_template=template)

    @property
    def padding_side(self) -> str:
        """right or left. Setting it raises ConfigError for another one."""
        return self._padding_side

    @padding_side.setter
    def padding_side(self, side: str) -> None:
        if side not in ("right", "left"):
            raise ConfigError(f"padding_side: got {side!r}, expected right or left")
        self._padding_side = side

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path!r}, vocab_size={self.vocab_size})"

    @overload
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    @overload
    def encode(self, text: list[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    @overload
    def encode(self, text: Any, add_special_tokens: bool = True, **options: Any) -> Any: ...
    def encode(self, text: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        """The ids of a text, or of each of a list; `options` are those of a call."""
        return self(text, add_special_tokens=add_special_tokens, **options)["input_ids"]

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        max_length: int | None = None,
        padding: Any = False,
        truncation: Any = False,
        add_special_tokens: bool = True,
        return_tensors: Any = None,
        return_attention_mask: bool | None = None,
        return_token_type_ids: bool | None = None,
        return_length: bool = False,
        verbose: bool = True,
        **more: Any,
    ) -> BatchEncoding:
        """{"input_ids", "attention_mask"}: a list for a text, a list of lists for a list.

        Pads on `padding_side`, up to the longest text (True, "longest") or `max_length`; with
        `truncation` texts are cut to `max_length`, by default model_max_length. "np" gives int32
        arrays [texts, n], "ms" MindSpore's tensors. Raises ConfigError where a text is longer than
        it is to be padded to, and for lists that make no array.
        """
        for name, value in more.items():
            if name not in _OFF:
                raise ConfigError(f"{name}: a tokenizer has no such argument")
            if value not in _OFF[name]:
                raise ConfigError(f"{name}={show(value)} is not available", f"leave {name} out")
        texts = [text] if isinstance(text, str) else list(text)
        for index, one in enumerate(texts):
            if not isinstance(one, str):
                raise ConfigError(f"text[{index}]: got {type(one).__name__}, expected a string")
        batch = Padding(
            self.model_max_length if max_length is None else max_length,
            padding,
            truncation,
            self.pad_token_id,
            self.padding_side,
            self.core.source,
        )
        encoded = (one.ids if isinstance(one, _Chat) else None for one in texts)
        ids, masks = batch.rows(
            [
                self.core.encode(text, add_special_tokens) if known is None else known
                for text, known in zip(texts, encoded, strict=True)
            ]
        )
        found: dict[str, Any] = {"input_ids": ids}
        if return_token_type_ids:
            found["token_type_ids"] = [[0] * len(row) for row in ids]
        if return_attention_mask is not False:
            found["attention_mask"] = masks
        if return_length:
            found["length"] = [len(row) for row in ids]
        if return_tensors is not None:
            return as_tensors(found, return_tensors)
        if isinstance(text, str):
            found = {name: rows[0] for name, rows in found.items()}
        return BatchEncoding(found)

    def encode_plus(self, text: str, **options: Any) -> BatchEncoding:
        """As a call with one text."""
        return self(text, **options)

    def batch_encode_plus(self, texts: Sequence[str], **options: Any) -> BatchEncoding:
        """As a call with several texts."""
        return self(list(texts), **options)

    def apply_chat_template(
        self,
        conversation: Any,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """A conversation ([{"role", "content"}, ...]) in the model's template: its ids, or without
        `tokenize` the text; of a list of conversations a list of these.

        `options` are those of a call (max_length, padding, return_tensors, ...), and variables of
        the template (enable_thinking, ...). Raises ConfigError where there is no template, or one
        that does not read such a variable, ArtifactError where it fails.
        """
        messages = getattr(conversation, "messages", conversation)
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ConfigError(
                f"conversation: got {show(messages)}, expected a list of messages",
                "[{'role': 'user', 'content': 'Hello'}]",
            )
        several = not isinstance(messages[0], Mapping)
        template = chat_template or self.chat_template
        known = {*inspect.signature(self.__call__).parameters, *_OFF}
        kwargs = {name: options.pop(name) for name in [*options] if name not in known}
        asked = (add_generation_prompt, template, tools, kwargs)
        texts = [
            self._chat(getattr(one, "messages", one), *asked)
            for one in (messages if several else [messages])
        ]
        text = texts if several else texts[0]
        return self.encode(text, **{**options, "add_special_tokens": False}) if tokenize else text

    def _chat(
        self,
        messages: Any,
        add_generation_prompt: bool,
        template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        text = self.core.render_chat(messages, add_generation_prompt, template, tools, kwargs)
        if template or self.core.chat_form is None:
            return text
        listed = [dict(tool) for tool in tools or ()]
        return _Chat(text, self.core.encode_chat(messages, add_generation_prompt, listed))

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """The text of an id or of ids [n]; the texts of a list of such lists, arrays or tensors."""
        ids = as_arrays(token_ids)
        if _is_one(ids):
            ids = [ids]
        rows = [as_arrays(one) for one in ids]
        clean = bool(clean_up_tokenization_spaces)
        if rows and np.ndim(rows[0]):
            return [self._decode(row, skip_special_tokens, clean) for row in rows]
        return self._decode(rows, skip_special_tokens, clean)

    def batch_decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """The text of each row of ids."""
        clean = bool(clean_up_tokenization_spaces)
        return [
            self._decode(as_arrays(row), skip_special_tokens, clean) for row in as_arrays(token_ids)
        ]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text, as the vocabulary spells them."""
        return [self._token(id) for id in self.core.encode(text, add_special_tokens)]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or the ids of several; of one that there is not, that of unk_token."""
        if tokens is None or isinstance(tokens, str):
            id = self.core.id_of(tokens)
            return self.unk_token_id if id is None and tokens is not None else id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id, or the tokens of several. ConfigError for an id that there is not."""
        ids = as_arrays(ids)
        if _is_one(ids):
            return self._token(_checked_id(ids))
        skipped = self.core.special_ids if skip_special_tokens else ()
        checked = [_checked_id(as_arrays(id)) for id in ids]
        return [self._token(id) for id in checked if id not in skipped]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text that tokens spell."""
        return self.core.decode(self.convert_tokens_to_ids(tokens), skip_special_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""
        return self.core.vocabulary()

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """bos_token, eos_token, pad_token and unk_token, as far as there are any."""
        named = {name: getattr(self, name) for name in ("bos_token", "eos_token", "unk_token")}
        every = {**named, "pad_token": self.pad_token}
        return {name: token for name, token in every.items() if token is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens that are not text."""
        return [self._token(id) for id in self.all_special_ids]

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids."""
        return sorted(self.core.special_ids)

    def save_pretrained(
        self, save_directory: str | Path, save_name: str = "", save_json: bool = True
    ) -> tuple[str, ...]:
        """Write tokenizer.json and tokenizer_config.json into a folder, which is made; gives their
        paths. MindFormers' `save_name` and `save_json` change nothing: there is no yaml to write.

        Raises ConfigError where the folder cannot be written.
        """
        folder = Path(save_directory).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.core.files().items():
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"save_pretrained: {folder}: {error.strerror}") from error
        return tuple(str(folder / name) for name in self.core.files())

    def _decode(self, ids: Any, skip_special_tokens: bool, clean: bool) -> str:
        text = self.core.decode([_checked_id(id) for id in ids], skip_special_tokens)
        for spaced, written in _CLEANED if clean else ():
            text = text.replace(spaced, written)
        return text

    def _token(self, id: int) -> str:
        token = self.core.token_of(id)
        if token is None:
            raise ConfigError(f"got the id {id}, but the vocabulary has {self.vocab_size}")
        return token


def _checked_id(id: Any) -> int:
    if not 0 <= int(id) < 2**31:
        raise ConfigError(f"token ids: got {int(id)}, expected one from 0 on")
    return int(id)


def _is_one(ids: Any) -> bool:
    """True for an id, False for several."""
    return isinstance(ids, (int, np.integer)) or getattr(ids, "shape", None) == ()


def as_arrays(values: Any) -> Any:
    """`values`, a tensor as an array."""
    return values.asnumpy() if hasattr(values, "asnumpy") else values


def rows_of(input_ids: Any, model: Decoder, pad_token_id: int | None = None) -> list[list[int]]:
    """Rows of ids, one for a flat list, without padding at the end.

    `pad_token_id`: what they were padded with; None: the model's. Raises ConfigError for what is no
    id of the model.
    """
    values = as_arrays(input_ids)
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise ConfigError(f"input_ids: got {show(input_ids)}, expected a list of token ids")
    flat = len(values) > 0 and np.ndim(as_arrays(values[0])) == 0
    given = [values] if flat else [as_arrays(row) for row in values]
    rows = [[_token(id) for id in row] for row in given]
    pad = model.pad_token_id if pad_token_id is None else pad_token_id
    for index, row in enumerate(rows):
        wrong = next((id for id in row if not 0 <= id < model.vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"input_ids[{index}]: got the id {wrong}, expected 0 to {model.vocab_size - 1}",
                "use the model's own tokenizer",
            )
        while row and row[-1] == pad:
            row.pop()
    return rows


def _token(id: Any) -> int:
    if isinstance(id, bool) or not isinstance(id, (int, np.integer)):
        raise ConfigError(f"input_ids: got {show(id)}, expected token ids")
    return int(id)


_NO_PADDING = (False, None, "do_not_pad")
_TRUNCATES: dict[Any, bool] = {
    **dict.fromkeys((False, None, "do_not_truncate"), False),
    **dict.fromkeys((True, "longest_first", "only_first"), True),
}


class BatchEncoding(dict[str, Any]):
    """A tokenizer's result: a dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the encoding has no {name!r}, but {', '.join(self)}")


@dataclass(frozen=True)
class Padding:
    """Truncation and padding of rows to a batch."""

    max_length: int | None
    padding: Any
    truncation: Any
    pad: int | None  # token id
    side: str  # right or left
    source: str  # the tokenizer, for messages

    def rows(self, rows: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids and attention masks. Raises ConfigError where the rows do not fit."""
        if self.truncation not in _TRUNCATES:
            raise ConfigError(
                f"truncation: got {self.truncation!r}, expected True, False, 'longest_first' or"
                " 'only_first'"
            )
        length = self.max_length
        if length is not None and (type(length) is not int or length < 0):
            raise ConfigError(f"max_length: got {show(length)}, expected an integer >= 0")
        if _TRUNCATES[self.truncation] and length is not None:
            rows = [row[:length] for row in rows]
        width = self._width(max(map(len, rows), default=0))
        if self.pad is None and any(len(row) < width for row in rows):
            raise ConfigError(f"{self.source} has no padding token")
        missing = [max(0, width - len(row)) for row in rows]
        ids, masks = [], []
        for row, count in zip(rows, missing, strict=True):
            mask, masked = [1] * len(row), [0] * count
            padding = [self.pad or 0] * count
            left = self.side == "left"
            ids.append([*padding, *row] if left else [*row, *padding])
            masks.append([*masked, *mask] if left else [*mask, *masked])
        return ids, masks

    def _width(self, longest: int) -> int:
        """The length to pad to; 0: no padding."""
        if self.padding in _NO_PADDING:
            return 0
        if self.padding in (True, "longest"):
            return longest
        if self.padding != "max_length":
            raise ConfigError(
                f"padding: got {self.padding!r}, expected True, False, 'longest' or 'max_length'"
            )
        if self.max_length is None:
            raise ConfigError("padding='max_length' needs a max_length", "max_length=512")
        if longest > self.max_length:
            raise ConfigError(
                f"max_length: got {self.max_length}, but a text has {longest} tokens",
                "truncation=True cuts it",
            )
        return self.max_length


def as_tensors(values: dict[str, Any], kind: Any) -> BatchEncoding:
    """Lists [texts, n] as int32 arrays ("np") or MindSpore's tensors ("ms").

    Raises ConfigError for lists that make no array.
    """
    kind = getattr(kind, "value", kind)  # MindFormers' TensorType
    if kind not in ("np", "ms"):
        raise ConfigError(f"return_tensors: got {kind!r}, expected 'ms', 'np' or None")
    if len({len(row) for row in values["input_ids"]}) > 1:
        raise ConfigError("texts of different lengths do not form an array", "padding=True")
    arrays = {name: np.array(value, np.int32) for name, value in values.items()}
    if kind == "np":
        return BatchEncoding(arrays)
    from mindspore import Tensor  # only those who want one pay for it

    return BatchEncoding({name: Tensor(array) for name, array in arrays.items()})
