"""Fields of a Hugging Face config.json, validated for type and range."""

from __future__ import annotations

import sys
from typing import Any

from lite_runner.errors import ArtifactError

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096


class Fields:
    """Typed access to an untrusted config.json."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def with_defaults(self, **defaults: Any) -> Fields:
        """The same file with defaults for missing keys; an explicit null is kept."""
        return Fields(defaults | self.raw, self.where)

    def fault(self, key: str, got: object, expected: str) -> ArtifactError:
        text = repr(got)
        text = text if len(text) <= 80 else text[:77] + "..."
        return ArtifactError(f"{self.where}: {key} is {text}, expected {expected}")

    def get(self, *keys: str) -> tuple[str, Any]:
        """The first of `keys` that is present and not null, with its value (else None)."""
        for key in keys:
            if self.raw.get(key) is not None:
                return key, self.raw[key]
        return keys[0], None

    def integer(self, *keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        key, value = self.get(*keys)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= most:
            raise self.fault(key, value, f"an integer from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value: Any = self.raw.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.fault(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.raw.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.fault(key, value, "true or false")
        return value

    def refuse(self, key: str, default: bool, supported: bool) -> None:
        """Fail unless the flag `key` has its `supported` value."""
        if self.flag(key, default) != supported:
            raise ArtifactError(
                f"{self.where}: {key}={str(not supported).lower()} is not supported: "
                "it changes what the model computes"
            )

    def choice(self, key: str, allowed: tuple[str, ...]) -> None:
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            raise self.fault(key, value, " or ".join(allowed))

    def head_dim(self, hidden: int, heads: int) -> int:
        """Default head size where the file gives none."""
        if hidden % heads:
            raise self.fault("hidden_size", hidden, f"a multiple of the {heads} heads")
        return hidden // heads

    def tokens(self, vocab_size: int) -> dict[str, Any]:
        """The special tokens, as fields of Decoder."""
        ids: dict[str, Any] = {}
        for key in ("bos_token_id", "pad_token_id"):
            value = self.raw.get(key)
            # Older conversions of Llama write -1 where there is no such token.
            ids[key] = None if value is None or value == -1 else self._token(key, value, vocab_size)
        eos = self.raw.get("eos_token_id")
        listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
        ids["eos_token_id"] = tuple(self._token("eos_token_id", id, vocab_size) for id in listed)
        return ids

    def _token(self, key: str, value: object, vocab_size: int) -> int:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.fault(key, value, f"a token id from 0 to {vocab_size - 1}")
        return value
