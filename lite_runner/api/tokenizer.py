"""AutoTokenizer: texts to ids and back, in the way of MindFormers and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from lite_runner import model_files
from lite_runner.api.config import settings_of
from lite_runner.config.compose import options_of
from lite_runner.errors import ConfigError
from lite_runner.text.loading import load_tokenizer
from lite_runner.text.tokenizer import Tokenizer


class PreTrainedTokenizer:
    """Calls, encodes and decodes; `core` is the tokenizer that the rest of lite_runner uses."""

    def __init__(self, core: Tokenizer, pad_token_id: int | None = None) -> None:
        """`pad_token_id`: the model's, where the tokenizer's own files name none."""
        self.core = core
        own = core.pad_token_id
        ends = core.eos_token_ids
        self.pad_token_id = next(
            (id for id in (own, pad_token_id, *ends[:1]) if id is not None), None
        )
        self.bos_token_id = core.bos_token_id
        self.eos_token_id = ends[0] if ends else None
        self.vocab_size = core.vocab_size

    @overload
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    @overload
    def encode(self, text: list[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    def encode(
        self, text: str | list[str], add_special_tokens: bool = True
    ) -> list[int] | list[list[int]]:
        """The ids of a text, or of each of a list."""
        if isinstance(text, str):
            return self.core.encode(text, add_special_tokens)
        return [self.core.encode(one, add_special_tokens) for one in text]

    def __call__(
        self,
        text: str | list[str],
        *,
        max_length: int | None = None,
        padding: bool | Literal["max_length", "longest", "do_not_pad"] = False,
        truncation: bool = False,
        add_special_tokens: bool = True,
        return_tensors: Literal["np"] | None = None,
    ) -> dict[str, Any]:
        """{"input_ids", "attention_mask"}: a list for a text, a list of lists for a list.

        Pads on the right, up to the longest text (True, "longest") or `max_length`; with
        `truncation` texts are cut to `max_length`. "np" gives int32 arrays [texts, n]. Raises
        ConfigError where a text is longer than it is to be padded to, and for lists that make no
        array.
        """
        rows = self.encode([text] if isinstance(text, str) else text, add_special_tokens)
        if truncation and max_length is not None:
            rows = [row[:max_length] for row in rows]
        width = self._width(rows, max_length, padding)
        masks = [[1] * len(row) + [0] * max(0, width - len(row)) for row in rows]
        if width:
            pad = self._pad(width, rows)
            rows = [row + [pad] * (width - len(row)) for row in rows]
        if return_tensors == "np":
            if len({len(row) for row in rows}) > 1:
                raise ConfigError("texts of several lengths make no array", "padding=True")
            arrays = {"input_ids": rows, "attention_mask": masks}
            return {name: np.array(value, np.int32) for name, value in arrays.items()}
        if return_tensors is not None:
            raise ConfigError(f"return_tensors: got {return_tensors!r}, expected 'np' or None")
        if isinstance(text, str):
            return {"input_ids": rows[0], "attention_mask": masks[0]}
        return {"input_ids": rows, "attention_mask": masks}

    @overload
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...
    @overload
    def decode(
        self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]: ...
    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str | list[str]:
        """The text of ids [n]; the texts of a list of such lists or an array [texts, n]."""
        if len(token_ids) and np.ndim(token_ids[0]):
            return [self._decode(row, skip_special_tokens) for row in token_ids]
        return self._decode(token_ids, skip_special_tokens)

    def batch_decode(
        self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """The text of each list of ids."""
        return [self._decode(row, skip_special_tokens) for row in token_ids]

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.core.decode([int(id) for id in ids], skip_special_tokens)

    def _width(self, rows: list[list[int]], max_length: int | None, padding: bool | str) -> int:
        """The length to pad to; 0: no padding."""
        longest = max(map(len, rows), default=0)
        if padding in (False, "do_not_pad"):
            return 0
        if padding in (True, "longest"):
            return longest
        if padding != "max_length":
            raise ConfigError(
                f"padding: got {padding!r}, expected True, False, 'longest' or 'max_length'"
            )
        if max_length is None:
            raise ConfigError("padding='max_length' needs a max_length", "max_length=512")
        if longest > max_length:
            raise ConfigError(
                f"max_length: got {max_length}, but a text has {longest} tokens",
                "truncation=True cuts it",
            )
        return max_length

    def _pad(self, width: int, rows: list[list[int]]) -> int:
        if self.pad_token_id is not None:
            return self.pad_token_id
        if any(len(row) < width for row in rows):
            raise ConfigError(f"{self.core.source} names no token to pad with")
        return 0


class AutoTokenizer:
    """Finds tokenizers; has no objects of its own."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path) -> PreTrainedTokenizer:
        """The tokenizer of a model of conf/model, or in a folder or file.

        Raises ConfigError for an unknown name, ArtifactError where there is no tokenizer.
        """
        source = str(name_or_path)
        path = Path(source).expanduser()
        if source not in options_of("model") and path.exists():
            return PreTrainedTokenizer(load_tokenizer(path, model_vocab=None))
        config = settings_of(source)
        files = model_files.locate(config, weights=False)
        core = model_files.tokenizer_of(config, files)
        return PreTrainedTokenizer(core, files.model.pad_token_id)


class LlamaTokenizer(AutoTokenizer):
    """MindFormers' name; the kind of tokenizer follows from its file."""


class BloomTokenizer(AutoTokenizer):
    """MindFormers' name; the kind of tokenizer follows from its file."""
