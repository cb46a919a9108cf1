"""Compiled graphs kept across runs.

MindSpore's own key leaves out the input shapes, so that one graph can be served for another:
every distinct graph gets a folder of its own here, named by a hash of all that shapes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import mindspore as ms
from mindspore.graph import api as graph_api

from lite_runner.system.code_digest import code_digest
from lite_runner.weights.files import sha256_of
from lite_runner.weights.source import GRAPHS, cache_dir

SEAL = ".sha256"

_claimed = False  # by the first backend of this process; see GraphCache


class GraphCache:
    """The cache folder of one backend's graphs.

    MindSpore takes the folder that it is first told of for the whole process, and numbers the
    graphs in it by the order in which they are compiled. So only the first backend of a process
    gets a folder (a run has one), and it must compile its graphs in an order that never varies:
    only those of the purpose that it compiles for first are kept.
    """

    def __init__(self, network: Mapping[str, object]) -> None:
        """`network`: all that the graphs depend on besides the code, as JSON has it."""
        global _claimed
        described = {
            **network,
            "mindspore": ms.__version__,
            "code": code_digest(),
            # MindSpore throws an entry away that another program has made.
            "program": str(_program()),
        }
        self._described = described
        self._active = not _claimed and _program().is_file()
        _claimed = True
        self._purpose = ""  # of the graphs that are kept
        self._folder = Path()
        self._next = 0

    @contextmanager
    def entry(self, purpose: str = "generate") -> Iterator[bool]:
        """Compile one graph within; yields whether it is read from the cache."""
        if self._active and not self._purpose:
            self._purpose = purpose
            told = json.dumps(self._described | {"purpose": purpose}, sort_keys=True)
            name = hashlib.sha256(told.encode()).hexdigest()[:32]
            self._folder = cache_dir() / GRAPHS / name
            self._active = _is_writable(self._folder)
        if not self._active or purpose != self._purpose:
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
