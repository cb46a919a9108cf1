"""A backend in a few lines, whose logits tell of every mistake in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import BASE, BackendInfo, Row
from lite_runner.backends.block_pool import BlockPool
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError
from lite_runner.generation import Completion, Engine, Finished, Generation, Request

Cached = tuple[int, int, int, bool]
Logits = Callable[[list[int], int], NDArray[np.float32]]


class MockSlots:
    """Adapters a, b, c, ... by name, in slots of which only some are there."""

    def __init__(self, slots: int) -> None:
        self.slots, self.loads, self.nbytes = slots, 0, 0
        self.known = {name: number for number, name in enumerate("abcdefgh", 1)}
        self.held: dict[int, str] = {}
        self.pins: dict[str, int] = {}
        self.most = 0

    def replace(self, name: str) -> None:
        """Another adapter of the name."""
        assert not self.pins.get(name)
        self.known[name] = max(self.known.values()) + 1
        self.held = {slot: held for slot, held in self.held.items() if held != name}

    def add(self, name: str) -> None:
        """Another adapter."""
        assert name not in self.known
        self.known[name] = max(self.known.values()) + 1

    def remove(self, name: str) -> None:
        """It is gone, unless it is pinned."""
        if self.pins.get(name):
            raise ConfigError(f"adapter {name} is in use")
        self.version(name)
        del self.known[name]
        self.held = {slot: held for slot, held in self.held.items() if held != name}

    def version(self, name: str) -> int:
        if name not in self.known:
            raise ConfigError(f"no adapter {name}")
        return self.known[name]

    def pin(self, name: str) -> int | None:
        number = self.version(name)
        places = {held: slot for slot, held in self.held.items()}
        if name not in places:
            free = [
                slot for slot in range(self.slots) if not self.pins.get(self.held.get(slot, ""))
            ]
            if not free:
                return None
            self.held[free[0]] = name
            self.loads += 1
        self.pins[name] = self.pins.get(name, 0) + 1
        self.most = max(self.most, sum(map(bool, self.pins.values())))
        assert number
        return {held: slot for slot, held in self.held.items()}[name]

    def unpin(self, name: str) -> None:
        assert self.pins[name] > 0
        self.pins[name] -= 1


class MockBackend:
    """Logits are a function of a slot's tokens and adapter: a wrong slot, position, adapter or copy
    changes them. Every row is recorded."""

    def __init__(
        self,
        logits: Logits,
        slots: int,
        max_length: int,
        adapter_slots: int,
        memory: tuple[int, int] | None = None,
        window: tuple[int, int] | None = None,
        **info: object,
    ) -> None:
        """`memory`: tokens of a block of the cache, and blocks; None: slots of their own. `window`:
        what a token sees of the blocks of other layers, and tokens of a step."""
        self.pool = None if memory is None else BlockPool(slots, max_length, *memory)
        self.pools = [] if self.pool is None else [self.pool]
        windows = None
        if window is not None and memory is not None:
            seen, step = window
            windows = BlockPool(slots, max_length, memory[0], window=seen, step=step)
            self.pools.append(windows)
        self.info = BackendInfo(
            **{
                "engine": "mock",
                "vocab_size": len(logits([0], 0)),
                "slots": slots,
                "max_length": max_length,
                "budget": 512,
                "chunk": 1,
                "most_logits": 64,
                "memory": self.pool,
                "windows": windows,
                "usable": None if windows is None else windows.usable,
                **info,
            }  # type: ignore[arg-type]
        )
        self.compile_s = 0.0
        self.adapters = MockSlots(adapter_slots)
        self.steps: list[list[Row]] = []
        self.copies: list[tuple[list[int], list[int]]] = []
        self._logits = logits
        # Of each slot its tokens, each with the adapter that it was computed by, its row.length,
        # and whether its row was beyond the length that longrope's short factors are for. With a
        # pool they are in its blocks.
        self._history: list[list[Cached]] = [[] for _ in range(slots)]
        self._blocks: list[list[list[Cached | None]]] = [  # of each pool
            [[None] * pool.block for _ in range(pool.size)] for pool in self.pools
        ]

    def prepare(self) -> None: ...

    def close(self) -> None: ...

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        assert len({row.slot for row in rows}) == len(rows) > 0
        assert sum(len(row.tokens) for row in rows) <= self.info.budget
        assert sum(row.logits for row in rows if row.logits > 1) <= self.info.most_logits
        self.steps.append(list(rows))
        found = [logits for row in rows for logits in self._run(row)]
        logits = np.array(found, np.float32).reshape(-1, self.info.vocab_size)
        logits.flags.writeable = False
        return logits

    def _run(self, row: Row) -> list[NDArray[np.float32]]:
        assert row.tokens.dtype == np.int32 and 0 <= row.logits <= len(row.tokens) >= 1
        history, number = self._cached(row), 0
        assert row.position <= len(history)
        del history[row.position :]
        if row.adapter_slot != BASE:
            number = self.adapters.version(self.adapters.held[row.adapter_slot])
        is_long = self.info.short_length is not None and row.end > self.info.short_length
        assert all((adapter, side) == (number, is_long) for _, adapter, _, side in history)
        if row.length:
            lengths = {length for _, _, length, _ in history}
            assert self.info.exact or 0 not in lengths
            assert self.info.can_continue or lengths <= {row.length}
        history += [(token, number, row.length, is_long) for token in row.tokens.tolist()]
        assert len(history) <= self.info.max_length
        self._history[row.slot] = history
        self._store(row)
        tokens = [token for token, *_ in history]
        ends = range(len(tokens) - row.logits + 1, len(tokens) + 1)
        return [self._logits(tokens[:end], number) for end in ends]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len(set(targets)) == len(targets) == len(sources) > 0
        self.copies.append((list(sources), list(targets)))
        taken = [list(self._history[source]) for source in sources]
        for target, history in zip(targets, taken, strict=True):
            self._history[target] = history
        for pool in self.pools:
            pool.fork(sources, targets)

    def release(self, slot: int, length: int) -> None:
        assert self.pools
        for pool in self.pools:
            pool.release(slot, length)
        del self._history[slot][length:]

    def _cached(self, row: Row) -> list[Cached]:
        """The cached tokens of a row's slot, in its blocks as far as the row attends to them."""
        history = list(self._history[row.slot])
        for pool, blocks in zip(self.pools, self._blocks, strict=True):
            table, first = pool.tables[row.slot], 0
            if pool.window:
                first = max(0, row.position + 1 - pool.window)
            places = range(first, row.position)
            assert all(table[place // pool.block] >= 0 for place in places)
            found = [blocks[table[place // pool.block]][place % pool.block] for place in places]
            assert found == history[first : row.position]
        return history

    def _store(self, row: Row) -> None:
        """Write a row's tokens to blocks that its slot alone has."""
        for pool, blocks in zip(self.pools, self._blocks, strict=True):

            def copy(source: int, target: int, blocks: Any = blocks) -> None:
                blocks[target] = list(blocks[source])

            pool.write(*row.part, copy)
            assert pool.writable(*row.part)
            table = pool.tables[row.slot]
            for place in range(*row.part[1:]):
                blocks[table[place // pool.block]][place % pool.block] = self._history[row.slot][
                    place
                ]

    @property
    def prefilled(self) -> list[list[int]]:
        """The tokens of every row that begins a slot."""
        rows = [row for step in self.steps for row in step]
        return [row.tokens.tolist() for row in rows if row.position == 0]


def hashed_logits(history: list[int], adapter: int) -> NDArray[np.float32]:
    """Different for every history; vocabulary of 16."""
    random = np.random.default_rng([adapter, len(history), *history])
    return random.normal(scale=2.0, size=16).astype(np.float32)


@cache
def _hashed(history: tuple[int, ...], adapter: int) -> NDArray[np.float32]:
    return hashed_logits(list(history), adapter)


def cached_logits(history: list[int], adapter: int) -> NDArray[np.float32]:
    """The result of `hashed_logits`, faster the second time."""
    return _hashed(tuple(history), adapter)


def cycling_logits(history: list[int], adapter: int) -> NDArray[np.float32]:
    """As `cached_logits`, but that texts nearly repeat themselves."""
    logits = cached_logits(history[-3:], adapter).copy()
    logits[(5 * history[-1] + 4) % 16] += 6.0
    return logits


def requests_of(
    prompts: Sequence[Sequence[int]], options: GenerationConfig, adapters: Sequence[str | None] = ()
) -> list[Request]:
    return [
        Request(
            np.array(prompt, np.int32),
            options,
            adapters[index] if adapters else None,
            (options.seed, index),
            name=f"prompt {index}",
        )
        for index, prompt in enumerate(prompts)
    ]


def generated(
    backend: MockBackend,
    prompts: Sequence[Sequence[int]],
    options: GenerationConfig,
    adapters: Sequence[str | None] = (),
    **hooks: object,
) -> Generation:
    """All prompts in one call."""
    engine = Engine(backend)
    return engine.generate(requests_of(prompts, options, adapters), **hooks)  # type: ignore[arg-type]


def asked(prompt: Sequence[int], new: int = 3, **others: Any) -> Request:
    options = GenerationConfig(max_new_tokens=new, **others.pop("options", {}))
    return Request(np.array(prompt, np.int32), options, **others)


def served(engine: Engine, requests: Sequence[Request] = ()) -> dict[int, Completion]:
    """The results of all queued requests, by number, after `requests` are added."""
    for request in requests:
        engine.add(request)
    found = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Finished):
                found[event.id] = event.completion
    return found


def tokens_alone(
    backend: Callable[[], MockBackend], requests: Sequence[Request]
) -> list[list[int]]:
    """The tokens of each on a backend of its own."""
    return [served(Engine(backend()), [request])[0].token_ids for request in requests]
