"""Makes tests/fixtures/next_token.npz: logits of the layer that predicts a further token, by CASE,
for the longest prompt of tests/fixtures/reference. transformers has no such layer: its formula is
DeepSeek-V3's, as vLLM's deepseek_mtp.py and qwen3_next_mtp.py have it, around a layer of
transformers with the numbers of tests/next_token.py; --check compares instead.

Needs: torch, transformers.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from make_embedding_reference import written_or_compared
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.next_token import CASES, next_token_tensors  # noqa: E402


def logits(case: str) -> np.ndarray:
    """After each pair of a token's hidden state and the next token [tokens - 1, vocab]."""
    folder = ROOT / "tests/fixtures/reference" / case
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tensors = next_token_tensors(case, load_file(folder / "model.safetensors"))
    given = {name: torch.from_numpy(one) for name, one in tensors.items()}
    if case.startswith("qwen3"):
        layer = "mtp.layers.0."
        names = "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
        outer = [given[f"mtp.{name}.weight"] for name in names]
    else:
        layer = f"model.layers.{len(model.model.layers)}."
        names = "eh_proj", "enorm", "hnorm", "shared_head.norm"
        outer = [given[f"{layer}{name}.weight"] for name in names]
    matrix, of_embedding, of_hidden, last = outer
    block = copy.deepcopy(model.model.layers[-1])
    block.load_state_dict(fused(block, {n.removeprefix(layer): t for n, t in given.items()}))

    def normed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        norm = copy.deepcopy(model.model.norm)
        norm.weight.data = weight
        return norm(x)

    expected = np.load(folder / "expected.npz")
    longest = expected["lengths"].argmax()
    tokens = torch.from_numpy(expected["prompts"][longest : longest + 1].astype(np.int64))
    states = model.model(tokens).last_hidden_state[:, :-1]
    embedded = model.model.embed_tokens(tokens[:, 1:])
    both = torch.cat([normed(of_embedding, embedded), normed(of_hidden, states)], dim=-1)
    count = both.shape[1]
    places = torch.arange(count)[None]
    mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
    found = block(
        both @ matrix.T,
        attention_mask=mask,
        position_ids=places,
        position_embeddings=model.model.rotary_emb(both, places),
    )
    found = found[0] if isinstance(found, tuple) else found
    return model.lm_head(normed(last, found))[0].numpy()


def fused(block: torch.nn.Module, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a layer as transformers holds them, the experts' in two."""
    wanted = block.state_dict()
    for name in [name for name in wanted if name not in own]:
        count = len(wanted[name])
        one = "mlp.experts.{}." + ("down_proj" if "down" in name else "{}_proj") + ".weight"
        parts = ("",) if "down" in name else ("gate", "up")
        rows = [
            torch.cat([own[one.format(index, part)] for part in parts]) for index in range(count)
        ]
        own[name] = torch.stack(rows)
    return {name: own[name] for name in wanted}


def main() -> int:
    logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    made = {case: logits(case) for case in CASES}
    return written_or_compared(ROOT / "tests/fixtures/next_token.npz", made)


if __name__ == "__main__":
    sys.exit(main())
