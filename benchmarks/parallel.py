"""Decode speed of several ranks on this machine, and the share of it that collectives take.

    .venv/bin/python benchmarks/parallel.py [overrides]

SmolLM2-135M's sizes with 8 heads (its own 9 do not divide by 2), random weights, 4 sequences. The
collectives of a step are timed alone, back to back, in a graph that holds nothing else; what a rank
waits for a slower one in the network is not in that figure.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from lite_runner import progress
from lite_runner.backends import collectives
from lite_runner.config.argv import parse
from lite_runner.config.cluster import Cluster, ranks_of
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.events import MET, connect
from lite_runner.distributed.job import Limits, run_ranks
from lite_runner.generation import Request, Scheduler
from lite_runner.model.locate import locate
from lite_runner.plan.job import Job, share
from lite_runner.plan.loading import load
from lite_runner.run_modes import heads, resolve

SEQUENCES, PROMPT, STEPS = 4, 32, 48
OVERRIDES = [
    *("model=smollm2_135m", "load_checkpoint=random", "verbosity=0", "predict_data=[a,b,c,d]"),
    *("model.model_config.num_heads=8", "model.model_config.n_kv_heads=4"),
    "model.model_config.head_dim=64",
]
LAYOUTS = ("single", "tp2", "dp2")


def main() -> None:
    """Start every layout in turn, and print a line for each."""
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        collectives.schedule()
    elif "MS_ROLE" in os.environ:
        one_rank(Path(sys.argv[1]), sys.argv[2:])
    else:
        for layout in LAYOUTS:
            with tempfile.TemporaryDirectory() as folder:
                overrides = [f"parallel={layout}", *sys.argv[1:]]
                size = ranks_of(config_of(overrides)).size
                program = [__file__, folder, *overrides]
                run_ranks(program, Cluster(size, size), Path(folder), Limits(120, 600))
                print(json.dumps({"layout": layout} | json.loads((Path(folder) / "0").read_text())))


def config_of(overrides: list[str]) -> RunConfig:
    return resolve(parse([*OVERRIDES, *overrides], heads()))[0]


def one_rank(folder: Path, overrides: list[str]) -> None:
    from lite_runner.backends.device import set_device

    launcher = connect(int(os.environ["RANK_ID"]))
    assert launcher is not None
    config = config_of(overrides)
    ranks = replace(ranks_of(config), rank=launcher.rank)
    threads = config.context.threads or max(1, len(os.sched_getaffinity(0)) // ranks.size)
    config = replace(config, context=replace(config.context, threads=threads))
    progress.configure(0)
    set_device("CPU", 0)
    collectives.meet(ranks)
    launcher.stage(MET)
    files = locate(config)
    prompts = [list(range(PROMPT))] * SEQUENCES
    generation = config.generation(files.model)
    whole = Job([], prompts, generation, SEQUENCES, PROMPT + STEPS + 1)
    job = share(config, whole, ranks)
    backend = load(config, files, "CPU", job, ranks=ranks)
    backend.prepare()
    scheduler = Scheduler(backend, prefix_cache=False)
    for tokens in job.tokens:
        options = GenerationConfig(max_new_tokens=STEPS + 1)
        scheduler.add(Request(np.array(tokens, np.int32), options))
    scheduler.step()
    times = []
    for _ in range(STEPS):
        collectives.gather(b"")
        began = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - began)
    seconds = float(np.median(times))
    alone = 0.0
    if ranks.tensor > 1:
        model = files.model
        alone = of_collectives(ranks, job.slots, model.hidden_size, model.num_layers)
    if ranks.rank == 0:
        found = {
            "ranks": ranks.size,
            "threads_a_rank": threads,
            "decode_tok_s": round(SEQUENCES / seconds, 1),
            "step_ms": round(1e3 * seconds, 2),
            "collectives_ms": round(1e3 * alone, 2),
            "collectives_share": round(alone / seconds, 3),
        }
        (folder / "0").write_text(json.dumps(found))
    launcher.done()


def of_collectives(ranks: Ranks, rows: int, hidden: int, layers: int) -> float:
    """Seconds that the sums of a step take alone: two a layer, and the embedding's."""
    from mindspore import Tensor, nn, ops

    parallel = collectives.tensor_parallel(ranks, vocab_parallel=True)
    assert parallel is not None

    class Sums(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.sum = ops.AllReduce(group=parallel.group)

        def construct(self, x: Tensor) -> Tensor:
            for _ in range(count):
                x = self.sum(x)
            return x

    count = 2 * layers + 1
    graph, x = Sums(), Tensor(np.zeros((rows, hidden), np.float32))
    times = []
    for _ in range(20):
        began = time.perf_counter()
        graph(x).asnumpy()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


if __name__ == "__main__":
    main()
