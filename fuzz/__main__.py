"""python -m fuzz: see the package."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from fuzz import children
from fuzz.children import AS_IT_IS, Case, Finding

NOTHING_IS_FETCHED = {"HF_ENDPOINT": "http://127.0.0.1:9", "PIP_NO_INDEX": "1"}
AT_ONCE = 25  # mutations of a case, then the next case's turn


def main() -> int:
    """1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="how long; without it --mutations of each")
    parser.add_argument("--mutations", type=int, default=AT_ONCE, help="of each case (25)")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 10**6, help="default: the time"
    )
    parser.add_argument("--start", type=int, default=0, help="the first mutation, to repeat one")
    parser.add_argument("--only", default="", help="the cases with this in their name")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="for what is found")
    options = parser.parse_args()
    out = options.out.absolute()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        folder = Path(temporary)
        os.environ |= NOTHING_IS_FETCHED | {"LITE_RUNNER_CACHE": str(folder / "cache")}
        (folder / "cache").mkdir()  # so that children find what another has composed of conf/
        os.chdir(folder)
        # What readers import is imported before children are forked.
        importlib.import_module("mindspore")
        from fuzz.corpus import cases
        from fuzz.readers import run

        run("model=tiny_llama", "predict_data=hi")(folder)
        chosen = [case for case in cases(folder) if options.only in case.name]
        gc.freeze()  # in each child, the search for garbage would copy pages of what it inherits
        print(f"{len(chosen)} cases, seed {options.seed}", flush=True)
        found, done = _rounds(chosen, options, folder, out)
    print(f"{done:,} mutations, {len(found)} findings")
    return 1 if found else 0


def _rounds(
    chosen: list[Case], options: argparse.Namespace, folder: Path, out: Path
) -> tuple[Counter[str], int]:
    """The findings by kind, and how many mutations were read; before the first, each file as it
    is."""
    found: Counter[str] = Counter()
    done, start, ends = 0, options.start, time.monotonic() + (options.seconds or 0)
    stop = sys.maxsize if options.seconds else start + options.mutations
    while start < stop:
        indices = range(start, min(start + AT_ONCE, stop))
        reads = indices if start else range(AS_IT_IS, indices.stop)
        for case in chosen:
            for finding in children.run(case, options.seed, reads, _fresh(case, folder)):
                kind = f"{case.name.partition('/')[0]}: {finding.kind}"
                found[kind] += 1
                if found[kind] == 1:
                    _keep(finding, options.seed, out)
            done += len(indices)
            if options.seconds and time.monotonic() > ends:
                return found, done
        start = indices.stop
    return found, done


def _fresh(case: Case, folder: Path) -> Path:
    """A copy of the case's folder."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(case.folder, work, symlinks=True)
    return work


def _keep(finding: Finding, seed: int, out: Path) -> None:
    """Write the file that did it to `out`, and how to repeat it."""
    case, index = finding.case, finding.index
    name = case.name.replace("/", "_").replace(" ", "_")
    where = out / f"{name}-{seed}-{index}"
    where.mkdir(parents=True, exist_ok=True)
    (where / Path(case.file).name).write_bytes(case.damaged(seed, index))
    again = f"--only '{case.name}' --seed {seed} --start {index} --mutations 1"
    (where / "finding.txt").write_text(f"python -m fuzz {again}\n{finding.kind}\n{finding.detail}")
    print(f"{case.name}: {finding.kind}\n  {where}\n  {again}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
