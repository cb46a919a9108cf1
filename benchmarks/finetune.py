"""Training beside peft and PyTorch: LoRA of query and value on SmolLM2-135M, 4 x 256 tokens.

All sides train at the same time, each with as many threads, so that what else the machine does
slows all alike; compared is the time of the processor. With --in-turn one side trains after the
other, for a machine without other work, and the time on the clock is compared. Each takes the same
examples in the same order. Prints the median step, the ratio of the medians, and the memory at its
most.

Needs: .venv-bench with torch, transformers, peft, gguf (make bench).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lite_runner.config.argv import parse
from lite_runner.run_modes import finetune, heads, resolve

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("lite-runner", "peft")


def examples(path: Path) -> None:
    """64 texts of more than 256 tokens, of words of the documents."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    words = [word for word in text.split() if word.isalpha()]
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(64):
            line = {"text": " ".join(generator.choice(words) for _ in range(400))}
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="the first one is left out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--in-turn", action="store_true", help="one side after the other")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        data = Path(work, "examples.jsonl")
        examples(data)
        running = {}
        for dtype in arguments.dtypes:
            for side in SIDES:
                environment = ".venv" if side == "lite-runner" else ".venv-bench"
                output = Path(work, f"{side}-{dtype}")
                overrides = [
                    "run_mode=finetune",
                    "model=smollm2_135m",
                    f"finetune.data={data}",
                    f"finetune.steps={arguments.steps}",
                    f"finetune.dtype={dtype}",
                    "finetune.max_length=256",
                    "finetune.shuffle=false",
                    "finetune.charts=false",
                    f"context.threads={arguments.threads}",
                    f"finetune_output={output}",
                ]
                plan = finetune.plan(resolve(parse(overrides, heads()))[0])
                assert isinstance(plan, finetune.TrainPlan) and plan.files.path is not None
                job = Path(work, f"{side}-{dtype}.json")
                job.write_text(
                    json.dumps(
                        {
                            "overrides": overrides,
                            "gguf": str(plan.files.path),
                            "ids": [text.ids.tolist() for pack in plan.packs for text in pack],
                            "dtype": dtype,
                            "steps": arguments.steps,
                            "threads": arguments.threads,
                        }
                    )
                )
                program = "ours" if side == "lite-runner" else "peft"
                command = [
                    str(ROOT / environment / "bin/python"),
                    str(ROOT / f"benchmarks/finetune_{program}.py"),
                    str(job),
                ]
                running[side, dtype] = process = subprocess.Popen(
                    command, cwd=work, stdout=subprocess.PIPE, text=True
                )
                if arguments.in_turn:
                    process.wait()  # its few lines fit in the pipe
        found = {}
        for key, process in running.items():
            said, _ = process.communicate()
            if process.returncode:
                sys.exit(f"{key}: exit code {process.returncode}")
            found[key] = [json.loads(line) for line in said.splitlines() if line[:1] == "{"]
    time = "seconds" if arguments.in_turn else "processor"
    unit = "s" if arguments.in_turn else "s of processor"
    for dtype in arguments.dtypes:
        medians = {}
        for side in SIDES:
            first, *steps = found[side, dtype]
            taken = [one[time] for one in steps]
            medians[side] = statistics.median(taken)
            print(
                f"{side:12} {dtype:9} {medians[side]:6.2f} {unit} a step, fastest"
                f" {min(taken):.2f}, first loss {first['loss']:.4f},"
                f" at most {steps[-1]['memory'] / 1e9:.2f} GB"
            )
        print(f"{dtype}: {medians['peft'] / medians['lite-runner']:.2f} times the speed")


if __name__ == "__main__":
    main()
