"""One process of transformers + torch in fp32 on SmolLM2; prints one line of JSON.

Greedy by a loop of our own over the model's public forward with a DynamicCache: on two threads
it is as fast as generate() or faster in every measurement, and faster than a StaticCache at
batch 8. Attention is torch's fused one, transformers' default. No tokenizer: ids in, ids out.

Needs: torch, transformers, accelerate (transformers reads GGUF only with it), gguf.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import Measurement, engine_parser, restart, seconds_since_start
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
    parser = engine_parser(__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--format", choices=("safetensors", "gguf"), default="safetensors")
    parser.add_argument("--converted", type=Path, help="safetensors folder (default: beside GGUF)")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)

    if arguments.format == "safetensors":
        folder = arguments.converted or arguments.gguf.parent / "transformers_fp32"
        if not folder.exists():
            convert(arguments.gguf, folder)
            restart()

    started = time.perf_counter()
    if arguments.format == "gguf":
        model = load_gguf(arguments.gguf)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    load_s = time.perf_counter() - started

    prompts = torch.tensor(arguments.prompts)
    next(greedy(model, prompts, 1))
    first_token_s = seconds_since_start()

    Measurement.of(
        f"transformers {arguments.format}",
        arguments.prompts,
        greedy(model, prompts, arguments.new_tokens),
        first_token_s=first_token_s,
        load_s=load_s,
        files=[arguments.gguf if arguments.format == "gguf" else folder],
    ).print()


if __name__ == "__main__":
    main()
