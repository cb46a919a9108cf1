"""Makes tests/fixtures/finetune.json: how losses fall when PEFT and PyTorch train an adapter of the
tiny models; --check compares instead.

Each case has the losses and gradient norms of STEPS steps, and the last logits of the trained
model. Weights are those of tests/fixtures/reference; adapters and examples are drawn by rules that
the test repeats (`drawn`, `examples`).

Needs: torch, transformers, peft.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

import numpy as np
import torch
from make_reference import REFERENCE
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, get_scheduler

TARGET = REFERENCE.parent / "finetune.json"
STEPS, BATCH, ACCUMULATE = 50, 2, 2
RATE, WARMUP, DECAY, CLIP = 0.01, 5, 0.1, 1.0
RANK, ALPHA = 4, 8
QUERY_VALUE, ALL = ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, list[str]] = {
    "bloom": ["query_key_value"],
    "cohere": QUERY_VALUE,
    "cohere2": QUERY_VALUE,
    "deepseek_v2": ["o_proj"],
    "deepseek_v3": ["o_proj"],
    "ernie4_5": QUERY_VALUE,
    "exaone4": QUERY_VALUE,
    "falcon": ["query_key_value", "dense_h_to_4h"],
    "falcon_new": ["query_key_value"],
    "gemma": QUERY_VALUE,
    "gemma2": [*ALL, "gate_proj", "up_proj", "down_proj"],
    "gemma3": QUERY_VALUE,
    "glm": QUERY_VALUE,
    "glm4": [*QUERY_VALUE, "gate_up_proj"],
    "glm4_moe": QUERY_VALUE,
    "gpt2": ["c_attn", "c_fc"],
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
    "gpt_oss": QUERY_VALUE,
    "granite": QUERY_VALUE,
    "granitemoe": QUERY_VALUE,
    "hunyuan": QUERY_VALUE,
    "hunyuan_moe": QUERY_VALUE,
    "llama": ALL,
    "llama_rope_llama3": QUERY_VALUE,
    "mistral": QUERY_VALUE,
    "mixtral": QUERY_VALUE,
    "mpt": ["Wqkv", "up_proj"],
    "nemotron": [*QUERY_VALUE, "up_proj"],
    "olmo2": [*QUERY_VALUE, "down_proj"],
    "olmo3": QUERY_VALUE,
    "olmoe": QUERY_VALUE,
    "opt": [*QUERY_VALUE, "fc1"],
    "phi": [*QUERY_VALUE, "fc1"],
    "phi3": ["qkv_proj", "down_proj"],
    "qwen2": QUERY_VALUE,
    "qwen2_moe": QUERY_VALUE,
    "qwen3": ALL,
    "qwen3_moe": QUERY_VALUE,
    "seed_oss": QUERY_VALUE,
    "smollm3": QUERY_VALUE,
    "stablelm": QUERY_VALUE,
    "starcoder2": [*QUERY_VALUE, "c_fc"],
}


def drawn(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The first values of a tensor of the adapter, by its name in PEFT's file."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.normal(0, 0.1, shape).astype(np.float32)


def examples(vocabulary: int) -> list[tuple[NDArray[np.int64], int]]:
    """Token ids, and the index of the first target."""
    generator = np.random.default_rng(40)
    found = []
    for _ in range(12):
        length = int(generator.integers(6, 30))
        ids = generator.integers(3, vocabulary, length)
        found.append((ids, int(generator.integers(1, length // 2))))
    return found


def trained(case: str, targets: list[str]) -> dict[str, Any]:
    """Train one case."""
    model = AutoModelForCausalLM.from_pretrained(
        REFERENCE / case, dtype=torch.float32, attn_implementation="eager"
    )
    texts = examples(model.config.vocab_size)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0)
    model = get_peft_model(model, config)
    parameters = []
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.requires_grad:
                saved = name.replace(".default.", ".")
                one.copy_(torch.from_numpy(drawn(saved, tuple(one.shape))))
                parameters.append(one)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)
    schedule = get_scheduler("cosine", optimizer, WARMUP, STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        start = step * BATCH * ACCUMULATE
        chosen = [texts[(start + i) % len(texts)] for i in range(BATCH * ACCUMULATE)]
        count = sum(len(ids) - first for ids, first in chosen)
        total = 0.0
        for ids, first in chosen:
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
            wanted = torch.from_numpy(ids[first:])
            loss = torch.nn.functional.cross_entropy(
                logits[first - 1 : -1], wanted, reduction="sum"
            )
            (loss / count).backward()
            total += float(loss)
        losses.append(total / count)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        last = model(input_ids=torch.from_numpy(texts[0][0])[None]).logits[0, -1]
    return {
        "targets": targets,
        "losses": [float(f"{one:.8g}") for one in losses],
        "norms": [float(f"{one:.6g}") for one in norms],
        "logits": [float(f"{one:.7g}") for one in last],
    }


def main() -> int:
    found = {case: trained(case, targets) for case, targets in CASES.items()}
    if "--check" in sys.argv[1:]:
        expected = json.loads(TARGET.read_text())
        worst = max(
            abs(a - b) / abs(b)
            for case, one in found.items()
            for a, b in zip(one["losses"], expected[case]["losses"], strict=True)
        )
        print(f"losses differ by {worst:.1e} at most")
        return int(worst > 1e-4)
    lines = [f'"{case}": {json.dumps(one)}' for case, one in found.items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{TARGET}: {len(found)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
