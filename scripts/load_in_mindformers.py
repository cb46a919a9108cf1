"""Has the real MindFormers 1.0.2 load what this project writes, and compares the logits.

python scripts/load_in_mindformers.py FOLDER: with bloom.ckpt, gpt2.ckpt, llama_tied_mha.ckpt and
gpt2_adapter/, converted from tests/fixtures; scripts/compare_mindformers.sh makes them. What they
must give is transformers' and peft's, in the same fixtures.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import make_mindformers  # with the real MindFormers

import mindspore  # isort: skip
import numpy as np
from mindformers.pet import get_pet_model

FIXTURES = make_mindformers.FIXTURES.parent
TOLERANCE = {"bloom": 4e-3, "gpt2": 4e-3, "llama": 1e-4}  # the first two round to float16
ADAPTER, TARGETS = "attention", ".*dense1|.*dense2|.*dense3"  # of adapters/gpt2: q, k and v


def network(case: str) -> tuple[str, Any]:
    """The family of a case of tests/fixtures/reference, and its network in float32."""
    raw = json.loads((FIXTURES / "reference" / case / "config.json").read_text())
    family = raw["model_type"]

    def first(*keys: str) -> Any:
        return next(raw[key] for key in keys if raw.get(key) is not None)

    sizes = {
        "vocab_size": raw["vocab_size"],
        "hidden_size": first("n_embd", "hidden_size"),
        "num_layers": first("n_layer", "num_hidden_layers"),
        "num_heads": first("num_attention_heads", "n_head"),
        "seq_length": raw.get("n_positions", 64),
        # These two the networks hide from attention, wherever they stand.
        "eos_token_id": -1,
        "pad_token_id": -1,
    }
    if family == "llama":
        sizes["n_kv_heads"] = raw["num_key_value_heads"]
        sizes["intermediate_size"] = raw["intermediate_size"]
    return family, make_mindformers.build(family, "float32", **sizes)


def load(model: Any, path: Path) -> list[str]:
    """Load a checkpoint; the parameters of `model` that it does not hold."""
    left: Any = mindspore.load_param_into_net(model, mindspore.load_checkpoint(str(path)))
    missing, unexpected = left if isinstance(left, tuple) else (left, [])
    assert not unexpected, unexpected
    return list(missing)


def compare(what: str, family: str, model: Any, prompts: list[Any], wanted: Any) -> None:
    """Raise AssertionError where the logits after the prompts are not `wanted`."""
    found = []
    for prompt in prompts:
        # What pads must not end the prompt: its length is told by its last other token.
        pad = (int(prompt[-1]) + 1) % model.config.vocab_size
        seen = make_mindformers.Recorder()
        options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": pad}
        model.generate([prompt.tolist()], logits_processor=[seen], **options)
        found.append(seen.logits[0])
    gap = np.abs(np.stack(found) - wanted).max() / np.abs(wanted).max()
    assert gap <= TOLERANCE[family], f"{what}: {gap}"
    print(f"{what}: MindFormers computes the same, within {gap:.1e}")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)  # where MindFormers leaves its log
        for case in ("bloom", "gpt2", "llama_tied_mha"):
            family, model = network(case)
            missing = load(model, folder / f"{case}.ckpt")
            assert not missing, missing
            expected = np.load(FIXTURES / "reference" / case / "expected.npz")
            rows = list(zip(expected["prompts"], expected["lengths"]))
            prompts = [row[:length] for row, length in rows]
            compare(case, family, model, prompts, expected["logits"][:, 0])

        family, base = network("gpt2")
        settings = json.loads((folder / "gpt2_adapter" / "adapter_config.json").read_text())
        pet = {"pet_type": "lora", "lora_rank": settings["r"], "target_modules": TARGETS}
        pet = {**pet, "lora_alpha": settings["lora_alpha"], "lora_dropout": 0.0}
        model = get_pet_model(base, {**pet, "param_init_type": "float32"})
        model.set_train(False)
        adapter = set(load(model, folder / "gpt2.ckpt"))
        assert adapter and all("mindpet_delta_lora" in name for name in adapter)
        assert not adapter & set(load(model, folder / "gpt2_adapter" / "adapter_model.ckpt"))
        listed = list(json.loads((FIXTURES / "adapters/gpt2/lora_adapter.json").read_text()))
        expected = np.load(FIXTURES / "adapters/gpt2/expected.npz")
        wanted = expected["logits"][1 + listed.index(ADAPTER), :, 0]
        compare("gpt2 with an adapter", family, base, list(expected["prompts"]), wanted)


if __name__ == "__main__":
    main()
