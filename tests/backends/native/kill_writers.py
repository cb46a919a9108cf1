"""Writers of prefixes that are killed: `python kill_writers.py ROUNDS`, in a cache of its own.

Prints how many files were there in the end, of how many; each was compared after each kill.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.native.prefix_files import BLOCK, PrefixFiles, StoreSettings
from lite_runner.system.files import cache_dir

TEXTS, BLOCKS, SIZE = 8, 12, 100_000


def content(slot: int, start: int, _: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng([slot, start]).integers(0, 256, SIZE, np.uint8)


def files() -> PrefixFiles:
    """Of a model whose slots hold `content`."""
    model = SimpleNamespace(
        bytes_of=lambda _: SIZE, read_positions=content, has_positions=lambda *_: True
    )
    table = np.zeros((BLOCKS * BLOCK, 4), np.float32)
    settings = StoreSettings("of nothing", 1 << 32)
    hooks = (lambda *_: None), (lambda _, length: length)
    return PrefixFiles(model, table, None, "fp16", settings, *hooks)  # type: ignore[arg-type]


def text(slot: int) -> NDArray[np.int32]:
    """Of an odd length, which a file knows nothing of."""
    return np.random.default_rng(slot).integers(0, 9, BLOCKS * BLOCK + 5).astype(np.int32)


def write() -> None:
    """As a server does, until it is killed."""
    store = files()
    for slot in random.sample(range(TEXTS), TEXTS):
        store.save(slot, text(slot), None, slot)
    time.sleep(60)


def check(store: PrefixFiles) -> int:
    """Compare all that can be found; how many blocks."""
    count = 0
    for slot in range(TEXTS):
        found = store.find(0, text(slot), None, 0, 0)
        for place, block in enumerate(found.blocks if found is not None else ()):
            assert block.tobytes() == content(slot, place * BLOCK).tobytes()
            count += 1
    return count


def main(rounds: int) -> None:
    found = 0
    for _ in range(rounds):
        if found == TEXTS * BLOCKS:
            for path in cache_dir().rglob("[0-9a-f]*"):
                if path.is_file() and random.random() < 0.9:
                    path.unlink()
        child = os.fork()
        if not child:
            write()
        time.sleep(random.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])  # it has not ended by itself
        store = files()
        found = check(store)
        store.close()
    hidden = [path for path in Path(cache_dir()).rglob(".*") if path.is_file()]
    print(f"{found} of {TEXTS * BLOCKS}, {len(hidden)} cut")


if __name__ == "__main__":
    main(int(sys.argv[1]))
