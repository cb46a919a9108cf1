"""Following the outputs of a call: its usage, its times, its errors."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator

from lite_runner.serving.engine import Accepted, Ended, Failed, Output, Piece
from lite_runner.serving.errors import of_exception
from lite_runner.serving.state import Server, Usage


class Progress:
    """The state of one call: what it used and how long it took."""

    def __init__(self, server: Server, prompts: list[int], returns: int) -> None:
        """`prompts`: tokens of each; `returns`: sequences of each."""
        self.usage = Usage(prompt=sum(prompts))
        self.open = len(prompts) * returns  # sequences that are not over
        self._server, self._began = server, time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}  # time of the newest token
        server.metrics.prompt_tokens.inc(self.usage.prompt)
        server.metrics.prefix_queries.inc(self.usage.prompt)

    async def follow(
        self, outputs: AsyncIterator[tuple[int, Output]]
    ) -> AsyncGenerator[tuple[int, Piece | Ended], None]:
        """The pieces and ends of all sequences. Raises ApiError where one fails."""
        async for place, output in outputs:
            if isinstance(output, Failed):
                raise of_exception(output.error)
            if isinstance(output, Accepted):
                continue
            if isinstance(output, Piece):
                self._count(place, output)
            else:
                self._finish(output)
            yield place, output
            if not self.open:
                break
        self._server.metrics.whole.observe(time.perf_counter() - self._began)

    def _count(self, place: int, piece: Piece) -> None:
        metrics, now = self._server.metrics, time.perf_counter()
        self.usage.completion += 1
        metrics.generation_tokens.inc()
        before = self._last.get((place, piece.index))
        if before is not None:
            metrics.between_tokens.observe(now - before)
        elif not self._last:
            metrics.first_token.observe(now - self._began)
        self._last[place, piece.index] = now

    def _finish(self, ended: Ended) -> None:
        self.open -= 1
        self._server.metrics.finished(ended.finish_reason)
        completion = ended.completion
        if completion.end_token is not None:
            self.usage.completion += 1
        if ended.index == 0:  # the prompt is computed once for all of its sequences
            self.usage.cached += completion.cached_tokens
            self._server.metrics.queue.observe(completion.waited_s)
            self._server.metrics.prefix_hits.inc(completion.cached_tokens)
