"""context.cache_limit: what exceeds it is removed from the cache at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lite_runner import progress
from lite_runner.config.schema import RunConfig
from lite_runner.config.sizes import bytes_of
from lite_runner.sizing.need import readable
from lite_runner.weights.caches import trim

SHOWN = 5


@contextmanager
def limited_cache(config: RunConfig) -> Iterator[None]:
    """Context of a run; nothing that the run itself used is removed."""
    limit, began = config.context.cache_limit, time.time()
    yield
    if limit is None or config.dry_run or not config.leaves_folder:
        return
    if removed := trim(bytes_of(limit), began):
        names = [f"{name} ({readable(size)})" for name, size in removed.items()]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        progress.note(
            f"removed from the cache, least recently used: {', '.join(names[:SHOWN])}{more};"
            f" context.cache_limit={limit}"
        )
