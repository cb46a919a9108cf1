"""/v1/embeddings and /v1/rerank"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic_core import to_json

from lite_runner.config.generation import GenerationConfig, Pooling
from lite_runner.errors import ConfigError
from lite_runner.generation import Completion
from lite_runner.generation.pooling import first_numbers
from lite_runner.serving.engine import Busy, Ended
from lite_runner.serving.errors import ApiError
from lite_runner.serving.metrics import RequestStats
from lite_runner.serving.sampling import check_prompt
from lite_runner.serving.schemas import (
    Described,
    FieldError,
    ListsOfIds,
    Message,
    RequestBody,
    Texts,
    TokenIds,
)
from lite_runner.serving.state import Server
from lite_runner.text.thinking import thinking_switch

MAX_INPUTS = 2048  # texts of a request, as OpenAI has it
MAX_NUMBERS = 1 << 21  # of an answer, which are 45 MB of JSON
_AGAIN_S = 0.05  # until more texts of a request are offered to a full queue
_OPTIONS = GenerationConfig(max_new_tokens=0)
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class EmbeddingRequest(Described):
    """/v1/embeddings"""

    model: str | None = None
    # A text, several, the token ids of one, or of several.
    input: str | TokenIds | Texts | ListsOfIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None  # null: all
    normalize: bool | None = None  # to length 1; null: as the checkpoint says, or true
    prompt_name: str | None = None  # of a text of the checkpoint's before each; null: its usual one
    add_special_tokens: bool | None = None
    priority: int | None = None

    @model_validator(mode="after")
    def _check(self) -> EmbeddingRequest:
        if not self.input or (isinstance(self.input, list) and [] in self.input):
            raise FieldError("input", "empty")
        return self

    @property
    def texts(self) -> Sequence[str | list[int]]:
        """Each text, or its token ids."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class Document(RequestBody):
    text: str


Documents = Annotated[
    list[str | Document], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
]


class RerankRequest(Described):
    """/v1/rerank"""

    model: str | None = None
    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=1)] | None = None  # null: all
    return_documents: bool | None = None  # null: true
    instruction: str | None = None  # the criterion of relevance
    priority: int | None = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class _Prompts:
    """The prompts of a request, of each of which one completion without tokens is asked."""

    def __init__(self, server: Server, model: str | None, priority: int | None) -> None:
        """Raises ApiError."""
        self._server, self._adapter = server, server.adapter_of(model)
        self._priority = server.priority_of(priority)
        self.stats = RequestStats(server.metrics, [], 0)

    async def each(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: Pooling | None,
        take: Callable[[int, Completion], None],
    ) -> None:
        """Call `take` with the number and the completion of each prompt. No more of them are in
        the queue than have cache slots, so that other requests get theirs between. Raises ApiError,
        TimeoutError, and Busy where none can wait."""
        work = self._each(prompts, pooling, take)
        try:
            await asyncio.wait_for(work, self._server.settings.request_timeout)
        except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
            raise TimeoutError from None

    async def _each(
        self,
        prompts: Sequence[Sequence[int]],
        pooling: Pooling | None,
        take: Callable[[int, Completion], None],
    ) -> None:
        slots = self._server.engine.info.slots
        # Prompts of similar lengths together.
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        for start in range(0, len(order), slots):
            places = order[start : start + slots]
            while True:
                try:
                    await self._batch(places, [prompts[one] for one in places], pooling, take)
                    break
                except Busy:
                    if start == 0:
                        raise
                    await asyncio.sleep(_AGAIN_S)

    async def _batch(
        self,
        places: Sequence[int],
        prompts: Sequence[Sequence[int]],
        pooling: Pooling | None,
        take: Callable[[int, Completion], None],
    ) -> None:
        answer = self._server.answer(
            [(ids, _OPTIONS) for ids in prompts],
            self._adapter,
            None,
            self._priority,
            pooling=pooling,
            keep_logits=pooling is None,
        )
        async with answer as outputs:
            stats = RequestStats(self._server.metrics, [len(ids) for ids in prompts], 1)
            async with aclosing(stats.follow(outputs)) as followed:
                async for place, output in followed:
                    if isinstance(output, Ended):
                        take(places[place], output.completion)
        self.stats.usage.prompt += stats.usage.prompt
        self.stats.usage.cached += stats.usage.cached


class EmbeddingCall(_Prompts):
    """A request for embeddings."""

    def __init__(self, server: Server, body: EmbeddingRequest) -> None:
        """Raises ApiError for an unsupported request."""
        super().__init__(server, body.model, body.priority)
        self._body, self._texts = body, body.texts
        info, count = server.engine.info, len(body.texts)
        if not info.hidden_size:
            raise ApiError(400, f"model: {info.engine} gives no embeddings", "model")
        if count > MAX_INPUTS:
            raise ApiError(400, f"input: {count} texts, at most {MAX_INPUTS} at a time", "input")
        try:
            self._before = server.embedding.prompt(body.prompt_name)
        except ConfigError as error:
            raise ApiError(400, f"prompt_name: {error.message}", "prompt_name") from None
        if body.prompt_name is not None and not all(isinstance(one, str) for one in body.texts):
            raise ApiError(400, "prompt_name: expected texts, got token ids", "prompt_name")
        self._numbers = body.dimensions or info.hidden_size
        if self._numbers > info.hidden_size:
            raise ApiError(
                400,
                f"dimensions: got {self._numbers}, expected at most {info.hidden_size}",
                "dimensions",
            )
        if count * self._numbers > MAX_NUMBERS:
            most = MAX_NUMBERS // self._numbers
            raise ApiError(
                400, f"input: {count} texts, at most {most} of {self._numbers} numbers", "input"
            )

    async def compute(self) -> None:
        """Compute the embeddings. Raises ApiError as `each`, and for a text that does not fit."""
        server, body = self._server, self._body
        special = body.add_special_tokens is not False
        prompts, usual = [], server.embedding
        normalize = usual.normalize if body.normalize is None else body.normalize
        for one in self._texts:
            text = self._before + one if isinstance(one, str) else ""
            ids = one if isinstance(one, list) else await server.encode(text, special, "input")
            check_prompt(ids, server.engine.info, "input")
            prompts.append(ids)
        self._found = np.zeros((len(prompts), self._numbers), np.float32)

        def take(place: int, completion: Completion) -> None:
            assert completion.embedding is not None
            self._found[place] = first_numbers(
                completion.embedding, self._numbers, normalize=normalize
            )

        await self.each(prompts, usual.pooling or "last", take)

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The JSON of the answer in parts, each of which is written in a moment."""
        yield b'{"object":"list","data":['
        for index, row in enumerate(self._found):
            one = {"object": "embedding", "index": index, "embedding": self._written(row)}
            yield (b"," if index else b"") + to_json(one)
        tokens = self.stats.usage.prompt
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        model = self._body.model or self._server.name
        yield b'],"model":%b,"usage":%b}' % (to_json(model), to_json(usage))

    def _written(self, row: NDArray[np.float32]) -> str | list[float]:
        if self._body.encoding_format == "base64":
            return base64.b64encode(row.astype("<f4").tobytes()).decode()
        numbers: list[float] = row.tolist()
        return numbers


class RerankCall(_Prompts):
    """A request for the relevance of documents, by the probability of yes against no as the first
    token of the model's answer: as Qwen3-Reranker is trained to say, and others by its words."""

    def __init__(self, server: Server, body: RerankRequest) -> None:
        """Raises ApiError for an unsupported request."""
        super().__init__(server, body.model, body.priority)
        self._body = body
        if not server.tokenizer.has_chat_template:
            raise ApiError(
                400, f"model: {server.name} has no chat template; use /v1/embeddings", "model"
            )
        self._words = [server.tokenizer.encode(word, False)[0] for word in ("yes", "no")]
        if self._words[0] == self._words[1]:
            raise ApiError(400, "model: yes and no begin with the same token", "model")
        try:
            self._kwargs = dict(thinking_switch(server.tokenizer.chat_template, False))
        except ConfigError as error:
            raise ApiError(400, f"model: {error.message}", "model") from None

    async def whole(self) -> dict[str, Any]:
        """The answer. Raises ApiError as `each`, and for a document that does not fit."""
        server, body = self._server, self._body
        texts, prompts = body.texts, []
        for text in texts:
            asked = f"<Instruct>: {body.instruction or _INSTRUCTION}\n<Query>: {body.query}"
            messages = [
                Message(role="system", content=_SYSTEM),
                Message(role="user", content=f"{asked}\n<Document>: {text}"),
            ]
            prompts.append(await server.encode_chat(messages, True, None, self._kwargs))
            check_prompt(prompts[-1], server.engine.info, "documents")
        scores = np.zeros(len(prompts))

        def take(place: int, completion: Completion) -> None:
            assert completion.logits is not None
            yes, no = completion.logits[self._words].astype(np.float64)
            scores[place] = 1 / (1 + np.exp(no - yes))

        await self.each(prompts, None, take)
        order = np.argsort(-scores, kind="stable").tolist()[: body.top_n]
        results = []
        for place in order:
            found = {"index": place, "relevance_score": float(scores[place])}
            if body.return_documents is not False:
                found["document"] = {"text": texts[place]}
            results.append(found)
        tokens = self.stats.usage.prompt
        return {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": body.model or server.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results,
        }
