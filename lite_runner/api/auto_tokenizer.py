"""AutoTokenizer, and MindFormers' names of tokenizers, whose kind follows from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lite_runner.api.settings import resolve_source
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.config import did_you_mean, nearest, show
from lite_runner.config.groups import options_of
from lite_runner.errors import ConfigError
from lite_runner.model.locate import downloaded_tokenizer, locate, tokenizer_of
from lite_runner.text import CHAT_FORMS, load_tokenizer
from lite_runner.text.chatglm_chat import ChatForm
from lite_runner.text.tokenizer import Tokenizer

# Arguments of MindFormers' tokenizers that change no id.
_NO_EFFECT = frozenset(
    "auto_register backend from_slow model_input_names tokenizer_class trust_remote_code type"
    " use_fast".split()
)
# Those that would change ids, and their values that do not: the files decide.
_FIXED: dict[str, tuple[Any, ...]] = {
    "add_prefix_space": (False, None),
    "additional_special_tokens": (None, []),
    "clean_up_tokenization_spaces": (False, None),
    "errors": ("replace",),
    "legacy": (True, None),
    "sp_model_kwargs": (None, {}),
    "split_special_tokens": (False,),
    "truncation_side": ("right",),
}
_OWN = ("padding_side", "model_max_length")
_CHANGES = {
    "add_bos_token": "add_bos",
    "add_eos_token": "add_eos",
    "bos_token": "bos",
    "pad_token": "pad",
    "unk_token": "unk",
    "chat_template": "chat_template",
}


def with_settings(core: Tokenizer, settings: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer with `settings` over those of its files, and the keyword arguments of a
    PreTrainedTokenizer among them.

    Raises ConfigError for one that there is not, ArtifactError for a token that there is not.
    """
    changes: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _OWN:
            own[name] = value
        elif name == "eos_token" and value is None:
            continue  # that of the files
        elif name == "eos_token":
            changes["eos"] = (str(getattr(value, "content", value)),)
        elif name in _CHANGES:
            changes[_CHANGES[name]] = getattr(value, "content", value)  # of an AddedToken
        elif name in _FIXED and value not in _FIXED[name]:
            raise ConfigError(
                f"{name}={show(value)} is not supported: the tokenizer's files decide",
                "set it in tokenizer_config.json, or in tokenizer.json",
            )
        elif name not in _FIXED and name not in _NO_EFFECT:
            known = (*_OWN, *_CHANGES, "eos_token", *_FIXED, *_NO_EFFECT)
            near = did_you_mean(nearest(name, known))
            raise ConfigError(f"{name}={show(value)}: no such setting of a tokenizer{near}")
    return core.with_special(**changes) if changes else core, own


class AutoTokenizer:
    """Finds tokenizers; has no objects of its own."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **settings: Any) -> PreTrainedTokenizer:
        """The tokenizer of a model of conf/model, or in a folder or file.

        `settings` are laid over what its files say: pad_token, padding_side, add_bos_token, ...
        Raises ConfigError for an unknown name, ArtifactError where there is no tokenizer.
        """
        core, pad = _found(str(name_or_path))
        core, own = with_settings(core, settings)
        return PreTrainedTokenizer(core, pad, **own)


def _found(source: str, form: ChatForm | None = None) -> tuple[Tokenizer, int | None]:
    """The tokenizer of a name or path, and the token that the model pads with."""
    path = Path(source).expanduser()
    if source not in options_of("model") and path.exists():
        return load_tokenizer(path, model_vocab=None, chat_form=form), None
    config = resolve_source(source)
    model, place = config.model_config(), downloaded_tokenizer(config.trainer.model_name)
    if place is not None and model is not None and not config.tokenizer.named:
        kind = form or CHAT_FORMS.get(config.processor.tokenizer.type)
        core = load_tokenizer(place, model_vocab=model.vocab_size, chat_form=kind)
        return core, model.pad_token_id
    files = locate(config.source, weights=False)
    return tokenizer_of(config.tokenizer, files), files.model.pad_token_id


class _FamilyTokenizer(PreTrainedTokenizer):
    """MindFormers' names of a tokenizer; its kind follows from its file."""

    _pad: str  # the token that it pads with where its files name none

    def __init__(
        self,
        vocab_file: str | Path | None = None,
        merges_file: str | Path | None = None,
        tokenizer_file: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Of a tokenizer.model, a tokenizer.json, a vocab.json with its merges, or their folder.

        `settings` as of AutoTokenizer.from_pretrained. Raises ConfigError, ArtifactError.
        """
        given = tokenizer_file or vocab_file
        if given is None:
            raise ConfigError(f"{type(self).__name__}: no vocab_file given")
        path = Path(given).expanduser()
        if merges_file is not None and Path(merges_file).expanduser() != path.parent / "merges.txt":
            raise ConfigError(
                f"merges_file: got {merges_file}, expected merges.txt beside {path}",
                "put both files into one folder, and give that folder",
            )
        form = CHAT_FORMS.get(type(self).__name__)
        core = load_tokenizer(path, model_vocab=None, chat_form=form)
        pad = core.id_of(self._pad)
        core, own = with_settings(core, settings)
        super().__init__(core, pad, **own)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **settings: Any) -> PreTrainedTokenizer:
        """As AutoTokenizer.from_pretrained, an object of this class."""
        core, pad = _found(str(name_or_path), CHAT_FORMS.get(cls.__name__))
        pad = core.id_of(cls._pad) if pad is None else pad
        core, own = with_settings(core, settings)
        tokenizer = cls.__new__(cls)
        PreTrainedTokenizer.__init__(tokenizer, core, pad, **own)
        return tokenizer


class BloomTokenizer(_FamilyTokenizer):
    """MindFormers' name of a BLOOM's."""

    _pad = "<pad>"


class BloomTokenizerFast(BloomTokenizer):
    """All tokenizers are fast ones here."""


class ChatGLMTokenizer(_FamilyTokenizer):
    """MindFormers' name of a ChatGLM-6B's."""

    _pad = "<pad>"


class ChatGLM2Tokenizer(_FamilyTokenizer):
    """MindFormers' name of a ChatGLM2's."""

    _pad = "<unk>"


class ChatGLM3Tokenizer(ChatGLM2Tokenizer):
    """MindFormers' name of a ChatGLM3's, which has another chat."""


class GPT2Tokenizer(_FamilyTokenizer):
    """MindFormers' name of a GPT-2's."""

    _pad = "<|endoftext|>"


class GPT2TokenizerFast(GPT2Tokenizer):
    """All tokenizers are fast ones here."""


class LlamaTokenizer(_FamilyTokenizer):
    """MindFormers' name of a Llama's."""

    _pad = "<unk>"


class LlamaTokenizerFast(LlamaTokenizer):
    """All tokenizers are fast ones here."""


class Qwen2Tokenizer(_FamilyTokenizer):
    """MindFormers' name of a Qwen2's."""

    _pad = "<|endoftext|>"


class Qwen2TokenizerFast(Qwen2Tokenizer):
    """All tokenizers are fast ones here."""


class AutoProcessor:
    """Finds processors; of text they have a tokenizer, and nothing else."""

    def __init__(self, tokenizer: PreTrainedTokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path) -> AutoProcessor:
        """The processor; raises as AutoTokenizer.from_pretrained."""
        return cls(AutoTokenizer.from_pretrained(name_or_path))
