"""Prompt an exported model: run_infer_main.py with MindFormers' flags.

    python scripts/run_infer_main.py --model_dir path/to/exported --stream True
    python scripts/run_infer_main.py --model_name tiny_llama      # exported when it is first asked

It asks for prompts until one is `exit`, unless --predict_data gives one. Wrong flags end it with
2, and everything else with the exit codes of run_lite.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner import AutoTokenizer, TextGenerationPipeline, TextStreamer, pipeline, str2bool
from lite_runner.app import guarded
from lite_runner.errors import ConfigError

MAX_LENGTH = 512
GENERATION = ("do_sample", "top_k", "top_p", "repetition_penalty", "temperature", "max_length")


def parser() -> argparse.ArgumentParser:
    """The flags of MindFormers' run_infer_main.py."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = flags.add_argument
    add(
        "--model_name",
        default="common",
        help="a model of conf/model, or its family (bloom, glm, glm2, glm3, gpt2, llama); common:"
        " as exported",
    )
    add("--model_dir", help="folder of an exported model")
    add("--prefill_model_path", help="MindIR of whole prompts")
    add("--increment_model_path", help="MindIR of single tokens")
    add("--tokenizer_path", help="folder or file of the tokenizer; default: the model's own")
    add("--config_path", default="", help="config.ini of the GE graph engine")
    add("--device_id", type=int, default=0)
    add("--rank_id", type=int, default=0)
    add("--seq_length", type=int, default=2048, help="prompt and new tokens together")
    add("--batch_size", type=int, default=1, help="how often the prompt is computed at once")
    add("--max_length", type=int, help="prompt and new tokens together, at most; default: 512")
    add("--do_sample", type=str2bool, help="default: greedy unless one of the next three is given")
    add("--top_k", type=int)
    add("--top_p", type=float)
    add("--temperature", type=float)
    add("--repetition_penalty", type=float, default=1.0)
    add(
        "--is_sample_acceleration", type=str2bool, default=False, help="the graph chooses the token"
    )
    add(
        "--add_special_tokens",
        type=str2bool,
        default=False,
        help="as the tokenizer's own rules say",
    )
    add("--stream", type=str2bool, default=False, help="print the text while it is made")
    add("--prompt", help="a text around the question, which takes the place of {}")
    add("--predict_data", help="one question, instead of asking for some")
    add("--generated_time", type=int, default=1, help="how often each question is answered")
    return flags


class TokenTimes:
    """A streamer that prints the latency of each token and forwards the tokens."""

    def __init__(self, streamer: TextStreamer | None) -> None:
        self._streamer = streamer
        self._last: float | None = None

    def put(self, value: Any) -> None:
        """The prompt, then a token at a time."""
        now = time.perf_counter()
        if self._streamer is not None:
            self._streamer.put(value)
        elif self._last is not None:
            print(f"one token takes {now - self._last} s", flush=True)
        self._last = time.perf_counter()

    def end(self) -> None:
        """The sequence is over."""
        self._last = None
        if self._streamer is not None:
            self._streamer.end()


def build(arguments: argparse.Namespace) -> TextGenerationPipeline:
    """The pipeline over the exported model that the flags name. Raises RunnerError."""
    paths = (arguments.prefill_model_path, arguments.increment_model_path)
    given = tuple(path for path in paths if path)
    model = arguments.model_dir or given or arguments.model_name
    if model == "common":
        raise ConfigError("no model given", "--model_dir DIR, or --model_name NAME")
    path = arguments.tokenizer_path
    return pipeline(
        "text_generation",
        model,
        AutoTokenizer.from_pretrained(path) if path else None,
        backend="mslite",
        model_name=arguments.model_name,
        ge_config_path=arguments.config_path,
        device_id=arguments.device_id,
        rank_id=arguments.rank_id,
        infer_seq_length=arguments.seq_length,
    )


def questions(arguments: argparse.Namespace, ask: Callable[[str], str]) -> Iterator[str]:
    """Prompts, until `exit` or the end of the input."""
    if arguments.predict_data is not None:
        yield arguments.predict_data
        return
    while True:
        try:
            question = ask("please enter your predict data: ")
        except EOFError:
            return
        if question.strip() == "exit":
            return
        if question.strip():
            yield question


def answer(arguments: argparse.Namespace, infer: TextGenerationPipeline, question: str) -> None:
    """Print the completion of one question, and what each token took."""
    template = arguments.prompt
    text = question if template is None else template.replace("{}", question)
    options = {name: getattr(arguments, name) for name in GENERATION}
    if options["max_length"] is None:  # of what was not typed no more is asked than can be
        options["max_length"] = min(MAX_LENGTH, infer.model.max_length)
    streamer = TextStreamer(infer.tokenizer) if arguments.stream else None
    result = infer(
        [text] * arguments.batch_size,
        streamer=TokenTimes(streamer),
        add_special_tokens=arguments.add_special_tokens,
        is_sample_acceleration=arguments.is_sample_acceleration,
        **options,
    )
    if not arguments.stream:
        print([one for row in result for one in row["text_generation_text"]], flush=True)


def main(
    argv: list[str] | None = None,
    build: Callable[[argparse.Namespace], TextGenerationPipeline] = build,
    ask: Callable[[str], str] = input,
) -> int:
    """Run the loop; gives the exit code."""
    arguments = parser().parse_args(argv)

    def action() -> int:
        infer = build(arguments)
        for question in questions(arguments, ask):
            for _ in range(arguments.generated_time):
                answer(arguments, infer, question)
        return 0

    return guarded(action)


if __name__ == "__main__":
    sys.exit(main())
