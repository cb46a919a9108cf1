"""One process of peft and PyTorch for benchmarks/finetune.py; prints one line of JSON a step.

As trained most often: the base in the dtype that was asked for, the adapter in float32, attention
by sdpa, AdamW. The loss is that of transformers, over all tokens but the first.

Needs: torch, transformers, peft, gguf.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch
from peer_transformers import load_gguf
from peft import LoraConfig, get_peft_model
from transformers.utils import logging


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    logging.set_verbosity_error()
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model = load_gguf(Path(job["gguf"])).to(getattr(torch, job["dtype"]))
    model.config.use_cache = False
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora).train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.01)
    rows = torch.tensor(job["ids"])
    for step in range(job["steps"]):
        batch = rows[[(4 * step + i) % len(rows) for i in range(4)]]
        began, started = time.process_time(), time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent, seconds = time.process_time() - began, time.perf_counter() - started
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = {"processor": spent, "seconds": seconds, "loss": loss.item(), "memory": memory}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
