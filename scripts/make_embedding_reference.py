"""Makes tests/fixtures/embeddings.npz: the means and the last of transformers' last hidden states
for the prompts of tests/fixtures/reference, by CASE-mean and CASE-last; --check compares instead.

Needs: torch, transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel
from transformers.utils import logging

FIXTURES = Path(__file__).resolve().parents[1] / "tests/fixtures"
# Between them: RMSNorm and LayerNorm, norms of heads, logits and embeddings that are scaled.
CASES = ("gemma", "granite", "llama", "qwen3", "stablelm")
TOLERANCE = 1e-5  # of the largest


def embeddings(case: str) -> dict[str, np.ndarray]:
    """Both poolings [prompts, hidden_size] of a case, each prompt alone."""
    folder = FIXTURES / "reference" / case
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = np.load(folder / "expected.npz")
    states = [
        model.eval()(torch.from_numpy(prompt[None, :length].astype(np.int64))).last_hidden_state[0]
        for prompt, length in zip(expected["prompts"], expected["lengths"], strict=True)
    ]
    return {
        f"{case}-mean": torch.stack([one.double().mean(0).float() for one in states]).numpy(),
        f"{case}-last": torch.stack([one[-1] for one in states]).numpy(),
    }


def written_or_compared(path: Path, made: Mapping[str, np.ndarray]) -> int:
    """Write the arrays, or with --check compare them with those of the file; the exit code."""
    if "--check" not in sys.argv:
        np.savez(path, **made)
        return 0
    there = np.load(path)
    worst = max(float(np.abs(there[n] - one).max() / np.abs(one).max()) for n, one in made.items())
    print(f"largest difference: {worst:.1e} of the largest")
    return int(sorted(there) != sorted(made) or worst > TOLERANCE)


def main() -> int:
    logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    made = {name: one for case in CASES for name, one in embeddings(case).items()}
    return written_or_compared(FIXTURES / "embeddings.npz", made)


if __name__ == "__main__":
    sys.exit(main())
