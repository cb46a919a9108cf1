"""Convert Alpaca's or BELLE's examples to MindRecord, with the flags of MindFormers' script.

    python scripts/make_mindrecord.py --input_dataset_file=alpaca_data.json --output_path=data \\
        --N=51200

The token ids are those that run_mode=finetune learns from the same file: prompt, answer, one eos.
They are cut to --seq_length, and filled up to it with eos, as MindFormers' networks need them. The
column labels has -100 for what is not learned. The file is OUTPUT_PATH/NAME.mindrecord, NAME that
of the examples. Exit codes are those of run_lite.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner import progress
from lite_runner.app import guarded
from lite_runner.config.argv import parse
from lite_runner.errors import ConfigError
from lite_runner.model.locate import locate_for_plan, tokenizer_of
from lite_runner.run_modes import heads, resolve
from lite_runner.system.files import make_folder
from lite_runner.training.data import read_data
from lite_runner.training.network import Example
from lite_runner.weights.formats.mindrecord_file import IGNORED, write_mindrecord

Row = tuple[NDArray[np.int64], NDArray[np.int64]]


def rows(texts: Sequence[Example], length: int, eos: int) -> Iterator[Row]:
    """Token ids and labels of so many tokens."""
    for text in texts:
        ids = np.full(length, eos)
        labels = np.full(length, IGNORED)
        ids[: len(text.ids)] = text.ids
        learned = text.rows() + 1
        labels[learned] = text.ids[learned]
        yield ids, labels


def write(flags: argparse.Namespace) -> Path:
    """Write the file, and give its path. Raises RunnerError."""
    if flags.N == 0 or flags.N < -1:
        raise ConfigError(f"--N: got {flags.N}, expected a number of examples, or -1 for all")
    words = [f"model={flags.model}", *flags.keys, "run_mode=finetune", "finetune_output=none"]
    words.append(f"finetune.data={flags.input_dataset_file}")
    config, _ = resolve(parse(words, heads()))
    tokenizer = tokenizer_of(config.tokenizer, locate_for_plan(config.source))
    source, folder = Path(flags.input_dataset_file), Path(flags.output_path)
    data = read_data(
        source,
        tokenizer,
        flags.template,
        flags.seq_length,
        key="--input_dataset_file",
        take=None if flags.N == -1 else flags.N,
    )
    progress.note(f"data: {data.summary(flags.seq_length)}")
    make_folder(folder)
    path = folder / f"{source.stem}.mindrecord"
    write_mindrecord(
        path, rows(data.texts, flags.seq_length, tokenizer.eos_token_ids[0]), flags.template
    )
    progress.note(f"wrote {path}: {len(data.texts)} examples of {flags.seq_length} tokens")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; gives the exit code."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--input_dataset_file", required=True, help="a .json, .jsonl or .csv file")
    flags.add_argument("--output_path", required=True, help="the folder to write to")
    flags.add_argument("--N", type=int, default=51200, help="records to take; -1: all")
    flags.add_argument("--seq_length", type=int, default=2048, help="tokens of each example")
    flags.add_argument("--model", default="bloom_560m", help="whose tokenizer it is")
    flags.add_argument("--template", default="alpaca", choices=("alpaca", "belle", "none"))
    flags.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of run_lite.py, of the model")
    arguments = flags.parse_args(argv)

    def action() -> int:
        write(arguments)
        return 0

    return guarded(action)


if __name__ == "__main__":
    sys.exit(main())
