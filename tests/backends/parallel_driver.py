"""One of the four ranks of test_parallel.py: the reference cases, cut in every way.

    python parallel_driver.py OUTPUT_FOLDER

Every rank writes its logits to `rank_<n>.npz`, an array a case. Of two copies of a model, one
computes each case: they know nothing of one another.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import Row, collectives
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.backends.mindspore.device import set_device
from lite_runner.config.sections import Ranks
from lite_runner.distributed.events import MET, connect
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.read_ahead import ReadAhead
from lite_runner.weights.sharding.partition import pieces
from tests.paths import REFERENCE

# Fixture, the ranks that share it, whether the vocabulary is cut, or there is a cache. A rank's
# cache holds its heads, whatever the family: without one there is a graph less to compile.
CASES = [
    ("llama", range(4), True, True),
    ("bloom", range(2, 4), False, True),
    ("gpt2_inner", range(2, 4), True, False),
    ("qwen3", range(2), True, True),
    ("gemma2", range(2), True, False),
    ("gpt_neox", range(2), True, False),
    ("chatglm_6b", range(2, 4), True, False),
    ("llama_biases", range(2, 4), False, False),
    ("qwen3_moe", range(2), True, False),
    ("mixtral", range(2), True, False),
]


def main() -> None:
    if os.environ["MS_ROLE"] == "MS_SCHED":
        collectives.schedule()
        return
    rank, folder = int(os.environ["RANK_ID"]), Path(sys.argv[1])
    launcher = connect(rank)
    assert launcher is not None
    set_device("CPU", 0)
    collectives.join(f"rank {rank} of 4")
    launcher.stage(MET)
    found = {
        case: logits(case, Ranks(rank, 4 // len(sharing), len(sharing)), cut, use_past)
        for case, sharing, cut, use_past in CASES
        if rank in sharing
    }
    np.savez(folder / f"rank_{rank}.npz", **found)
    gathered = [data.decode() for data in collectives.gather(b"x" * (3 * rank))]
    (folder / f"gathered_{rank}.json").write_text(json.dumps(gathered))
    launcher.done()


def logits(case: str, ranks: Ranks, vocab_parallel: bool, use_past: bool) -> NDArray[np.float32]:
    """[prompts, steps + 1, vocab]: all prompts together, then the forced tokens."""
    folder = REFERENCE / case
    expected = dict(np.load(folder / "expected.npz"))
    prompts = [
        row[:length].astype(np.int32)
        for row, length in zip(expected["prompts"], expected["lengths"], strict=True)
    ]
    forced = expected["continuations"].astype(np.int32)
    config = model_config_of(folder)
    assert config is not None
    tensors = pieces(open_checkpoint(folder, config), config, ranks, vocab_parallel=vocab_parallel)
    options = MindSporeOptions(
        slots=len(prompts),
        length=max(map(len, prompts)) + forced.shape[1],
        threads=1,
        use_past=use_past,
        ranks=ranks,
        vocab_parallel=vocab_parallel,
    )
    model = MindSporeBackend(config, ReadAhead(tensors), options)
    found = [model.forward([Row(slot, prompt, 0) for slot, prompt in enumerate(prompts)])]
    for step in range(forced.shape[1]):
        rows = [
            Row(slot, forced[slot, step : step + 1], len(prompt) + step)
            for slot, prompt in enumerate(prompts)
        ]
        found.append(model.forward(rows))
    return np.stack(found, axis=1)


if __name__ == "__main__":
    main()
