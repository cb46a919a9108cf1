"""Hashes of the logits of native kernels that are to have the same bits on every processor.

    python -m tests.backends.native.reproducible

prints those of this processor, to be compared with EXPECTED.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from lite_runner import native
from lite_runner.backends.base import Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.backends.native.ranks import Case, model_of

# Of all kinds of positions, activations, matrices and caches: model, quant, cache.
EXPECTED: dict[tuple[str, str, str], str] = {
    ("llama", "none", "fp32"): "9d95715e763f5459",
    ("llama", "a16w8", "fp16"): "f084f46563f5855a",
    ("wide", "file", "int8"): "12ac52f0348136c3",
    ("bloom", "a16w4", "fp32"): "5947fc41b7ca79b0",
    ("llama", "a8w8", "fp32"): "e8aa3c49eb2ce39c",
    ("llama_rope_dynamic", "none", "fp32"): "61296b9573845253",
    ("bloom", "none", "fp16"): "b316e7dc85fe140b",
    ("gemma2", "none", "fp32"): "a16e6adf910e8ac0",
    ("chatglm_6b", "none", "fp32"): "8ff387cc4a4d6f93",
    ("phi3_longrope", "none", "fp32"): "f491070e4aa0470a",
    ("gpt_oss", "none", "fp32"): "bd6542d2629fe69f",
    ("mixtral", "a16w4", "fp32"): "569ed0dadd1c2b25",
}


def digest(case: str, quant: str, cache: str, *, threads: int = 1) -> str:
    """A hash of logits of a prompt, and of steps behind it."""
    config, tensors = model_of(Case(case, quant=quant))
    options = NativeOptions(2, 64, cache)
    layers = pack(config, QuantizedWeights(tensors, config))
    model = NativeBackend(config, layers, options, threads=threads, reproducible=True)
    tokens = [int(7 * k * k + 3) % (config.vocab_size - 8) for k in range(30)]
    if config.prefix is not None:  # a mask, and the end of the prefix
        tokens[4], tokens[10] = config.prefix.mask_token_ids[0], config.prefix.end_token_id
    prompt = np.array(tokens, np.int32)
    found = [model.forward([Row(1, prompt, 0)])]
    found += [model.forward([Row(1, prompt[k : k + 1], 30 + k)]) for k in range(3)]
    model.close()
    native.choose_kernels(reproducible=False)
    return hashlib.sha256(np.concatenate(found).tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    differing = 0
    for key, known in EXPECTED.items():
        now = digest(*key)
        differing += now != known
        print(f"    {key!r}: {now!r},".replace("'", '"'), "" if now == known else f"  # {known}")
    sys.exit(differing > 0)
