"""Fields of a Hugging Face config.json: validated for type and range, and which of them were read.

Every field is followed or refused: a reader reads what it computes and refuses what it cannot; what
changes nothing is in NO_EFFECT, or in `no_effect` of its Architecture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lite_runner.errors import ArtifactError

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096
MAX_EXPERTS = 4096  # of a layer


class _Raw(Mapping[str, Any]):
    """A JSON object that records which keys it was asked for, present or not."""

    def __init__(self, values: Mapping[str, Any], read: set[str], prefix: str) -> None:
        self.given = values
        self.read = read
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        self.read.add(self.prefix + key)
        return self.given[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


class Fields:
    """Typed access to an untrusted config.json.

    `read` records the keys that were asked for, each with `prefix`; `unread` lists the others.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str, *, read: set[str] | None = None, prefix: str = ""
    ) -> None:
        self.raw = _Raw(raw, set() if read is None else read, prefix)
        self.where = where

    def with_defaults(self, **defaults: Any) -> Fields:
        """The same file with defaults for missing keys; an explicit null is kept."""
        return self._with(defaults | dict(self.raw.given))

    def with_values(self, **values: Any) -> Fields:
        """The same file with these values in place of its own."""
        return self._with(dict(self.raw.given) | values)

    def _with(self, values: Mapping[str, Any]) -> Fields:
        return Fields(values, self.where, read=self.raw.read, prefix=self.raw.prefix)

    def section(self, key: str) -> Fields:
        """The object under `key`; without it, or if it is null, an empty one."""
        value = {} if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, dict):
            raise self.invalid(key, value, "an object")
        prefix = f"{self.raw.prefix}{key}."
        return Fields(value, f"{self.where}: {key}", read=self.raw.read, prefix=prefix)

    def unread(self) -> list[str]:
        """Keys that nobody asked for, `section.key` for one in a section that was read; null ones,
        which say nothing, are left out."""
        return list(_unread(self.raw.given, self.raw.prefix, self.raw.read))

    def invalid(self, key: str, got: object, expected: str) -> ArtifactError:
        return ArtifactError(f"{self.where}: {key} is {_short(repr(got))}, expected {expected}")

    def get(self, *keys: str) -> tuple[str, Any]:
        """The first of `keys` that is present and not null, with its value (else None)."""
        given = {key: self.raw.get(key) for key in keys}  # asks for all of them
        return next(((key, one) for key, one in given.items() if one is not None), (keys[0], None))

    def integer(self, *keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        key, value = self.get(*keys)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= most:
            raise self.invalid(key, value, f"an integer from 1 to {most:,}")
        return value

    def index(self, key: str, default: int) -> int:
        """An integer from 0."""
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise self.invalid(key, value, "an integer from 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value: Any = self.raw.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.invalid(key, value, "a number above 0")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers above 0."""
        values: Any = self.raw.get(key)
        found = values if isinstance(values, list) else []
        if len(found) != count or not all(
            type(one) in (int, float) and 0 < one <= sys.float_info.max for one in found
        ):
            raise self.invalid(key, values, f"a list of {count} numbers above 0")
        return tuple(map(float, found))

    def optional_integer(self, key: str) -> int | None:
        return None if self.raw.get(key) is None else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.raw.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.invalid(key, value, "true or false")
        return value

    def neutral(self, **values: Any) -> None:
        """Fail if a field has another value than the one given here, with which it changes nothing;
        null and absent count as that value."""
        for key, value in values.items():
            found = self.raw.get(key)
            if isinstance(value, bool) and found is not None:
                found = self.flag(key, value)
            if found is not None and found != value:
                raise ArtifactError(
                    f"{self.where}: {key}={_short(json.dumps(found))} is not supported: "
                    "it changes what the model computes"
                )

    def choice(self, key: str, allowed: tuple[str, ...]) -> None:
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            raise self.invalid(key, value, " or ".join(allowed))

    def head_dim(self, hidden: int, heads: int) -> int:
        """Default head size where the file gives none."""
        if hidden % heads:
            raise self.invalid("hidden_size", hidden, f"a multiple of the {heads} heads")
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
            raise self.invalid(key, value, f"a token id from 0 to {vocab_size - 1}")
        return value


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _unread(values: Mapping[str, Any], prefix: str, read: set[str]) -> Iterator[str]:
    for key, value in values.items():
        name = prefix + key
        if name not in read and value is not None:
            yield name
        if isinstance(value, dict) and any(one.startswith(f"{name}.") for one in read):
            yield from _unread(value, f"{name}.", read)


_ORIGIN = "says where the files are from"
TRAINING = "only in training"
_OUTPUT = "what a Python call returns"
CLASSES = "of a head that classifies"
_DTYPE = "weights are read in the dtype they are stored in; compute_dtype= is the run's"
KERNEL = "how transformers computes it, not what"
_SAMPLING = "defaults of sampling: a run has its own keys"

NO_EFFECT = {
    "_name_or_path": _ORIGIN,
    "_commit_hash": _ORIGIN,
    "transformers_version": _ORIGIN,
    "transformers.js_config": _ORIGIN,
    "unsloth_version": _ORIGIN,
    "unsloth_fixed": _ORIGIN,
    "architectures": "the tensors tell",
    "auto_map": "a note says that its code is not run",
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "attention_dropout": TRAINING,
    "attention_probs_dropout_prob": TRAINING,
    "hidden_dropout": TRAINING,
    "hidden_dropout_prob": TRAINING,
    "initializer_range": TRAINING,
    "gradient_checkpointing": TRAINING,
    "neftune_noise_alpha": TRAINING,
    "use_bfloat16": TRAINING,
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "return_dict": _OUTPUT,
    "use_return_dict": _OUTPUT,
    "torchscript": _OUTPUT,
    "classifier_dropout": CLASSES,
    "finetuning_task": CLASSES,
    "id2label": CLASSES,
    "label2id": CLASSES,
    "num_labels": CLASSES,
    "problem_type": CLASSES,
    "chunk_size_feed_forward": KERNEL,
    "use_cache": KERNEL,
    "_attn_implementation": KERNEL,
    "_attn_implementation_autoset": KERNEL,
    "attn_implementation": KERNEL,
    "_flash_attn_2_enabled": KERNEL,
    "is_decoder": "all models here are decoders",
    "cross_attention_hidden_size": "there is no cross attention",
    "tie_encoder_decoder": "there is no encoder",
    "decoder_start_token_id": "there is no encoder",
    "sep_token_id": "of the tokenizer",
    "unk_token_id": "of the tokenizer",
    "tokenizer_class": "of the tokenizer",
    "prefix": "of a pipeline in Python",
    "task_specific_params": "of a pipeline in Python",
    "max_length": _SAMPLING,
    "min_length": _SAMPLING,
    "do_sample": _SAMPLING,
    "early_stopping": _SAMPLING,
    "num_beams": _SAMPLING,
    "num_beam_groups": _SAMPLING,
    "diversity_penalty": _SAMPLING,
    "temperature": _SAMPLING,
    "top_k": _SAMPLING,
    "top_p": _SAMPLING,
    "typical_p": _SAMPLING,
    "repetition_penalty": _SAMPLING,
    "length_penalty": _SAMPLING,
    "no_repeat_ngram_size": _SAMPLING,
    "encoder_no_repeat_ngram_size": _SAMPLING,
    "bad_words_ids": _SAMPLING,
    "num_return_sequences": _SAMPLING,
    "output_scores": _SAMPLING,
    "return_dict_in_generate": _SAMPLING,
    "forced_bos_token_id": _SAMPLING,
    "forced_eos_token_id": _SAMPLING,
    "remove_invalid_values": _SAMPLING,
    "exponential_decay_length_penalty": _SAMPLING,
    "suppress_tokens": _SAMPLING,
    "begin_suppress_tokens": _SAMPLING,
}


def refuse_variants(fields: Fields) -> None:
    """Fail on a field of any family that changes what it computes. Raises ArtifactError."""
    fields.neutral(
        add_cross_attention=False, is_causal=True, is_encoder_decoder=False, pruned_heads={}
    )
