"""Memory bandwidth of this machine's threads together: the limit of a decoder of one row.

Dot products of large arrays with themselves; NumPy's are the fastest reader that it has.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor


def read_gb_s(threads: int, mebibytes: int = 256, rounds: int = 10) -> float:
    """The best of some rounds over `mebibytes` of float32 that no cache holds, in 1e9 bytes/s."""
    # A dot product is not to be split again; NumPy reads this when it is imported.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy as np

    array = np.ones(mebibytes * 2**18, np.float32)
    parts = np.array_split(array, threads)
    fastest = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            started = time.perf_counter()
            list(pool.map(np.dot, parts, parts))
            fastest = min(fastest, time.perf_counter() - started)
    return array.nbytes / fastest / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    print(f"{read_gb_s(parser.parse_args().threads):.1f}")


if __name__ == "__main__":
    main()
