"""The generation options of a request, and its grammar."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lite_runner.backends import BackendInfo
from lite_runner.config.generation import STRUCTURED_KEYS, GenerationConfig, decided
from lite_runner.config.prompt import OWN
from lite_runner.generation import Adjustments
from lite_runner.serving.errors import ApiError
from lite_runner.serving.schemas import ChatRequest, CompletionRequest, Sampling
from lite_runner.structured.grammars import Grammar, grammar_of

# Options with a meaning, or a form, of OpenAI's.
_OF_OPENAI = ("max_new_tokens", "seed", "stop", "logprobs", "prompt_logprobs")
USUAL_TOKENS = 16  # of a completion without max_tokens, as OpenAI has it


def generation_options(
    body: Sampling, defaults: GenerationConfig, prompt: Sequence[int], info: BackendInfo
) -> GenerationConfig:
    """For a prompt's tokens; without a limit the answer may fill the context.

    Raises ApiError where they contradict each other or do not fit, or the backend cannot do it.
    """
    field = "messages" if isinstance(body, ChatRequest) else "prompt"
    limit = _limit(body)
    check_prompt(prompt, info, field, 1 if limit is None else limit)
    room = info.max_length - len(prompt)
    if limit is None:
        usual = defaults.max_new_tokens or (room if isinstance(body, ChatRequest) else USUAL_TOKENS)
        limit = min(usual, room)
    given, n = decided(_given(body)), body.n or 1
    samples = given.pop("do_sample", defaults.do_sample)
    temperature = given.pop("temperature", defaults.temperature)
    options = replace(
        defaults,
        max_new_tokens=limit,
        max_length=None,
        do_sample=samples,
        temperature=temperature if samples else 1.0,
        num_return_sequences=n,
        seed=seeded(body) % 2**63,
        stop=body.stops or defaults.stop,
        logprobs=_logprobs(body),
        prompt_logprobs=_prompt_logprobs(body),
        eos_token_id=_ends(body, defaults),
        **given,
    )
    if n > 1 and not samples:
        raise ApiError(400, f"n={n}: greedy answers are all the same; temperature above 0", "n")
    if min(n, info.slots) > 1 and not info.can_copy:
        raise ApiError(400, f"n={n}: {info.engine} gives one answer at a time", "n")
    _check_prompt_logprobs(body, options, info)
    if options.min_new_tokens > limit:
        raise ApiError(
            400, f"min_tokens: got {options.min_new_tokens}, expected at most {limit}", "min_tokens"
        )
    return options


def seeded(body: Sampling) -> int:
    """The seed of a request, drawn where it has none."""
    if body.seed is None:
        body.seed = secrets.randbits(63)
    return body.seed


def check_prompt(prompt: Sequence[int], info: BackendInfo, field: str, new: int = 0) -> None:
    """Raise ApiError for token ids that the model does not take, or that leave no room for so many
    `new` ones."""
    if not prompt:
        raise ApiError(400, f"{field}: no tokens", field)
    if info.max_length - len(prompt) < new:
        wanted = f" and {new} new ones" if new > 1 else ""
        raise ApiError(
            400,
            f"the context of {info.max_length} tokens cannot hold {len(prompt)} of the"
            f" prompt{wanted}",
            field,
            "context_length_exceeded",
        )
    if (last := max(prompt)) >= info.vocab_size:
        raise ApiError(
            400, f"{field}: got token {last}, expected 0 to {info.vocab_size - 1}", field
        )
    if lacks := info.prompt_error(np.array(prompt, np.int32)):
        raise ApiError(400, f"{field}: {lacks}", field)


def _check_prompt_logprobs(body: Sampling, options: GenerationConfig, info: BackendInfo) -> None:
    if options.prompt_logprobs is None:
        return
    field = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
    if not info.most_logits:
        why = f"{info.engine} gives logits after a prompt's last token only"
    elif info.prefix is not None:
        why = "each token of the model's prefix sees those behind it"
    else:
        return
    raise ApiError(400, f"{field}: {why}", field)


def adjustments(body: Sampling, vocab: int) -> Adjustments | None:
    """Changes of the scores; None: none. Raises ApiError for a token beyond the vocabulary."""
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    for token in bias:
        if token >= vocab:
            raise ApiError(
                400, f"logit_bias: got token {token}, expected 0 to {vocab - 1}", "logit_bias"
            )
    return Adjustments(tuple(bias.items())) if bias else None


def grammar_for(body: Sampling) -> Grammar | None:
    """The grammar that the answer is restricted to; None: none. Raises GrammarError for two
    grammars, and ApiError for one with another field that contradicts it."""
    found = grammar_of(body.model_dump(include=set(STRUCTURED_KEYS), by_alias=True))
    if found is not None:
        check_free_end(body, found.field)
    return found


def check_free_end(body: Sampling, field: str) -> None:
    """A grammar says where an answer ends. Raises ApiError for fields that say so, too."""
    for name, value in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if value:
            raise ApiError(400, f"{name}: cannot be combined with {field}", name)


def _limit(body: Sampling) -> int | None:
    """New tokens that are asked for."""
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _given(body: Sampling) -> dict[str, Any]:
    """Options that have the server's default where the request has none."""
    given = {name: getattr(body, name, None) for name in OWN if name not in _OF_OPENAI}
    given |= {
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_new_tokens": body.min_tokens,
    }
    return {name: value for name, value in given.items() if value is not None}


def _ends(body: Sampling, defaults: GenerationConfig) -> tuple[int, ...]:
    """Tokens that end the answer."""
    usual = () if body.ignore_eos else defaults.eos_token_id
    return tuple(dict.fromkeys((*usual, *(body.stop_token_ids or ()))))


def _logprobs(body: Sampling) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    assert isinstance(body, ChatRequest)
    return (body.top_logprobs or 0) if body.logprobs else None


def _prompt_logprobs(body: Sampling) -> int | None:
    """The number of log-probabilities of the prompt: asked for, or implied by `echo`."""
    if body.prompt_logprobs is None and isinstance(body, CompletionRequest) and body.echo:
        return body.logprobs
    return body.prompt_logprobs
