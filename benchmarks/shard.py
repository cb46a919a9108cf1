"""Cuts, re-cuts and merges a random checkpoint with ours and with mindspore.transform_checkpoints.

Both read the same files and write to the same disk, in turn, a process a measurement; medians.
Ours also checks and writes sha256 and waits until the disk has the files (fsync), MindSpore does
neither. What both wrote must be equal. The first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import peak_rss_mib

from lite_runner.architectures import llama_like
from lite_runner.architectures.spec import Decoder, Rotary
from lite_runner.bench.report import markdown
from lite_runner.config.sections import Ranks
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.layouts import expected_tensors, random_checkpoint
from lite_runner.weights.sharding.partition import strategy_of
from lite_runner.weights.sharding.shard_writer import Cutting, write_shards
from lite_runner.weights.sharding.shards import whole_tensors
from lite_runner.weights.sharding.strategy import write_strategy

STEPS = [(1, 2), (2, 4), (4, 1)]  # tensor parallel degrees, from and to


def model_of(layers: int) -> Decoder:
    """A llama of 58 MB a layer, and 131 MB besides."""
    return llama_like.decoder(
        architecture="llama",
        rotary=Rotary(),
        vocab_size=16000,
        hidden_size=1024,
        num_layers=layers,
        num_heads=16,
        n_kv_heads=16,
        head_dim=64,
        intermediate_size=3328,
        seq_length=2048,
        norm_eps=1e-5,
        tie_word_embeddings=False,
    )


def once(side: str, model: Decoder, source: Path, target: Path, ranks: Ranks) -> float:
    """Transform; gives the seconds without the imports."""
    if side == "ours":
        started = time.perf_counter()
        cutting = Cutting.of_model(model, ranks, "ckpt", vocab_parallel=True)
        tensors = whole_tensors(source, model)
        write_shards(
            target,
            tensors,
            cutting,
            extra={},
            workers=2,
            overwrite=False,
            advance=lambda size: None,
        )
        return time.perf_counter() - started
    import mindspore as ms

    started = time.perf_counter()
    before = strategy_in(source)
    after = target.parent / f"strategy_{ranks.tensor}.ckpt"
    write_strategy(after, strategy_of(model, ranks))
    ms.transform_checkpoints(
        str(source), str(target), "checkpoint_", before, str(after) if ranks.tensor > 1 else None
    )
    return time.perf_counter() - started


def strategy_in(folder: Path) -> str | None:
    """The strategy file of a set of ours; None of a whole checkpoint."""
    file = folder / "strategy/ckpt_strategy_rank_1.ckpt"
    return str(file) if file.exists() else None


def child(arguments: argparse.Namespace) -> None:
    """One measurement, as a line of JSON."""
    ranks = Ranks(0, 1, arguments.ranks)
    model = model_of(arguments.layers)
    seconds = once(arguments.side, model, arguments.source, arguments.target, ranks)
    print(json.dumps({"seconds": seconds, "peak_rss_mib": peak_rss_mib()}))


def measure(side: str, layers: int, source: Path, target: Path, ranks: int) -> dict[str, Any]:
    """Run `child` in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--layers", str(layers)]
    command += ["--source", str(source), "--target", str(target), "--ranks", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended in {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_equal(ours: Path, theirs: Path) -> None:
    """Both must have written the same bits."""
    for folder in sorted(ours.glob("rank_*")):
        one = open_ckpt(next(folder.glob("*.ckpt")))
        two = open_ckpt(next((theirs / folder.name).glob("*.ckpt")))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert tensor.read().tobytes() == two[name].read().tobytes(), (folder, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="58 MB each; 16: 1.06 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's")
    parser.add_argument("--side", choices=["ours", "mindspore"], help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        child(arguments)
        return
    model = model_of(arguments.layers)
    size = sum(tensor.nbytes for tensor in random_checkpoint(model, 0).values())
    largest = max(tensor.nbytes for tensor in random_checkpoint(model, 0).values())
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        top = Path(name)
        (top / "1/rank_0").mkdir(parents=True)
        write_ckpt(top / "1/rank_0/checkpoint_0.ckpt", random_checkpoint(model, 0))
        for before, after in STEPS:
            runs: dict[str, list[dict[str, Any]]] = {"ours": [], "mindspore": []}
            for number in range(arguments.rounds + 1):
                for side, found in runs.items():
                    target = top / f"{side}_{after}"
                    shutil.rmtree(target, ignore_errors=True)
                    result = measure(side, arguments.layers, top / str(before), target, after)
                    found += [result] if number else []
                    print(
                        f"{before} -> {after}, round {number}/{arguments.rounds}: "
                        f"{side} {result['seconds']:.2f} s",
                        file=sys.stderr,
                    )
            check_equal(top / f"ours_{after}", top / f"mindspore_{after}")
            shutil.rmtree(top / f"mindspore_{after}")
            if after != 1:
                (top / f"ours_{after}").rename(top / str(after))
            for key, label in (("seconds", "GB/s"), ("peak_rss_mib", "peak memory, MiB")):
                ours, theirs = (statistics.median(run[key] for run in runs[s]) for s in runs)
                if key == "seconds":
                    ours, theirs = size / 1e9 / ours, size / 1e9 / theirs
                less = "" if key == "seconds" else " (less is better)"
                digits = 2 if key == "seconds" else 0
                figures = [f"{ours:.{digits}f}", f"{theirs:.{digits}f}"]
                rows.append([f"{before} -> {after}", label, *figures, f"{ours / theirs:.2f}{less}"])
    print(markdown(["ranks", "", "lite-runner", "mindspore", "ratio"], rows, left=2))
    print(
        f"\nMedians of {arguments.rounds}; a checkpoint of {size / 1e9:.2f} GB "
        f"({len(expected_tensors(model))} tensors, the largest {largest / 2**20:.0f} MiB), .ckpt."
    )


if __name__ == "__main__":
    main()
