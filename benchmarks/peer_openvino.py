"""One process of OpenVINO GenAI; prints one line of JSON.

It reads the float16 GGUF that llama.cpp's process made of the model (its reader takes neither
float32 nor bfloat16), one row, token ids in and out, greedily. `--type` is the precision that it
computes with.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from measure import Measurement, engine_parser, requantized, seconds_since_start


class Tokens(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Puts each token, and at the end None, into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def write(self, tokens: int | list[int]) -> openvino_genai.StreamingStatus:
        for token in tokens if isinstance(tokens, list) else [tokens]:
            self.queue.put(token)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        self.queue.put(None)


def generated(
    pipeline: openvino_genai.LLMPipeline, prompt: Sequence[int], count: int
) -> Iterator[list[int]]:
    """The next token of the row, `count` times; no end token stops it."""
    config = openvino_genai.GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False
    )
    ids = np.array([prompt], np.int64)
    inputs = openvino_genai.TokenizedInputs(
        openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
    )
    tokens = Tokens()
    work = threading.Thread(target=pipeline.generate, args=(inputs, config, tokens))
    work.start()
    while (token := tokens.queue.get()) is not None:
        yield [token]
    work.join()


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--made", type=Path, required=True, help="folder with its F16.gguf")
    parser.add_argument("--type", choices=["bf16", "f32"], required=True)
    arguments = parser.parse_args()
    (prompt,) = arguments.prompts
    path = requantized(arguments.gguf, arguments.made, "F16")
    started = time.perf_counter()
    pipeline = openvino_genai.LLMPipeline(
        str(path),
        "CPU",
        INFERENCE_NUM_THREADS=arguments.threads,
        INFERENCE_PRECISION_HINT=arguments.type,
    )
    load_s = time.perf_counter() - started
    tuple(generated(pipeline, prompt, 1))
    first_token_s = seconds_since_start()
    tuple(generated(pipeline, prompt[::-1], 1))  # else it would find the prompt in its cache
    Measurement.of(
        f"OpenVINO {arguments.type}",
        arguments.prompts,
        generated(pipeline, prompt, arguments.new_tokens),
        first_token_s=first_token_s,
        load_s=load_s,
        files=[path],
    ).print()


if __name__ == "__main__":
    main()
