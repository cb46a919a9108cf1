"""Compiled graphs kept across runs.

MindSpore's own key leaves out the input shapes, so that one graph can be served for another:
every distinct graph gets a folder of its own here, named by a hash of all that shapes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore.graph import api as graph_api

from lite_runner.config.model import REGISTERED, ModelConfig
from lite_runner.weights.files import sha256_of
from lite_runner.weights.source import cache_dir

if TYPE_CHECKING:
    from lite_runner.backends.online import OnlineOptions
    from lite_runner.models.lora import LoraSize

SEAL = ".sha256"
PACKAGE = Path(__file__).resolve().parent.parent
COMPILED_FROM = sorted(
    [
        *PACKAGE.glob("models/*.py"),
        *(PACKAGE / "backends" / f"{name}.py" for name in ("device", "online")),
    ]
)

_claimed = False  # by the first backend of this process; see GraphCache


class GraphCache:
    """The cache folder of one backend's graphs.

    MindSpore takes the folder that it is first told of for the whole process, and numbers the
    graphs in it by the order in which they are compiled. So only the first backend of a process
    gets a folder (a run has one), and it must compile its graphs in an order that never varies.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: OnlineOptions,
        length: int,
        adapters: LoraSize | None = None,
    ) -> None:
        global _claimed
        described = {
            "model": asdict(config),
            "shapes": [options.slots, length, options.use_past],
            "placed": [options.dtype, options.device],
            "ranks": [*astuple(options.ranks), options.vocab_parallel],
            "adapters": adapters and [adapters.places, adapters.rank, sorted(adapters.targets)],
            "mindspore": ms.__version__,
            "code": sha256_of(*COMPILED_FROM),
            "network": REGISTERED.get(config.family),
            # MindSpore throws an entry away that another program has made.
            "program": str(_program()),
        }
        name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
        self._folder = cache_dir() / "graphs" / name
        self._active = not _claimed and _program().is_file() and _is_writable(self._folder)
        _claimed = True
        self._next = 0

    @contextmanager
    def entry(self) -> Iterator[bool]:
        """Compile one graph within; yields whether it is read from the cache."""
        if not self._active:
            yield False
            return
        # Under msrun MindSpore puts its role before the names.
        name = f"{os.environ.get('MS_ROLE', '')}compile_cache_{self._next}.mindir"
        graph = self._folder / "rank_0" / "graph_cache" / name
        self._next += 1
        cached = _is_whole(graph)
        ms.set_context(enable_compile_cache=True, compile_cache_path=str(self._folder))
        try:
            yield cached
            if not cached:
                _seal(graph)
        finally:
            ms.set_context(enable_compile_cache=False)


def _is_whole(graph: Path) -> bool:
    """Whether a kept graph is as it was written; MindSpore would not notice a changed constant."""
    try:
        if sha256_of(graph) == graph.with_suffix(SEAL).read_text():
            return True
        graph.unlink()
    except OSError:
        pass
    return False


def _seal(graph: Path) -> None:
    with suppress(OSError):  # an entry without its seal is made anew
        graph.with_suffix(SEAL).write_text(sha256_of(graph))


def _program() -> Path:
    """The file that MindSpore took for the program when it was imported; it reads that for its key,
    so without one (`python -c`) there is no cache."""
    return Path(getattr(graph_api, "entry_script_path", None) or "/")


def _is_writable(folder: Path) -> bool:
    """Whether graphs can be kept; a run does without the cache where they cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
