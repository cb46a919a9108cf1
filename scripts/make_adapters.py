"""Makes tests/fixtures/adapters with peft: LoRA adapters of the tiny models, and peft's logits.

`make_adapters.py FOLDER` writes them to FOLDER; `--check FOLDER` writes there too, and compares
with what is committed. tests/fixtures/README.md describes the files. Needs: torch, transformers,
peft.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_reference import REFERENCE, compare, difference
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

ADAPTERS = REFERENCE.parent / "adapters"
ROWS, PROMPT, FORCED = 6, 9, 2  # prompts, tokens of each, tokens forced after each
LEAST_EFFECT = 0.05  # of an adapter on the logits, relative to the largest
LLAMA_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Models with the same modules, and something of their own around them.
LLAMA_LIKE = ("olmo2", "granite", "smollm3_window", "gemma2", "gemma3")
GLM_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
BLOOM_LINEAR = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
TYPES = {"rank_64": torch.bfloat16, "feed_forward": torch.float16}  # the others float32


@dataclass(frozen=True)
class Case:
    """Adapters of one tiny model: the LoraConfig of each by its name."""

    model: str
    adapters: dict[str, dict[str, Any]]


def llama_like() -> dict[str, dict[str, Any]]:
    """Adapters of every linear layer, and of the embedding (a tied head, too) and attention."""
    return {
        "all": {"r": 8, "lora_alpha": 16, "target_modules": LLAMA_LINEAR},
        "ends": {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["embed_tokens", "q_proj", "k_proj", "o_proj"],
        },
    }


def of_attention() -> dict[str, dict[str, Any]]:
    """Adapters of all of attention, and of a part of it."""
    return {
        "all": {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        },
        "some": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    }


def cases() -> list[Case]:
    return [
        Case(
            "llama",
            {
                "all": {"r": 8, "lora_alpha": 16, "target_modules": LLAMA_LINEAR},
                "rank_64": {
                    "r": 64,
                    "lora_alpha": 4,
                    "use_rslora": True,
                    "target_modules": ["q_proj", "v_proj"],
                },
                "patterns": {
                    "r": 4,
                    "lora_alpha": 12,
                    "target_modules": LLAMA_LINEAR,
                    "rank_pattern": {"q_proj": 1, r"layers\.1\.mlp\.down_proj": 5},
                    "alpha_pattern": {"^model.layers.0.self_attn.k_proj": 3, "up_proj": 7},
                },
                "second_layer": {
                    "r": 16,
                    "lora_alpha": 16,
                    "target_modules": r".*\.mlp\.(gate|up)_proj",
                    "exclude_modules": r".*layers\.0\..*",
                },
                "ends": {
                    "r": 3,
                    "lora_alpha": 6,
                    "target_modules": ["embed_tokens", "lm_head", "o_proj"],
                },
            },
        ),
        Case(
            "qwen2",
            {
                "attention": {
                    "r": 2,
                    "lora_alpha": 8,
                    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                },
                "feed_forward": {
                    "r": 32,
                    "lora_alpha": 16,
                    "target_modules": ["gate_proj", "up_proj", "down_proj"],
                    "layers_to_transform": [1],
                },
                "embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens"]},
                "head": {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "q_proj"]},
            },
        ),
        Case(
            "qwen3",
            {
                "all": {"r": 8, "lora_alpha": 16, "target_modules": LLAMA_LINEAR},
                "patterns": {
                    "r": 4,
                    "lora_alpha": 12,
                    "target_modules": r".*\.(self_attn\.[qko]_proj|mlp\.(up|down)_proj)",
                    "rank_pattern": {"q_proj": 1, r"layers\.1\.mlp\.down_proj": 5},
                    "alpha_pattern": {"^model.layers.0.self_attn.k_proj": 3, "o_proj": 7},
                },
                "ends": {
                    "r": 3,
                    "lora_alpha": 6,
                    "target_modules": ["embed_tokens", "lm_head", "q_proj", "k_proj"],
                },
            },
        ),
        Case(
            "mistral",
            {
                "all": {"r": 8, "lora_alpha": 16, "target_modules": LLAMA_LINEAR},
                "patterns": {
                    "r": 4,
                    "lora_alpha": 12,
                    "use_rslora": True,
                    "target_modules": LLAMA_LINEAR,
                    "rank_pattern": {"v_proj": 2, r"layers\.0\.mlp\.gate_proj": 6},
                    "alpha_pattern": {"^model.layers.1.self_attn.o_proj": 5, "down_proj": 9},
                },
            },
        ),
        *(Case(model, llama_like()) for model in LLAMA_LIKE),
        # Those of experts are not supported.
        *(Case(model, of_attention()) for model in ("qwen3_moe", "mixtral")),
        Case(
            "glm",
            {
                "all": {"r": 8, "lora_alpha": 16, "target_modules": GLM_LINEAR},
                "patterns": {
                    "r": 4,
                    "lora_alpha": 12,
                    "target_modules": ["q_proj", "k_proj", "gate_up_proj"],
                    "rank_pattern": {"q_proj": 1, r"layers\.1\.mlp\.gate_up_proj": 5},
                    "alpha_pattern": {"^model.layers.0.self_attn.k_proj": 3},
                },
            },
        ),
        Case(
            "starcoder2",
            {
                "all": {
                    "r": 8,
                    "lora_alpha": 16,
                    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
                }
            },
        ),
        Case(
            "gpt_neox",
            {
                "all": {"r": 8, "lora_alpha": 16, "target_modules": BLOOM_LINEAR},
                "fused": {"r": 3, "lora_alpha": 6, "target_modules": ["query_key_value"]},
            },
        ),
        Case(
            "phi3",
            {
                "all": {
                    "r": 8,
                    "lora_alpha": 16,
                    "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
                },
                "fused": {"r": 3, "lora_alpha": 6, "target_modules": ["qkv_proj", "gate_up_proj"]},
            },
        ),
        Case(
            "bloom",
            {
                "all": {"r": 8, "lora_alpha": 16, "target_modules": BLOOM_LINEAR},
                "rank_64": {"r": 64, "lora_alpha": 32, "target_modules": ["query_key_value"]},
                "rank_1": {"r": 1, "lora_alpha": 2, "target_modules": ["dense"]},
                "embedding": {
                    "r": 5,
                    "lora_alpha": 10,
                    "target_modules": ["word_embeddings", "query_key_value"],
                },
            },
        ),
        Case(
            "gpt2",
            {
                "all": {
                    "r": 8,
                    "lora_alpha": 16,
                    "fan_in_fan_out": True,
                    "target_modules": ["c_attn", "c_proj", "c_fc"],
                },
                "attention": {
                    "r": 16,
                    "lora_alpha": 8,
                    "fan_in_fan_out": True,
                    "target_modules": ["c_attn"],
                },
                "patterns": {
                    "r": 4,
                    "lora_alpha": 6,
                    "fan_in_fan_out": True,
                    "target_modules": ["mlp.c_fc", "mlp.c_proj"],
                    "rank_pattern": {"mlp.c_proj": 2},
                    "alpha_pattern": {r"h\.1\.mlp\.c_fc": 9},
                },
            },
        ),
    ]


def base(model: str) -> torch.nn.Module:
    """The tiny model; the name of its folder goes into no file."""
    loaded = AutoModelForCausalLM.from_pretrained(
        REFERENCE / model,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    loaded.config._name_or_path = loaded.name_or_path = ""
    return loaded


def write_adapter(model: str, name: str, options: dict[str, Any], folder: Path) -> None:
    """Save one adapter with random A and B, as peft does after training."""
    adapted = get_peft_model(base(model), LoraConfig(task_type="CAUSAL_LM", **options))
    rng = np.random.default_rng(zlib.crc32(f"{model}/{name}".encode()))
    for weight_name, weight in sorted(adapted.named_parameters()):
        if "lora_" in weight_name:
            rank = weight.shape[0] if "_A" in weight_name else weight.shape[1]
            values = rng.normal(0.0, 0.35 / rank**0.25, tuple(weight.shape))
            weight.data = torch.from_numpy(values).to(TYPES.get(name, torch.float32))
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # peft has a set there
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text)


def logits_of(model: PeftModel, tokens: torch.Tensor, **options: Any) -> NDArray[np.float32]:
    """Logits [rows, FORCED + 1, vocab] after the prompt and after each forced token."""
    return model(tokens, use_cache=False, **options).logits[:, -FORCED - 1 :].numpy()


def make_case(case: Case, folder: Path) -> None:
    """Write the adapters of one model and what peft computes with them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(case.adapters)
    for name, options in case.adapters.items():
        write_adapter(case.model, name, options, folder / name)
    listed = json.dumps({name: name for name in names}, indent=2) + "\n"
    (folder / "lora_adapter.json").write_text(listed)

    model = PeftModel.from_pretrained(base(case.model), folder / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(folder / name, adapter_name=name)
    model.eval()
    rng = np.random.default_rng(zlib.crc32(case.model.encode()))
    tokens = rng.integers(0, 96, (ROWS, PROMPT + FORCED)).astype(np.int32)
    ids = torch.from_numpy(tokens).long()
    with model.disable_adapter():
        alone = [logits_of(model, ids)]
    for name in names:
        model.set_adapter(name)
        alone.append(logits_of(model, ids))
        effect = difference(alone[-1], alone[0])
        assert effect > LEAST_EFFECT, (case.model, name, effect)

    # Each batch has the base in it, and every adapter is in one of them.
    mixed = np.stack([np.arange(ROWS) % (len(names) + 1), rng.integers(0, len(names) + 1, ROWS)])
    mixed[1, :3] = 0, 0, 1
    keys = ["__base__", *names]
    together = [
        logits_of(model, ids, adapter_names=[keys[index] for index in row]) for row in mixed
    ]
    by_row = np.stack(alone)[mixed, np.arange(ROWS)]
    gap = difference(np.stack(together), by_row)
    assert gap < 1e-5, (case.model, gap)
    np.savez_compressed(
        folder / "expected.npz",
        prompts=tokens[:, :PROMPT],
        continuations=tokens[:, PROMPT:],
        logits=np.stack(alone),
        mixed_adapters=mixed.astype(np.int32),
        mixed_logits=np.stack(together),
    )
    print(f"{case.model}: {', '.join(names)}; a mixed batch differs from each alone by {gap:.1e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with what is committed")
    parser.add_argument("folder", type=Path, nargs="?", default=ADAPTERS)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="peft")
    for case in cases():
        make_case(case, arguments.folder / case.model)
    if not arguments.check:
        return 0
    faults = compare(arguments.folder, ADAPTERS)
    print("\n".join(faults) or "the committed adapters are what peft gives")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
