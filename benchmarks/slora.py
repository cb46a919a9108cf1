"""Decode speed with LoRA adapters against the same without: ours, and peft's `adapter_names`.

    .venv/bin/python benchmarks/slora.py [--peer ".venv-bench/bin/python benchmarks/peer_peft.py"]

SmolLM2-135M in float32, adapters on all seven linear layers with random values, saved in float32
and held as each of adapter_dtype's. A process holds all its cases and steps them in turn, so that
what else the machine does falls on all alike; processes of ours and the peer's take turns, too.
Each round loads the cases in another order: what is loaded first may get the worse memory. The
figure of a case is the median of base / case, step by step, and then of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import make_prompts
from engine import opened

from lite_runner import progress
from lite_runner.bench.cell import lockstep, random_adapters
from lite_runner.config.argv import parse
from lite_runner.generation import Engine
from lite_runner.model.adapters import AdapterJob
from lite_runner.model.locate import locate
from lite_runner.plan import Job
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.lora.adapter_writer import write_adapters

DTYPES = ("auto", "bf16")  # of adapter_dtype=; peft's are float32
PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="command of benchmarks/peer_peft.py")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 8], help="distinct ones")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        one_process(json.loads(arguments.job.read_text()), *arguments.dtypes)
        return
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print("| engine | r | " + " | ".join(f"{n} adapters" for n in arguments.adapters) + " |")
    print("|---|---|" + "---|" * len(arguments.adapters))
    for rank in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            compare(arguments, rank, Path(folder))


def compare(arguments: argparse.Namespace, rank: int, folder: Path) -> None:
    """Make adapters of one rank, let the engines take turns, and print a row for each."""
    job = {
        "gguf": str(make_adapters(folder, max(arguments.adapters), rank)),
        "adapters": str(folder),
        "prompts": make_prompts(arguments.batch, PROMPT),
        "steps": arguments.steps,
        "threads": arguments.threads,
    }
    file = folder / "job.json"
    ours = [sys.executable, __file__, "--job", str(file), "--dtypes"]
    commands = [[*ours, dtype] for dtype in arguments.dtypes]
    if arguments.peer:
        commands.append([*shlex.split(arguments.peer), str(file)])
    found: list[list[dict[str, Any]]] = [[] for _ in commands]
    cases = [0, *arguments.adapters]
    for turn in range(arguments.rounds):
        first = turn % len(cases)
        file.write_text(json.dumps(job | {"cases": cases[first:] + cases[:first]}))
        for results, command in zip(found, commands, strict=True):
            threads = {"OMP_NUM_THREADS": str(arguments.threads)}
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
            if done.returncode:
                sys.exit(
                    f"{shlex.join(command)} ended in {done.returncode}:\n{done.stderr[-4000:]}"
                )
            results.append(json.loads(done.stdout.splitlines()[-1]))
    for results in found:
        cells = []
        for case in map(str, cases[1:]):
            ratio = statistics.median(result["ratio"][case] for result in results)
            step = statistics.median(result["step_ms"][case] for result in results)
            cells.append(f"{ratio:.2f} ({step:.1f} ms)")
        base = statistics.median(result["step_ms"]["0"] for result in results)
        name = f"{results[0]['engine']}, base {base:.1f} ms"
        print(f"| {name} | {rank} | {' | '.join(cells)} |", flush=True)


def make_adapters(folder: Path, count: int, rank: int) -> Path:
    """Adapters a0, a1, ... as peft writes them, and their listing; gives the base's GGUF."""
    config, _ = resolve(parse(["model=smollm2_135m", "predict_data=ids"], heads()))
    files = locate(config.source)
    assert files.path is not None
    adapters = {one.name: one for one in random_adapters(files.model, count, rank)}
    write_adapters(adapters, files.model, folder, "peft", listed=True)
    return files.path


def one_process(job: dict[str, Any], dtype: str) -> None:
    """Ours: a backend a case, stepped in turn; prints one line of JSON."""
    prompts, steps = job["prompts"], job["steps"]
    overrides = ["model=smollm2_135m", "quant=none", "predict_data=ids"]
    overrides += [f"context.threads={job['threads']}"]
    config, _ = resolve(parse(overrides, heads()))
    config = replace(config, adapter_dtype=dtype)
    progress.configure(0)
    files = locate(config.source)
    adapters = list(open_adapters(Path(job["adapters"]), files.model).values())
    cases: dict[int, Engine] = {}
    for case in job["cases"]:
        names = [adapters[row % case].name if case else None for row in range(len(prompts))]
        wanted = AdapterJob(adapters[:case], names) if case else None
        work = Job(
            *((), prompts, config.generation(files.model), len(prompts), PROMPT + steps + 1),
            adapters=wanted,
        )
        backend, _ = opened(config, files, work)
        cases[case] = lockstep(backend, prompts, steps + 1, names)
        cases[case].step()
    report(f"lite-runner, {dtype}", cases, steps)


def report(engine: str, cases: dict[int, Engine], steps: int) -> None:
    """Step all cases in turn, and print what each took beside the base, case 0."""
    times: dict[int, list[float]] = {case: [] for case in cases}
    for _ in range(steps):
        for case, running in cases.items():
            began = time.perf_counter()
            running.step()
            times[case].append(time.perf_counter() - began)

    def ratio(of: Sequence[float]) -> float:
        return statistics.median(base / one for base, one in zip(times[0], of, strict=True))

    ratios = {str(case): round(ratio(taken), 4) for case, taken in times.items()}
    step_ms = {str(case): round(1e3 * statistics.median(t), 2) for case, t in times.items()}
    print(json.dumps({"engine": engine, "ratio": ratios, "step_ms": step_ms}), flush=True)


if __name__ == "__main__":
    main()
