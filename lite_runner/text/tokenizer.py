"""Tokenizer: text to token ids and back, independent of the file format."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.records import dataclass
from lite_runner.text.spelling import byte_alphabet, byte_spellings, spelling_of

if TYPE_CHECKING:
    from lite_runner.text.chatglm_chat import ChatForm
    from lite_runner.text.gguf import LazyTokenizer

_CLASSES = {  # tokenizer_class of tokenizer_config.json, by chat form
    None: "PreTrainedTokenizerFast",
    "chatglm2": "ChatGLM2Tokenizer",
    "chatglm3": "ChatGLM3Tokenizer",
}

# Private-use characters, which no vocabulary has in a token with others.
_MARKS = ("\ue000", "\uf8ff", "\U000f0000", "\U0010fffd")
_STAND_IN = 0x100000  # the first stand-in for single-character tokens


_BEGIN, _END = re.compile(r"\{[%{]"), re.compile(r"[%}]\}")  # of a template's blocks
# String literals in blocks; an unterminated one takes the rest, so that no character is read twice.
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z)""", re.DOTALL)
_CHAT_VARIABLES = {"messages", "tools", "add_generation_prompt"}
_PART = 1 << 15  # characters of a text that are encoded at a time
_USUAL_CHARS = 4  # per token, of a text that fits; longer ones are counted in parts


class TooManyTokens(ConfigError):
    """A text has far more tokens than fit."""


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens from a tokenizer's files; None: not specified."""

    bos: str | None = None
    eos: tuple[str, ...] = ()  # each ends the sequence
    pad: str | None = None
    unk: str | None = None
    add_bos: bool | None = None  # None: keep the post-processor of tokenizer.json
    add_eos: bool | None = None


class Tokenizer:
    """Encodes, decodes and renders chats.

    `backend` is the vocabulary and its rules; this object takes ownership. `source` is the file
    name for error messages, and `template_source` that of the template where it is another.
    With a `chat_form` chats are of that form, and special tokens written out in a text stay text.
    `vocab_size` is as the property, for who knows it: looking takes long.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | LazyTokenizer,
        special: SpecialTokens,
        *,
        source: str,
        chat_template: str | None = None,
        template_source: str | None = None,
        chat_form: ChatForm | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._backend = backend
        if vocab_size is not None:
            self.vocab_size = vocab_size
        self.chat_form = chat_form
        backend.encode_special_tokens = chat_form is not None
        self._special = special
        self._chat_template = chat_template
        self.source = source
        self._template_source = template_source or source
        # Truncation or padding in a tokenizer.json would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self._set_post_processor()
        self.spelling = spelling_of(backend.decoder)  # None: only the library can decode
        added = backend.get_added_tokens_decoder()
        self._special_texts = {id: one.content for id, one in added.items() if one.special}
        self._special_ids = frozenset(self._special_texts)
        # Added tokens, such as <tool_call>, count as special too, except runs of spaces.
        texts = [one.content for one in added.values() if one.special or one.content.strip()]
        self._control_texts = [text for text in texts if len(text) > 1]
        single = sorted(text for text in texts if len(text) == 1)
        self._stand_ins = {text: chr(_STAND_IN + place) for place, text in enumerate(single)}
        self.special_in_messages = True  # written out there, special tokens are recognized
        self.template_kwargs: Mapping[str, Any] = {}  # variables of the chat template

    def complete(self) -> None:
        """Load the rest, which a single short prompt does without, before many come."""
        if (whole := getattr(self._backend, "whole", None)) is not None:
            self._backend = whole()

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognized. Other threads run
        meanwhile. With `most` a text that has more than twice as many raises TooManyTokens, as
        soon as that is known."""
        self._check_unicode(text)
        self._check_length(text, most)
        return self._ids(text, add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        most: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a rendered chat. The template writes bos itself, so none is added. `tools`
        are as OpenAI's protocol has them, `most` as `encode` has it, and `template_kwargs` are
        variables of the template on top of the tokenizer's own. Raises ConfigError for one that the
        template does not read."""
        for message in messages:
            self._check_length(message.get("content") or "", most)
        if self.chat_form is not None and self._chat_template is None:
            self.check_template_kwargs(template_kwargs or {})
            parts = self.chat_parts(messages, add_generation_prompt, tools)
            return [id for part in parts for id in self.part_ids(part, most)]
        if not self.special_in_messages:
            return self._literal_chat(
                messages, add_generation_prompt, tools or (), most, template_kwargs
            )
        text = self.render_chat(
            messages, add_generation_prompt, tools=tools, template_kwargs=template_kwargs
        )
        return self.encode(text, False, most)

    def chat_parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[str]:
        """A rendered chat in the parts that `part_ids` encodes: one text of a template, several
        texts and tags of a chat form."""
        if self.chat_form is None or self._chat_template is not None:
            return [self.render_chat(messages, add_generation_prompt, tools=tools)]
        from lite_runner.text.chatglm_chat import parts

        return list(parts(self.chat_form, _with_content(messages), add_generation_prompt, tools))

    def part_ids(self, part: str, most: int | None = None) -> list[int]:
        """Token ids of a part of a chat; see `encode`."""
        from lite_runner.text.chatglm_chat import Tag

        return self._ids_of(part) if isinstance(part, Tag) else self.encode(part, False, most)

    def _literal_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]],
        most: int | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> list[int]:
        """Token ids of a chat where special tokens written out in messages and tools are text, and
        those of the template are not: a mark within the former hides them from the library, and
        the mark's own tokens are dropped. Nothing goes within one character, which another one
        stands in for."""
        kwargs = template_kwargs or {}
        given = json.dumps([messages, tools, kwargs], ensure_ascii=False)
        if any(stand_in in given for stand_in in self._stand_ins.values()):
            raise _not_text()
        for mark in _MARKS:
            if mark in given:
                continue
            hidden, offered = self._marked(messages, mark), self._marked(tools, mark)
            chosen = self._marked(kwargs, mark)
            text = self.render_chat(
                hidden, add_generation_prompt, tools=offered, template_kwargs=chosen
            )
            self._check_unicode(text)
            self._check_length(text, most)
            if (ids := self._ids_without(text, mark)) is not None:
                return ids
        raise _not_text()

    def _marked(self, value: Any, mark: str) -> Any:
        """`value` with a mark within all control tokens that are written out in its texts."""
        if isinstance(value, Mapping):
            return {
                # Templates compare these, and look values up by keys.
                key if key.isidentifier() else self._marked(key, mark): one
                if key in ("role", "type") and isinstance(one, str) and one.isidentifier()
                else self._marked(one, mark)
                for key, one in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._marked(one, mark) for one in value]
        if not isinstance(value, str):
            return value
        places = {
            found.start() + 1
            for token in self._control_texts
            if token in value
            for found in re.finditer(f"(?={re.escape(token)})", value)
        }
        cuts = [0, *sorted(places), len(value)]
        text = mark.join(value[start:end] for start, end in itertools.pairwise(cuts))
        for token, stand_in in self._stand_ins.items():
            text = text.replace(token, stand_in)
        return text

    def _ids_without(self, text: str, mark: str) -> list[int] | None:
        """Token ids of `text` but for its marks, and with what its stand-ins stand for; None where
        one is part of another token, or something else than a special token's own text is read as
        one."""
        with self._library_errors():
            (encoded,) = self._backend.encode_batch([text], add_special_tokens=False)
        unknown = getattr(self._backend.model, "unk_token", None)
        meant = {stand_in: token for token, stand_in in self._stand_ins.items()}
        ids: list[int] = []
        last = -1  # end of the newest placeholder, of which each byte may be a token
        for id, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            piece = text[start:end]
            if piece == mark:
                continue
            if piece in meant:
                if end != last:
                    ids += self._plain_ids(meant[piece])
                last = end
                continue
            special = self._special_texts.get(id)
            hidden = mark in piece or not meant.keys().isdisjoint(piece)
            if hidden or special not in (None, unknown, piece.strip()):
                return None
            ids.append(id)
        return ids

    def _plain_ids(self, character: str) -> list[int]:
        """Token ids of a character that is a token of its own, as text: those of its bytes, or the
        unknown one. Raises ConfigError where the vocabulary has neither."""
        for tokens in byte_spellings(character):
            ids = [id for token in tokens if (id := self.id_of(token)) is not None]
            if self.decode(ids, skip_special_tokens=False) == character:
                return ids
        unknown = self.id_of(getattr(self._backend.model, "unk_token", None) or self._special.unk)
        if unknown is None:
            raise _not_text()
        return [unknown]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids beyond the vocabulary (embedding padding) are skipped.

        Only invalid UTF-8 bytes become U+FFFD: the library's sentencepiece decoder would also
        replace valid bytes next to them.
        """
        if self.spelling is not None:
            data = b"".join(self.token_bytes(id, skip_special_tokens) for id in ids)
            text = data.decode("utf-8", "replace")
            return text.removeprefix(" ") if self.spelling.strips_space else text
        with self._library_errors():
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, id: int, skip_special_tokens: bool = True) -> bytes:
        """Bytes of a token; empty if it is skipped. Needs `spelling`."""
        token: str | None = self._backend.id_to_token(id)
        skipped = skip_special_tokens and id in self._special_ids
        if token is None or skipped or self.spelling is None:
            return b""
        return self.spelling.to_bytes(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render chat `messages` ({"role", "content"} each) with `template` or the model's own. See
        encode_chat."""
        messages = _with_content(messages)
        source = self.source if template else self._template_source
        template = template or self._chat_template
        variables = {**self.template_kwargs, **(template_kwargs or {})}
        self.check_template_kwargs(variables, template)
        if template is None and self.chat_form is not None:
            return "".join(self.chat_parts(messages, add_generation_prompt, tools))
        if template is None:
            raise ConfigError(
                f"{self.source} has no chat template",
                hint="use a model tuned for chat (often named -Instruct), give the template"
                " (processor.tokenizer.chat_template=), or run_mode=predict without chat=true",
            )
        from lite_runner.text.chat_templates import render_template  # imports jinja2

        return render_template(
            template,
            {
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                **({"tools": [dict(tool) for tool in tools]} if tools else {}),
                **self.named_tokens(),
                **variables,
            },
            source=source,
        )

    def template_reads(self, name: str, *, of_messages: bool = False) -> bool:
        """True where the chat template has a variable, or a message's field, of this name."""
        return reads(self._chat_template, name, fields=of_messages)

    def check_template_kwargs(self, given: Mapping[str, Any], template: str | None = None) -> None:
        """Raises ConfigError for a name that `template`, or the model's own, does not read."""
        template = template or self._chat_template
        for name in given:
            if name in _CHAT_VARIABLES:
                raise ConfigError(f"chat_template_kwargs: {name} is not a setting of the template")
            if not reads(template, name):
                raise ConfigError(
                    f"chat_template_kwargs: the model's chat template does not read {name!r}",
                    "leave it out, or name a template that does"
                    " (processor.tokenizer.chat_template=)",
                )

    def files(self) -> dict[str, str]:
        """This tokenizer as tokenizer.json and tokenizer_config.json: text by file name.

        The config holds only the first eos token.
        """
        config = {
            "tokenizer_class": _CLASSES[self.chat_form],
            "clean_up_tokenization_spaces": False,  # else transformers changes decoded spaces
            **self.named_tokens(),
            "add_bos_token": self._special.add_bos,
            "add_eos_token": self._special.add_eos,
            "chat_template": self._chat_template,
        }
        stated = {key: value for key, value in config.items() if value is not None}
        return {
            "tokenizer.json": self._backend.to_str(pretty=True) + "\n",
            "tokenizer_config.json": json.dumps(stated, indent=2) + "\n",
        }

    def with_special(
        self, *, prefix_space: bool = False, more: Sequence[str] = (), **changes: Any
    ) -> Tokenizer:
        """The same vocabulary with other SpecialTokens (by field), or another `chat_template`.

        `prefix_space` writes a space before every text; `more` tokens are special too, and text is
        split at them as at those that begin or end it. Raises ArtifactError if a token is not in
        the vocabulary.
        """
        if len(changes.keys() & {"add_bos", "add_eos"}) == 1:  # the other is kept
            ids = self.encode("")
            adds_eos = ids[-1:] != [] and ids[-1] in self.eos_token_ids
            changes = {"add_bos": self.bos_token_id in ids, "add_eos": adds_eos} | changes
        template_source = self.source if "chat_template" in changes else self._template_source
        template = changes.pop("chat_template", self._chat_template)
        special = replace(self._special, **changes)
        for token in (special.bos, *special.eos, special.pad, special.unk, *more):
            if token is not None and self.id_of(token) is None:
                raise ArtifactError(f"{self.source}: {token!r} is not in the vocabulary")
        copied = tokenizers.Tokenizer.from_str(self._backend.to_str())
        given = [changes.get("bos"), *changes.get("eos", ()), *more]
        new = [one for one in given if one and self.id_of(one) not in self.special_ids]
        copied.add_special_tokens(special_tokens(new))
        if prefix_space:
            rest = [copied.normalizer] if copied.normalizer is not None else []
            copied.normalizer = normalizers.Sequence([normalizers.Prepend(" "), *rest])
        copy = Tokenizer(
            copied,
            special,
            source=self.source,
            chat_template=template,
            template_source=template_source,
            chat_form=self.chat_form,
        )
        copy.special_in_messages = self.special_in_messages
        copy.template_kwargs = self.template_kwargs
        return copy

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._library_errors():  # a batch of one releases the GIL; encode() does not
            batch = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def _check_length(self, text: str, most: int | None) -> None:
        """Raises TooManyTokens. The parts of a text have its tokens, except at the cuts."""
        if most is None or len(text) <= max(_PART, _USUAL_CHARS * most):
            return
        count = 0
        for start in range(0, len(text), _PART):
            count += len(self._ids(text[start : start + _PART], False))
            if count > 2 * most:
                raise TooManyTokens(
                    f"the context of {most} tokens cannot hold {len(text)} characters: the first"
                    f" {min(start + _PART, len(text))} have {count} tokens"
                )

    def _ids_of(self, token: str) -> list[int]:
        id = self.id_of(token)
        if id is None:
            raise ArtifactError(f"{self.source}: {token!r} is not in the vocabulary")
        return [id]

    def id_of(self, token: str | None) -> int | None:
        """The id of a token; None if it is not in the vocabulary."""
        id: int | None = None if token is None else self._backend.token_to_id(token)
        return id

    def token_of(self, id: int) -> str | None:
        token: str | None = self._backend.id_to_token(id)
        return token

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id + 1: the minimum vocabulary size of a model."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def bos_token_id(self) -> int | None:
        return self.id_of(self._special.bos)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = (self.id_of(token) for token in self._special.eos)
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    @property
    def pad_token_id(self) -> int | None:
        return self.id_of(self._special.pad)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None or self.chat_form is not None

    def named_tokens(self) -> dict[str, str]:
        """The special tokens by their names in chat templates and tokenizer_config.json."""
        special = self._special
        names = {
            "bos_token": special.bos,
            "eos_token": special.eos[0] if special.eos else None,
            "pad_token": special.pad,
            "unk_token": special.unk,
        }
        return {name: token for name, token in names.items() if token is not None}

    @staticmethod
    def _check_unicode(text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text is not valid Unicode at character {error.start}: "
                f"{text[error.start : error.end]!r}",
                hint="pass the text as UTF-8",
            ) from error

    @contextlib.contextmanager
    def _library_errors(self) -> Iterator[None]:
        """The library's exceptions as ArtifactError; its panics are not Exceptions."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            message = " ".join(str(error).split())[:200]
            raise ArtifactError(
                f"{self.source}: the tokenizer failed: {message}",
                "use the tokenizer that was published with the model",
            ) from error

    def _set_post_processor(self) -> None:
        """Apply add_bos and add_eos if either is specified."""
        special = self._special
        if special.add_bos is None and special.add_eos is None:
            return
        before = [special.bos] if special.add_bos and special.bos else []
        after = [special.eos[0]] if special.add_eos and special.eos else []
        enclose(self._backend, before, after, source=self.source)


def _not_text() -> ConfigError:
    return ConfigError(
        "a special token is written out in a message, and cannot be kept as text",
        hint="special_tokens_in_text=true takes it as the token",
    )


def _with_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A turn of tool calls alone has no content; templates would print "None"."""
    return [
        {**message, "content": ""} if message.get("content", "") is None else dict(message)
        for message in messages
    ]


def reads(template: str | None, name: str, *, fields: bool = False) -> bool:
    """True where a template has a variable of this name; or `fields`, that of a message."""
    if not template or name not in template:  # an untrusted name may be as long as a request
        return False
    blocks = _blocks(template)
    if fields:
        return any(re.search(rf"\b{re.escape(name)}\b", block) for block in blocks)
    # Not in string literals, not a message's field, and not a keyword argument.
    word = rf"(?<![\w.]){re.escape(name)}(?!\w|\s*=[^=])"
    return any(re.search(word, _QUOTED.sub("''", block)) for block in blocks)


def _blocks(template: str) -> Iterator[str]:
    """The statements and expressions of a template."""
    end = 0
    while (begin := _BEGIN.search(template, end)) and (found := _END.search(template, begin.end())):
        end = found.end()
        yield template[begin.start() : end]


def special_tokens(texts: Iterable[str]) -> list[AddedToken]:
    """Special tokens to add to a vocabulary, found in a text as they are spelled."""
    return [AddedToken(text, normalized=False, special=True) for text in texts]


def enclose(
    backend: tokenizers.Tokenizer | LazyTokenizer,
    before: Sequence[str],
    after: Sequence[str],
    *,
    source: str,
) -> None:
    """Put these tokens before and after every text.

    Raises ArtifactError naming `source` where the vocabulary lacks one.
    """
    ids = {token: backend.token_to_id(token) for token in (*before, *after)}
    for token, id in ids.items():
        if id is None:
            raise ArtifactError(f"{source}: {token!r} is not in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=list(ids.items())
    )


def byte_tokenizer() -> Tokenizer:
    """The built-in tokenizer of random models: ids 0..255 are bytes, then <s>, </s>, <pad>."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special_tokens(("<s>", "</s>", "<pad>")))
    return Tokenizer(
        backend,
        SpecialTokens(bos="<s>", eos=("</s>",), pad="<pad>"),
        source="the built-in byte tokenizer",
    )
