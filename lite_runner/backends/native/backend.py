"""The native backend: our own CPU kernels (lite_runner.native).

A step takes tokens of any rows up to its capacity, prefill and decode together (continuous
batching). Logits are batch-invariant: bit-identical whatever else is in the batch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.architectures.positions import (
    Ints,
    PromptPrefix,
    RotaryAngles,
    last_seen,
    positions_of,
    prefix_angles,
)
from lite_runner.architectures.quantization import CacheType
from lite_runner.architectures.spec import Decoder, Prefix
from lite_runner.backends import (
    BASE,
    BackendInfo,
    Row,
    cache_length,
    check_rows,
    rows_at_once,
    step_capacity,
    unchunked,
)
from lite_runner.backends.block_pool import BlockPool, Part, window_blocks
from lite_runner.native.model import BLOCK, NativeModel, WindowBlocks, state_floats
from lite_runner.native.model import NativeOptions as NativeOptions
from lite_runner.native.structs import Packed
from lite_runner.records import dataclass
from lite_runner.sizing import cache_bytes

if TYPE_CHECKING:
    from lite_runner.backends.adapter_slots import AdapterSlots
    from lite_runner.backends.native.next_token import NextToken
    from lite_runner.backends.native.prefix_files import PrefixFiles, StoreSettings
    from lite_runner.backends.native.slot_states import SlotStates
    from lite_runner.native.peers import Peers
    from lite_runner.weights.lora.adapter import Adapter


class NativeBackend:
    """See `lite_runner.backends.Backend`."""

    compile_s = 0.0

    def __init__(
        self,
        config: Decoder,
        layers: Iterable[Packed],
        options: NativeOptions,
        adapters: Sequence[Adapter] = (),
        *,
        threads: int | None = None,
        peers: Peers | None = None,
        store: StoreSettings | None = None,
        reproducible: bool = False,
        draft: NativeBackend | None = None,
        next_token: Callable[[NativeModel], NextToken] | None = None,
        learned: NDArray[np.float32] | None = None,
    ) -> None:
        """`layers`: as `pack` returns them; `adapters`: the initial ones, if `options` have adapter
        slots; `threads` None: one per processor available to this process; `peers`: the ranks that
        have the rest of each layer; `store`: where prefixes are to be kept in files;
        `reproducible`: the same bits on every processor; `draft`: a smaller model, which
        drafts tokens; `next_token`: makes the layer that does, from the model; `learned`: the
        model's learned keys and values: see model/learned_keys.py."""
        native.set_threads(threads)
        native.choose_kernels(reproducible=reproducible)
        self._config, self._reproducible = config, reproducible
        # In each slot's cache they are in front of its tokens, at positions that only this class
        # and its pool know.
        self._learned, self._ahead = learned, config.learned_keys
        self._model: NativeModel | None = None  # closed by close(), even after an error below
        self.stored: PrefixFiles | None = None
        self.draft = draft
        model = NativeModel(config, layers, options.lora.slots if options.lora else 0, peers)
        self._model = model
        self.next_token = None if next_token is None else next_token(model)
        self.adapters: AdapterSlots | None = None
        if options.lora is not None:
            from lite_runner.backends.adapter_slots import AdapterSlots

            self.adapters = AdapterSlots(model.adapters, adapters, options.lora)
        self._configure(options)
        if store is not None:
            from lite_runner.backends.native.prefix_files import PrefixFiles

            self.stored = PrefixFiles(
                model,
                self._metadata.table,
                self.adapters,
                options.cache,
                store,
                self._reserve,
                self._usable,
            )

    def _configure(self, options: NativeOptions) -> None:
        """Set everything that depends on the cache size."""
        assert self._model is not None
        config = self._config
        if self.draft is not None:
            options = self._shared(self.draft, options)
        length = cache_length(options.length, config.seq_length)
        whole = unchunked(config, length)
        self._capacity = step_capacity(options.slots, whole)
        options, pool, windows = self._pools_of(replace(options, length=length))
        self._options = options
        self._pool, self._windows = pool, windows
        self._pools = [pool] if windows is None else [pool, windows]
        self._metadata = BatchMetadata(
            config, length + self._ahead, self._capacity, reproducible=self._reproducible
        )
        self._states: SlotStates | None = None  # before the new ones are allocated
        whole_length = replace(options, length=length + self._ahead)
        table = self._metadata.table
        blocks = None
        if windows is not None:
            blocks = WindowBlocks(windows.window, windows.tables, windows.size)
        self._model.resize(whole_length, self._capacity, table, pool.tables, pool.size, blocks)
        if self.next_token is not None:
            same = self._reproducible
            self.next_token.resize(whole_length, self._capacity, reproducible=same)
        if self._learned is not None:
            self._model.write_keys(pool.front, self._learned)
        if config.recurrent is not None:
            from lite_runner.backends.native.slot_states import SlotStates

            self._states = SlotStates(self._model.states, self._model.kept_states, length)
        self.info = BackendInfo(
            engine=f"native, {native.instructions()} kernels",
            vocab_size=config.vocab_size,
            slots=options.slots,
            max_length=options.length,
            budget=self._capacity,
            chunk=whole or 1,
            hidden_size=config.hidden_size,
            most_logits=rows_at_once(config.vocab_size, self._capacity),
            can_continue=config.keys_reusable,
            short_length=config.short_length,
            prefix=config.prefix,
            memory=pool,
            windows=windows,
            usable=None if (kept := self._states or windows) is None else kept.usable,
        )

    def _pools_of(
        self, options: NativeOptions
    ) -> tuple[NativeOptions, BlockPool, BlockPool | None]:
        """The pool of the cache's blocks, and that of layers with windows, if they have another;
        the options with fewer slots, if there is no memory for the windows of more."""
        assert self._model is not None
        config, slots, length = self._config, options.slots, options.length
        window = window_of(config, length, self._capacity)
        # All layers' blocks, or those of the layers without and with a window.
        size, windowed = self._model.block_bytes(options.cache), 0
        if window:
            windowed = self._model.block_bytes(options.cache, windowed=True)
            size -= windowed
        if self.next_token is not None:
            size += self.next_token.block_bytes(options)
        blocks = None
        if options.cache_bytes is not None:
            left = options.cache_bytes - slots * state_bytes(config)
            if window:  # first: they are never waited for
                one = window_blocks(window, self._capacity, BLOCK) * windowed
                slots = max(1, min(slots, (left - length * size // BLOCK) // one))
                left -= slots * one
            blocks = left // max(1, size)
        options = replace(options, slots=slots)
        pool = BlockPool(slots, length, BLOCK, blocks, self._ahead, block_bytes=size)
        if not window:
            return options, pool, None
        seen = {"window": window, "step": self._capacity, "block_bytes": windowed}
        return options, pool, BlockPool(slots, length, BLOCK, **seen)

    def grow(self, slots: int, length: int, cache_bytes: int | None = None) -> None:
        """Reallocate the cache; the weights and the adapters stay."""
        options = self._options
        self._configure(replace(options, slots=slots, length=length, cache_bytes=cache_bytes))
        if self.stored is not None:
            self.stored.rotate(self._metadata.table)

    def _shared(self, draft: NativeBackend, options: NativeOptions) -> NativeOptions:
        """The options less the draft model's share of the cache memory."""
        assert self._model is not None and draft._model is not None
        length = min(options.length, draft._config.seq_length)
        sizes = [
            slot_bytes(config, options.slots, most, options.cache)
            for config, most in ((self._config, options.length), (draft._config, length))
        ]
        rest = part = options.cache_bytes
        if rest is not None:
            part = rest * sizes[1] // sum(sizes)
            rest -= part
        draft.grow(options.slots, length, part)
        return replace(options, cache_bytes=rest)

    def prepare(self) -> None:
        """No effect: there is no graph to compile."""

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab], in the order of rows and tokens."""
        every, info = self._batch(rows), self.info
        logits = np.empty((len(every.wanted), info.vocab_size), np.float32)
        for part, here in self._parts(every, max(info.slots, info.most_logits)):
            logits[here] = self._run(every, part, every.wanted[here])
        return logits

    def hidden(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Hidden states [sum of row.logits, hidden_size], in the order of rows and tokens."""
        assert self._model is not None
        every = self._batch(rows)
        hidden = np.empty((len(every.wanted), self._config.hidden_size), np.float32)
        for part, here in self._parts(every, self._capacity):
            self._run(every, part, every.wanted[:0])
            hidden[here] = self._model.hidden(every.wanted[here] - part.start)
        return hidden

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        for pool in self._pools:
            pool.fork(sources, targets)
        self._metadata.copy(sources, targets)
        if self.next_token is not None:
            self.next_token.copy(sources, targets)
        if self._states is not None:
            self._states.copy(sources, targets)

    def release(self, slot: int, length: int) -> None:
        """Free the blocks of a slot's tokens from `length` on."""
        for pool in self._pools:
            pool.release(slot, length)
        if self.next_token is not None:
            self.next_token.release(slot, length)
        if self._states is not None:
            self._states.release(slot, length)

    def _reserve(self, *parts: Part) -> None:
        """Give slots blocks of their own for tokens that are about to be written."""
        for pool in self._pools:
            self._reserve_in(pool, parts)

    def _usable(self, slot: int, length: int) -> int:
        return min(pool.usable(slot, length) for pool in self._pools)

    def _reserve_in(self, pool: BlockPool, parts: Sequence[Part]) -> None:
        assert self._model is not None
        if pool.reserve(parts, partial(self._model.copy_block, pool.tables)):
            for slot, start, end in parts:
                places = self._ahead + start, self._ahead + end
                self._model.use_huge_pages(pool.tables, slot, *places)

    def close(self) -> None:
        """Release the model and its memory, once its prefixes are stored."""
        if self.stored is not None:
            self.stored.close()
            self.stored = None
        if self.draft is not None:
            self.draft.close()
        if self.next_token is not None:
            self.next_token.close()
            self.next_token = None
        if self._model is not None:
            self._model.close()
            self._model = self.adapters = None

    # Bound as a default: at interpreter shutdown module globals may be cleared first.
    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    def _batch(self, rows: Sequence[Row]) -> TokenBatch:
        check_rows(rows, self.info, 0 if self.adapters is None else self.adapters.slots)
        self._reserve_in(self._pool, [row.part for row in rows])
        if self._states is not None:  # recomputed tokens have the same bits in shared blocks
            rows = self._states.seek(rows)
        if self._ahead:
            rows = [replace(row, position=row.position + self._ahead) for row in rows]
        return TokenBatch.of(rows)

    def _parts(self, every: TokenBatch, most_logits: int) -> Iterator[tuple[slice, slice]]:
        stops = () if self._states is None else self._states.stops(every.rows)
        whole = self.info.prefix is not None
        return every.parts(self._capacity, most_logits, whole_rows=whole, stops=stops)

    def _run(
        self, every: TokenBatch, part: slice, wanted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """One step over a part of the tokens -> logits after the `wanted` ones."""
        assert self._model is not None
        if self._windows is not None:  # a step at a time: blocks before it may be given back
            self._reserve_in(self._windows, every.within(part))
        metadata, table = self._metadata.of(every, part, wanted)
        slots = None
        if self.adapters is not None:  # of each token
            slots = np.full(self._capacity, BASE, np.int32)
            owner = every.owner[part]
            slots[: len(owner)] = np.array([row.adapter_slot for row in every.rows])[owner]
        if self._states is None:
            logits = self._model.run(metadata, table, slots, len(wanted))
        else:
            drafts = every.before_drafts(part)
            self._model.kept.fill(-1)
            for slot, (token, _) in drafts.items():
                self._model.kept[slot] = token
            before = {slot: end for slot, (_, end) in drafts.items()}
            with self._states.changed(every.ends(part), before):
                logits = self._model.run(metadata, table, slots, len(wanted))
        if self.next_token is not None:
            self.next_token.follow(every, part)
        return logits


def window_of(model: Decoder, length: int, step: int) -> int:
    """Tokens that one sees at most in layers with windows, if these need fewer blocks than others;
    `step`: tokens that are computed at once. 0: all layers have the same blocks."""
    # A state that was not kept is computed again from tokens long before.
    if model.recurrent is not None or model.prefix is not None or model.learned_keys:
        return 0
    seen = max((one.most_seen or 0 for one in model.cached), default=0)
    return seen if seen and window_blocks(seen, step, BLOCK) * BLOCK < length else 0


def slot_bytes(model: Decoder, slots: int, length: int, cache: CacheType) -> int:
    """Bytes of the keys and values of one of so many slots of `length` tokens."""
    length = cache_length(length, model.seq_length)
    step = step_capacity(slots, unchunked(model, length))
    window = window_of(model, length, step)
    windowed = BLOCK * window_blocks(window, step, BLOCK) if window else None
    return cache_bytes(model, "float32", 1, length + model.learned_keys, cache, windowed)


def state_bytes(model: Decoder) -> int:
    """Bytes of the recurrent state of a slot, with its snapshots."""
    if model.recurrent is None:
        return 0
    from lite_runner.backends.native.slot_states import SNAPSHOTS

    return 4 * (2 + SNAPSHOTS) * state_floats(model)  # the one before drafts too


class SlotPrefixes:
    """The prefix of the prompt in each slot, as part of its cache."""

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self._of: dict[int, PromptPrefix] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        """Record the prompts that begin among the rows; each row has a whole one."""
        for row in rows:
            if row.position == 0:
                self._of[row.slot] = PromptPrefix.of(self._prefix, row.tokens)

    def of(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Length and mask position of the prefix [n] in each of the slots [n]."""
        found = [self._of.get(int(slot), PromptPrefix()) for slot in slots]
        lengths = np.array([one.length for one in found], np.int64)
        return lengths, np.array([one.mask for one in found], np.int64)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        copied = [self._of.get(source, PromptPrefix()) for source in sources]
        self._of |= dict(zip(targets, copied, strict=True))


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of all rows, concatenated (no padding)."""

    rows: Sequence[Row]
    tokens: NDArray[np.int32]
    owner: NDArray[np.int64]  # row index of each token
    wanted: NDArray[np.int64]  # indices in `tokens` to return logits for

    @classmethod
    def of(cls, rows: Sequence[Row]) -> TokenBatch:
        lengths = [len(row.tokens) for row in rows]
        tokens = np.concatenate([row.tokens for row in rows])
        owner = np.repeat(np.arange(len(rows)), lengths)
        left = np.cumsum(lengths)[owner] - np.arange(len(tokens))  # remaining tokens of the row
        wanted = np.flatnonzero(left <= np.array([row.logits for row in rows])[owner])
        return cls(rows, tokens, owner, wanted)

    def parts(
        self, capacity: int, most_logits: int, *, whole_rows: bool, stops: Iterable[int] = ()
    ) -> Iterator[tuple[slice, slice]]:
        """Split into steps of at most `capacity` tokens, and at `stops`, in order: slices of
        `tokens` and of `wanted`. Raises ValueError for a row that is not to be split (`whole_rows`)
        and does not fit a step."""
        start = first = 0
        ahead = deque(stops)
        while start < len(self.tokens):
            while ahead and ahead[0] <= start:
                ahead.popleft()
            end = min(start + capacity, len(self.tokens), *list(ahead)[:1])
            last = int(np.searchsorted(self.wanted, end))
            if last > first + most_logits:
                last = first + most_logits
                end = int(self.wanted[last])
            if whole_rows and end < len(self.tokens):
                end = int(np.searchsorted(self.owner, self.owner[end]))  # start of that row
                last = int(np.searchsorted(self.wanted, end))
                if end <= start:
                    raise ValueError(f"a row does not fit a step of {capacity} tokens")
            yield slice(start, end), slice(first, last)
            start, first = end, last

    def within(self, part: slice) -> list[Part]:
        """Slots of a part, and where its tokens begin and end in each."""
        found = []
        for row, first in self.starts():
            begin, end = max(first, part.start), min(first + len(row.tokens), part.stop)
            if begin < end:
                found.append((row.slot, row.position + begin - first, row.position + end - first))
        return found

    def ends(self, part: slice) -> dict[int, int]:
        """Slots of a part, and each one's tokens after it."""
        return {slot: end for slot, _, end in self.within(part)}

    def before_drafts(self, part: slice) -> dict[int, tuple[int, int]]:
        """Slots with drafts: the index in the part of the token before them, and how many tokens
        the slot has then."""
        found = {}
        for row, first in self.starts():
            known = len(row.tokens) - row.logits + 1
            if row.drafts and part.start < first + known <= part.stop:
                found[row.slot] = first + known - 1 - part.start, row.position + known
        return found

    def starts(self) -> Iterator[tuple[Row, int]]:
        """The rows, and the index of each one's first token."""
        first = 0
        for row in self.rows:
            yield row, first
            first += len(row.tokens)


def empty_metadata(capacity: int, most: int, prefix: Prefix | None = None) -> NDArray[np.int32]:
    """The metadata of a step without tokens, of at most `capacity` and with at most `most` rows of
    logits; `prefix`: the model's."""
    columns = 4 if prefix is None else 5
    return np.zeros(2 + columns * capacity + most, np.int32)


class BatchMetadata:
    """Builds the inputs of a step: see Step in native/src/layers.h."""

    def __init__(
        self, config: Decoder, length: int, capacity: int, *, reproducible: bool = False
    ) -> None:
        """`length`: positions per slot; `capacity`: tokens per step; `reproducible`: angles have
        the same bits on every processor."""
        self._capacity = capacity
        self._angles = _Angles(config, length, capacity, reproducible=reproducible)
        self._prefix = config.prefix
        self._prefixes = SlotPrefixes(config.prefix) if config.prefix is not None else None

    @property
    def table(self) -> NDArray[np.float32]:
        """Rotary table of all positions [rows, R * head_dim], cos then sin of each of the model's R
        rotary positions; only its shape is used where every step has its own (dynamic scaling,
        or block positions)."""
        return self._angles.table

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Record copied cache slots."""
        if self._prefixes is not None:
            self._prefixes.copy(sources, targets)

    def of(
        self, every: TokenBatch, part: slice, wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Metadata and rotary table of a step over a `part` of the tokens, with logits after the
        `wanted` ones."""
        tokens, owner = every.tokens[part], every.owner[part]
        count, capacity, rows = len(tokens), self._capacity, every.rows
        metadata = empty_metadata(capacity, len(wanted), self._prefix)
        metadata[:2] = count, len(wanted)
        columns = metadata[2 : 2 + 4 * capacity].reshape(4, capacity)[:, :count]
        token, slot, position, angle = columns
        token[:] = tokens
        slot[:] = np.array([row.slot for row in rows], np.int32)[owner]
        first = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])])
        offset = np.array([row.position for row in rows]) - first
        position[:] = np.arange(part.start, part.stop) + offset[owner]
        if self._prefixes is None:
            ends = np.array([row.end for row in rows])[owner]
            table = self._angles.of(position, ends, angle)
        else:
            self._prefixes.begin(rows)
            lengths, masks = self._prefixes.of(slot)
            metadata[-capacity:][:count] = last_seen(position, lengths)
            table = self._angles.two_dimensional(*positions_of(position, lengths, masks), angle)
        metadata[2 + 4 * capacity :][: len(wanted)] = wanted - part.start
        return metadata, table


class _Angles:
    """Rotary tables: by position; or per token of a step, with dynamic scaling and where positions
    are two-dimensional."""

    def __init__(self, config: Decoder, length: int, capacity: int, *, reproducible: bool) -> None:
        self.by_step = config.length_dependent
        self.table = np.zeros((1, 1), np.float32)
        angles = [
            RotaryAngles(one, config.rotated_head(one), reproducible=reproducible)
            for one in config.rotaries
        ]
        self._two_dimensional = prefix_angles(config, length, reproducible=reproducible)
        if self.by_step:
            (self._angles,) = angles
            self.table = np.zeros((capacity, config.head_dim), np.float32)
        elif angles:
            ahead = config.learned_keys
            every = [one for each in angles for one in each.table(length - ahead)]
            self.table = np.pad(np.concatenate(every, 1), ((ahead, 0), (0, 0)))

    def of(
        self, position: NDArray[np.int32], lengths: NDArray[np.int64], rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """The table; the table row of each token is written to `rows`."""
        if not self.by_step:
            rows[:] = position
            return self.table
        return self._of_step(self._angles.scaled(position, lengths), rows)

    def two_dimensional(
        self, position: Ints, block: Ints, rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """The same by positions and block positions."""
        assert self._two_dimensional is not None
        return self._of_step(self._two_dimensional.of(position, block), rows)

    def _of_step(
        self, angles: tuple[NDArray[np.float32], NDArray[np.float32]], rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        rows[:] = np.arange(len(rows))
        table = np.zeros(self.table.shape, np.float32)
        table[: len(rows)] = np.concatenate(angles, 1)
        return table
