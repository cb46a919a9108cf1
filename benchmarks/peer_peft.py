"""One process of peft on SmolLM2 for benchmarks/slora.py; prints one line of JSON.

One adapter is the active one of the whole batch, several are mixed with `adapter_names`; the base
is the model before peft has wrapped it. Greedy by a loop of our own, as in peer_transformers.py.

Needs: torch, transformers, peft, accelerate, gguf.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peer_transformers import load_gguf
from peft import PeftModel
from transformers import DynamicCache
from transformers.utils import logging


def stepper(
    model: torch.nn.Module, prompts: torch.Tensor, **options: Any
) -> Callable[[], torch.Tensor]:
    """Calls that each make the next token of every row; the prompts are read at once."""
    cache = DynamicCache(config=model.config)
    ids = prompts

    def step() -> torch.Tensor:
        nonlocal ids
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **options)
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        return ids

    step()
    return step


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    torch.set_grad_enabled(False)
    gguf, folder = Path(job["gguf"]), Path(job["adapters"])
    prompts = torch.tensor(job["prompts"])
    cases = {}
    for case in job["cases"]:
        if case == 0:
            cases[0] = stepper(load_gguf(gguf).eval(), prompts)
            continue
        names = [f"a{number}" for number in range(case)]
        model = PeftModel.from_pretrained(load_gguf(gguf), folder / "a0", adapter_name="a0")
        for name in names[1:]:
            model.load_adapter(folder / name, adapter_name=name)
        model.eval()
        mixed = [names[row % case] for row in range(len(prompts))]
        cases[case] = stepper(model, prompts, **({"adapter_names": mixed} if case > 1 else {}))
    times: dict[int, list[float]] = {case: [] for case in cases}
    for _ in range(job["steps"]):
        for case, step in cases.items():
            began = time.perf_counter()
            step()
            times[case].append(time.perf_counter() - began)
    ratios = {
        str(case): statistics.median(base / one for base, one in zip(times[0], taken, strict=True))
        for case, taken in times.items()
    }
    step_ms = {str(case): 1e3 * statistics.median(taken) for case, taken in times.items()}
    print(json.dumps({"engine": "peft", "ratio": ratios, "step_ms": step_ms}), flush=True)


if __name__ == "__main__":
    main()
