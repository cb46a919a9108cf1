"""A short form of `make soak`."""

from __future__ import annotations

import asyncio
import threading

from tests.generation.mock import MockBackend
from tests.serving.conftest import Start, letters
from tests.serving.soak import Soak


def test_every_answer_is_the_one_alone_and_nothing_is_left(start: Start) -> None:
    served = start(MockBackend(letters, 4, 256, 2), max_queue=40)
    soak = Soak(served.url, ["base", "a", "b"])
    asyncio.run(soak.run(40, clients=4))  # warm: threads that stay
    threads = threading.active_count()
    asyncio.run(soak.run(320, clients=64))
    kinds = {"whole", "streamed", "left", "malformed", "unread"}
    assert kinds <= soak.done.keys() and len(set(soak.alone.values())) > 20
    served.until_idle()
    assert served.server.engine.load.running == served.server.engine.load.waiting == 0
    assert threading.active_count() <= threads + 4  # the pool of asyncio's own
    slots = served.backend.adapters
    assert not any(slots.pins.values())
