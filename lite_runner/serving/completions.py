"""/v1/completions, and usage and log-probabilities in the forms of OpenAI and vLLM."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Completion, Logprobs
from lite_runner.serving.engine import Busy, Ended, Piece
from lite_runner.serving.errors import ApiError
from lite_runner.serving.metrics import RequestStats, Usage
from lite_runner.serving.sampling import adjustments, generation_options, grammar_for
from lite_runner.serving.schemas import CompletionRequest, Sampling
from lite_runner.serving.state import Server
from lite_runner.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
_LOWEST = -9999.0  # in place of minus infinity, which is not JSON


class Completions:
    """One call: its prompts, and the answer in both forms."""

    def __init__(self, server: Server, body: CompletionRequest) -> None:
        """Raises ApiError for an unsupported request, and Busy if too many wait."""
        self._server, self._body = server, body
        self._adapter = server.adapter_of(body.model)
        self._priority = server.priority_of(body.priority)
        self._adjustments = adjustments(body, server.engine.info.vocab_size)
        self._grammar = grammar_for(body)
        self._given = _prompts(body)
        if len(self._given) > 1 and server.engine.most < len(self._given) * (body.n or 1):
            raise Busy
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or server.name,
        }
        self.streams = bool(body.stream)

    async def prepare(self) -> None:
        """Tokenize the prompts. Raises ApiError for one that does not fit."""
        body, server = self._body, self._server
        special = body.add_special_tokens is not False
        self._prompts = [
            await server.encode(one, special) if isinstance(one, str) else one
            for one in self._given
        ]
        self._options = [
            generation_options(body, server.defaults, ids, server.engine.info)
            for ids in self._prompts
        ]
        self._adjustments = await server.restricted(self._adjustments, self._grammar)
        self.stats = RequestStats(server.metrics, [len(ids) for ids in self._prompts], body.n or 1)
        # Text before the first new token, if the request asks for it.
        self._echoes = [""] * len(self._prompts)
        if body.echo:
            decode = server.tokenizer.decode
            self._echoes = await server.aside(lambda: [decode(ids) for ids in self._prompts])

    def replayed(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request body that reproduces the answer."""
        return replayed(body, self._body)

    async def whole(self) -> dict[str, Any]:
        texts: dict[int, str] = {}
        ended: dict[int, Ended] = {}
        async with aclosing(self._outputs()) as outputs:
            async for place, output in outputs:
                choice = self._choice(place, output.index)
                texts[choice] = texts.get(choice, "") + output.text
                if isinstance(output, Ended):
                    ended[choice] = output

        def all_choices() -> list[dict[str, Any]]:
            return [self._whole_choice(at, texts[at], ended[at]) for at in sorted(ended)]

        choices = await self._server.aside_if(self.is_large, all_choices)
        return self._head | {"choices": choices, "usage": usage_of(self.stats.usage)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The streamed answer: a chunk for each token."""
        body, server = self._body, self._server
        logprobs: dict[int, CompletionLogprobs] = {}
        echoed: set[int] = set()
        async with aclosing(self._outputs()) as outputs:
            async for place, output in outputs:
                choice, text = self._choice(place, output.index), output.text
                first = choice not in echoed
                if first:
                    echoed.add(choice)
                    text = self._echoes[place] + text
                make = partial(self._next_logprobs, logprobs, place, output, first=first)
                found = await server.aside_if(first and self.is_large, make)
                reason = output.finish_reason if isinstance(output, Ended) else None
                chunk = {"index": choice, "text": text, "logprobs": found, "finish_reason": reason}
                if first and body.prompt_logprobs is not None:
                    prompt, of_it = self._prompts[place], of_prompt(output)
                    tell = partial(prompt_logprobs, server.tokenizer, prompt, of_it)
                    chunk["prompt_logprobs"] = await server.aside(tell)
                yield self._head | {"choices": [chunk]}
        if body.stream_options is not None and body.stream_options.include_usage:
            yield self._head | {"choices": [], "usage": usage_of(self.stats.usage)}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last chunk of a stream that is cut."""
        return error.body()

    def _next_logprobs(
        self,
        earlier: dict[int, CompletionLogprobs],
        place: int,
        output: Piece | Ended,
        *,
        first: bool,
    ) -> dict[str, Any] | None:
        """Log-probabilities of a chunk: of its token, and with echo of the prompt in the
        first one. `earlier`: those of the chunks before, by choice."""
        is_token = isinstance(output, Piece) and output.logprobs is not None
        echoes = first and bool(self._body.echo) and self._body.logprobs is not None
        if not (is_token or echoes):
            return None
        choice = self._choice(place, output.index)
        offset = earlier[choice].offset if choice in earlier else 0
        earlier[choice] = CompletionLogprobs(self._server.tokenizer, offset)
        if echoes:
            self._add_prompt(earlier[choice], place, of_prompt(output))
        if isinstance(output, Piece) and output.logprobs is not None:
            earlier[choice].add(output.token, output.logprobs)
        return earlier[choice].plain

    def _add_prompt(self, logprobs: CompletionLogprobs, place: int, found: Logprobs | None) -> None:
        for at, token in enumerate(self._prompts[place]):
            logprobs.add(token, found if at else None, at - 1)

    @property
    def is_large(self) -> bool:
        """True if the answer has as many log-probabilities as the prompts have tokens,
        which would hold up the event loop."""
        body = self._body
        return body.prompt_logprobs is not None or bool(body.echo and body.logprobs is not None)

    async def _outputs(self) -> AsyncGenerator[tuple[int, Piece | Ended], None]:
        work: list[tuple[Sequence[int], GenerationConfig]]
        work = list(zip(self._prompts, self._options, strict=True))
        answer = self._server.answer(work, self._adapter, self._adjustments, self._priority)
        async with answer as outputs, aclosing(self.stats.follow(outputs)) as followed:
            async for one in followed:
                yield one

    def _choice(self, place: int, index: int) -> int:
        return place * (self._body.n or 1) + index

    def _whole_choice(self, index: int, text: str, ended: Ended) -> dict[str, Any]:
        place = index // (self._body.n or 1)
        choice = {
            "index": index,
            "text": self._echoes[place] + text,
            "logprobs": self._logprobs(place, ended.completion),
            "finish_reason": ended.finish_reason,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._server.tokenizer, self._prompts[place], of_prompt(ended)
            )
        return choice

    def _logprobs(self, place: int, completion: Completion) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        logprobs = CompletionLogprobs(self._server.tokenizer)
        if self._body.echo:
            self._add_prompt(logprobs, place, completion.prompt_logprobs)
        for row, token in enumerate(completion.token_ids):
            logprobs.add(token, completion.logprobs, row)
        return logprobs.plain


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """Each text, or its token ids. Raises ApiError for too many."""
    given: Any = body.prompt
    found = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if len(found) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: {len(found)}, at most {MAX_PROMPTS} at a time", "prompt")
    return found


def of_prompt(output: Piece | Ended) -> Logprobs | None:
    """Log-probabilities of the prompt, from the first output."""
    return (output.completion if isinstance(output, Ended) else output).prompt_logprobs


def usage_of(usage: Usage) -> dict[str, Any]:
    details = {}
    if usage.reasoning is not None:
        details["reasoning_tokens"] = usage.reasoning
    if usage.drafted:  # as OpenAI calls them
        details["accepted_prediction_tokens"] = usage.accepted
        details["rejected_prediction_tokens"] = usage.drafted - usage.accepted
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        **({"completion_tokens_details": details} if details else {}),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], found: Logprobs | None
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: of each prompt token and the likeliest ones there, by token id;
    None for the first, which nothing predicts."""
    rows: list[dict[str, Any] | None] = [None]
    if found is None:
        return rows
    for row, token in enumerate(prompt[1:]):
        values = dict(zip(found.top_ids[row].tolist(), found.top[row].tolist(), strict=True))
        values.setdefault(token, float(found.chosen[row]))
        rows.append(
            {
                str(id): {"logprob": value, "decoded_token": token_text(tokenizer, id)}
                for id, value in values.items()
            }
        )
    return rows


def replayed(given: Mapping[str, Any], body: Sampling) -> dict[str, Any]:
    """The body of a request that gives the same answer again, in one: with the seed that was
    drawn."""
    rest = {name: one for name, one in given.items() if name not in ("stream", "stream_options")}
    return {**rest, "seed": body.seed}


class CompletionLogprobs:
    """choices[].logprobs of a completion."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """`offset`: characters of the text before the first token."""
        self._tokenizer, self._offset = tokenizer, offset
        self.plain: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }

    @property
    def offset(self) -> int:
        """Characters so far."""
        return self._offset

    def add(self, token: int, found: Logprobs | None, row: int = 0) -> None:
        """A token, and `row` of `found`; None: nothing predicts it."""
        text = token_text(self._tokenizer, token)
        self.plain["text_offset"].append(self._offset)
        self.plain["tokens"].append(text)
        self._offset += len(text)
        if found is None:
            self.plain["token_logprobs"].append(None)
            self.plain["top_logprobs"].append(None)
            return
        self.plain["token_logprobs"].append(max(float(found.chosen[row]), _LOWEST))
        pairs = zip(found.top_ids[row].tolist(), found.top[row].tolist(), strict=True)
        best: dict[str, float] = {}
        for id, value in pairs:  # two tokens may read the same
            best.setdefault(token_text(self._tokenizer, id), max(value, _LOWEST))
        self.plain["top_logprobs"].append(best)


def chat_entry(tokenizer: Tokenizer, token: int, found: Logprobs) -> dict[str, Any]:
    """One element of choices[].logprobs.content: `found` is of this token alone."""

    def entry(id: int, value: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, id),
            "logprob": max(float(value), _LOWEST),
            "bytes": token_bytes(tokenizer, id),
        }

    pairs = zip(found.top_ids[0].tolist(), found.top[0].tolist(), strict=True)
    return entry(token, found.chosen[0]) | {"top_logprobs": [entry(*pair) for pair in pairs]}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone as text; bytes that are no whole character are U+FFFD."""
    return tokenizer.decode([token], skip_special_tokens=False)


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    if tokenizer.spelling is not None:
        return list(tokenizer.token_bytes(token, skip_special_tokens=False))
    return list(token_text(tokenizer, token).encode())
