"""One process of transformers + torch in fp32 on SmolLM2; prints one line of JSON.

Greedy by a loop of our own over the model's public forward with a DynamicCache: on two threads
it is as fast as generate() or faster in every measurement, and faster than a StaticCache at
batch 8. Attention is torch's fused one, transformers' default. No tokenizer: ids in, ids out.

Needs: torch, transformers, accelerate (transformers reads GGUF only with it), gguf.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import Measurement, mebibytes, peak_rss_mib, seconds_since_start
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging


def load_gguf(gguf: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's weights as safetensors; transformers refuses to save the model itself."""
    source = load_gguf(gguf)
    del source.config.quantization_config
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    unfinished = folder.with_name(folder.name + ".part")
    model.save_pretrained(unfinished)
    unfinished.replace(folder)


def greedy(model: torch.nn.Module, prompts: torch.Tensor, new_tokens: int) -> Iterator[list[int]]:
    """The next token of every row, new_tokens times; no end token stops a row."""
    cache = DynamicCache(config=model.config)
    ids = prompts
    for _ in range(new_tokens):
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
        yield ids[:, 0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--format", choices=("safetensors", "gguf"), default="safetensors")
    parser.add_argument("--converted", type=Path, help="safetensors folder (default: beside GGUF)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: a list of ids a row")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)

    if arguments.format == "safetensors":
        folder = arguments.converted or arguments.gguf.parent / "transformers_fp32"
        if not folder.exists():
            convert(arguments.gguf, folder)
            sys.exit(subprocess.run([sys.executable, *sys.argv]).returncode)  # a clean process

    started = time.perf_counter()
    if arguments.format == "gguf":
        model = load_gguf(arguments.gguf)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    load_s = time.perf_counter() - started

    prompts = torch.tensor(json.loads(arguments.prompts.read_text()))
    batch, length = prompts.shape
    next(greedy(model, prompts, 1))
    first_token_s = seconds_since_start()

    tokens = greedy(model, prompts, arguments.new_tokens)
    started = time.perf_counter()
    steps = [next(tokens)]
    prefilled = time.perf_counter()
    steps += tokens
    decoded = time.perf_counter()

    Measurement(
        engine=f"transformers {arguments.format}",
        batch=batch,
        prompt_tokens=length,
        new_tokens=arguments.new_tokens,
        first_token_s=first_token_s,
        load_s=load_s,
        prefill_tok_s=batch * length / (prefilled - started),
        decode_tok_s=batch * (arguments.new_tokens - 1) / (decoded - prefilled),
        peak_rss_mib=peak_rss_mib(),
        disk_mib=mebibytes([arguments.gguf if arguments.format == "gguf" else folder]),
        token_ids=[list(row) for row in zip(*steps, strict=True)],
    ).print()


if __name__ == "__main__":
    main()
