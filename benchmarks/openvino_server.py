"""A server of OpenVINO GenAI's continuous batching, to load it as benchmarks/serve.py does others.

OpenVINO GenAI has an engine in its package, but no server. This one has as little as there can be
around it: /v1/models, and /v1/completions as streams. It checks nothing, and each token is spelled
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator
from typing import Any

import openvino_genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

Queue = asyncio.Queue[tuple[list[int], bool]]  # new tokens, and whether the answer is over


class Engine:
    """The pipeline in a thread of its own; requests come from the event loop."""

    def __init__(self, gguf: str, running: int, threads: int) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_seqs = running
        scheduling.enable_prefix_caching = True
        scheduling.cache_size = 1  # GB
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            gguf, scheduling, "CPU", properties
        )
        self.tokenizer = self._pipeline.get_tokenizer()
        self._changed = threading.Condition()
        self._added = 0
        self._open: list[tuple[Any, asyncio.AbstractEventLoop, Queue]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, prompt: str, options: Any) -> Queue:
        answers: Queue = asyncio.Queue()
        with self._changed:
            handle = self._pipeline.add_request(self._added, prompt, options)
            self._added += 1
            self._open.append((handle, asyncio.get_running_loop(), answers))
            self._changed.notify()
        return answers

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._open:
                    self._changed.wait()
                given = list(self._open)
            self._pipeline.step()
            for one in given:
                handle, loop, answers = one
                running = openvino_genai.GenerationStatus.RUNNING
                over = handle.get_status() != running  # before reading: nothing comes after it
                tokens = []
                while handle.can_read():
                    tokens += handle.read()[0].generated_ids
                if tokens or over:
                    loop.call_soon_threadsafe(answers.put_nowait, (tokens, over))
                if over:
                    with self._changed:
                        self._open.remove(one)


async def models(_: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [{"id": "base", "object": "model"}]})


async def completions(request: Request) -> StreamingResponse:
    body = await request.json()
    options = openvino_genai.GenerationConfig()
    options.max_new_tokens = body["max_tokens"]
    options.ignore_eos = body.get("ignore_eos", False)
    options.do_sample = False
    engine: Engine = request.app.state.engine
    return StreamingResponse(
        events(engine, engine.add(body["prompt"], options)), media_type="text/event-stream"
    )


async def events(engine: Engine, answers: Queue) -> AsyncGenerator[str, None]:
    """A chunk for each token, and the usage."""
    count, over = 0, False
    while not over:
        tokens, over = await answers.get()
        for token in tokens:
            count += 1
            choice = {"index": 0, "text": engine.tokenizer.decode([token]), "finish_reason": None}
            yield f"data: {json.dumps({'object': 'text_completion', 'choices': [choice]})}\n\n"
    usage = {"completion_tokens": count}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--running", type=int, default=8, help="sequences computed together")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )
    app.state.engine = Engine(given.gguf, given.running, given.threads)
    uvicorn.run(app, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
