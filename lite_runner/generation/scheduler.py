"""The scheduler: continuous batching with chunked prefill.

Requests can be added and finished at any time. A step decodes one token of every running sequence
and fills the token budget with prefill chunks, so that a long prompt never stalls the others.
Decisions depend only on the order of calls, so ranks that make the same ones compute the same rows.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import BASE, Backend, Paged, Row, StoredPrefix, StoredPrefixes
from lite_runner.config.generation import FinishReason
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.generation.decoding import SequenceGroup, strategies_of
from lite_runner.generation.request import (
    Event,
    Finished,
    GenerationTiming,
    Pace,
    Request,
    Token,
    check_lengths,
)
from lite_runner.generation.sampling import LogprobCollector
from lite_runner.generation.slots import GroupMemory, Placement, Slots
from lite_runner.system.signals import deferred

if TYPE_CHECKING:
    from lite_runner.backends.adapter_slots import AdapterSlots
    from lite_runner.generation.draft_model import Drafts


@dataclass(slots=True)
class SchedulerOutput:
    """The rows of a step and their groups."""

    rows: list[Row] = field(default_factory=list)
    decoding: list[tuple[SequenceGroup, list[Row]]] = field(default_factory=list)  # with their rows
    # One prefill row each, behind the decode rows.
    prompts: list[SequenceGroup] = field(default_factory=list)
    scored: bool = False  # prompt tokens get log-probabilities
    sampled: int = 0  # tokens chosen after the decode rows, once it is over

    @property
    def of_prompts(self) -> list[Row]:
        """The prefill rows."""
        return self.rows[len(self.rows) - len(self.prompts) :]


class Scheduler:
    """Schedules many requests over the slots of one backend. Not thread-safe."""

    def __init__(
        self,
        backend: Backend,
        token_budget: int | None = None,
        *,
        prefix_cache: bool = True,
        step_s: float | None = None,
        drafts: Drafts | None = None,
        stored: StoredPrefixes | None = None,
    ) -> None:
        """`token_budget`: maximum tokens per step (None: the backend's preference); `prefix_cache`:
        reuse cached prefixes of prompts; `step_s`: seconds of a step to aim at while sequences are
        decoding, by computing less of prompts (None: no limit); `drafts`: of tokens, to be computed
        ahead where that pays; `stored`: prefixes in files. These go by the clock and the disk, so
        ranks that share a model do without, and take batch-invariant logits.

        Raises ConfigError if the budget does not fit a chunk besides a token of all other slots."""
        self.timing = GenerationTiming()
        self.adapter_s: dict[str | None, float] = {}  # seconds of the steps, by adapter
        self._backend, self._info, self._adapter_slots = backend, backend.info, backend.adapters
        info = self._info
        self._budget = info.budget if token_budget is None else token_budget
        if info.windows is not None:  # else blocks that the first tokens attend to would be freed
            self._budget = min(self._budget, info.budget)
        least = info.slots - 1 + info.chunk
        if self._budget < least:
            raise ConfigError(
                f"token_budget: got {self._budget}, expected at least {least}: a token of each of"
                f" {info.slots - 1} other slots, and {info.chunk} of a prompt"
            )
        self._slots = Slots(info, prefix_cache=prefix_cache)
        self._pace = Pace(step_s) if step_s is not None and info.exact else None
        reusable = info.exact and info.can_continue and not info.short_length
        reusable = reusable and info.prefix is None
        self._stored = stored if prefix_cache and reusable else None
        self._drafts = drafts if reusable and info.most_logits > 0 else None
        # Recomputing a text gives the same keys: the youngest may make room, and come again.
        self._preempts = info.exact and info.can_continue
        self._memory: GroupMemory | None = None  # None: there is memory for all slots
        if info.memory is not None and info.memory.scarce:
            drafted = 0 if self._drafts is None else self._drafts.most_drafted
            most = drafted if self._preempts else None
            self._memory = GroupMemory(info.memory, info.max_length, most)
        self._waiting: list[SequenceGroup] = []  # both in queue order
        self._running: list[SequenceGroup] = []
        self._slot_work: list[Callable[[], None]] = []  # to be done before the next rows
        self._unreported: list[Event] = []
        self._next_id = 0

    @property
    def idle(self) -> bool:
        """True if there are no requests."""
        return not (self._waiting or self._running)

    @property
    def waiting(self) -> int:
        """Queued groups without slots."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that have cache slots."""
        return sum(len(group.slots_in_use()) for group in self._running)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the running sequences in the KV cache."""
        return sum(group.cached_tokens for group in self._running)

    @property
    def cache_usage(self) -> float:
        """Share of the KV cache that the running sequences use."""
        info = self._info
        if info.memory is None:
            return self.cached_tokens / (info.slots * info.max_length)
        parts = [
            (slot, info.max_length) for group in self._running for slot in group.slots_in_use()
        ]
        pools = [one for one in (info.memory, info.windows) if one is not None]
        used = sum(one.held(parts) * one.block_bytes for one in pools)
        return used / sum(one.blocks * one.block_bytes for one in pools)

    @property
    def adapters(self) -> tuple[set[str], set[str]]:
        """Names that running groups use, and waiting ones."""
        running, waiting = (
            {group.request.adapter for group in groups if group.request.adapter is not None}
            for groups in (self._running, self._waiting)
        )
        return running, waiting

    def add(self, request: Request) -> int:
        """Queue a request and return its id, larger than all before.

        Raises ConfigError if it does not fit the backend, or its adapter is unknown.
        """
        self._check(request)
        id, self._next_id = self._next_id, self._next_id + 1
        top = request.options.prompt_logprobs
        drafter = None if self._drafts is None else self._drafts.sequence
        for part, strategy in enumerate(strategies_of(id, request, self._info, drafter)):
            places = None if top is None else LogprobCollector(top)
            order, shares = (request.priority, id, part), self._preempts and self._info.can_copy
            group = SequenceGroup(id, order, request, strategy, shares, places)
            insort(self._waiting, group, key=lambda one: one.order)
        return id

    def finish(
        self, id: int, reason: FinishReason = "interrupted", index: int | None = None
    ) -> list[Finished]:
        """Finish a request now, or only its sequence `index`, with partial completions; sequences
        that `events` has already reported are not repeated. The slots are free at the next step."""
        unreported = [event for event in self._unreported if _is_of(event, id, index)]
        self._unreported = [event for event in self._unreported if event not in unreported]
        ended = [event for event in unreported if isinstance(event, Finished)]
        for group in [one for one in (*self._running, *self._waiting) if one.id == id]:
            ended += group.finish(reason, index)
        for group in [group for group in self._waiting if not group.strategy.running()]:
            self._dequeue(group)
        self._retire()
        return ended

    def schedule(self) -> SchedulerOutput:
        """The rows of the next step. Until `update`, the next call gives the same rows, but for
        what is added or finished between, and goes on with the slots after an exception of the
        backend."""
        if self._changes:
            with deferred():
                self._copy_prefixes()
                self._restart()
                self._admit()
                self._make_room()
                self._do_slot_work()
        return self._compose()

    def update(
        self,
        step: SchedulerOutput,
        logits: NDArray[np.float32],
        seconds: Callable[[], float],
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        """Choose the next tokens from the logits of a step; `seconds` that it has taken so far,
        without compiling; `hidden`: the hidden states of rows that have these instead."""
        with deferred():
            self._advance(step, logits, hidden)
            self._retire()
            self._count(step, seconds())

    def events(self) -> list[Event]:
        """The events since the last call."""
        events, self._unreported = self._unreported, []
        return events

    @property
    def _changes(self) -> bool:
        """True if something may precede the rows of a step. Deferring signals takes a quarter of
        the time of a step, so one that only decodes does without."""
        return bool(
            self._waiting
            or self._slot_work
            or self._info.short_length is not None
            or self._memory is not None
            or any(group.source is not None for group in self._running)
        )

    def _check(self, request: Request) -> None:
        options, info = request.options, self._info
        check_lengths([len(request.prompt)], [options], info.max_length, [request.name])
        if error := info.prompt_error(request.prompt):
            raise ConfigError(f"{request.name} {error}")
        for token in (int(request.prompt.min()), int(request.prompt.max())):
            if not 0 <= token < info.vocab_size:
                raise ConfigError(
                    f"{request.name}: got token {token}, expected 0 to {info.vocab_size - 1}"
                )
        if request.pooling is not None and not info.hidden_size:
            raise ConfigError(
                f"{request.name}: {info.engine} gives no embeddings", "backend=native"
            )
        if options.num_beams > info.slots:
            raise ConfigError(f"num_beams={options.num_beams}, but there are {info.slots} slots")
        several = max(options.num_beams, min(options.num_return_sequences, info.slots)) > 1
        if several and not info.can_copy:
            raise ConfigError(
                "beams and num_return_sequences copy cache slots, which"
                f" {info.engine} does not support"
            )
        if options.num_beams > 1 and options.logprobs is not None:
            raise ConfigError("logprobs are not available with num_beams above 1")
        if options.prompt_logprobs is not None and not info.most_logits:
            raise ConfigError(
                f"prompt_logprobs: {info.engine} gives logits after a prompt's last token only"
            )
        if options.prompt_logprobs is not None and info.prefix is not None:
            raise ConfigError("prompt_logprobs: each token of a prefix sees those behind it")
        if request.adapter is not None:
            self._adapters(request.adapter).version(request.adapter)
        if info.memory is not None:
            prompt, memory = len(request.prompt), info.memory
            length = options.max_sequence(prompt, info.max_length)
            if memory.blocks_of(length, options.num_beams, prompt) > memory.blocks:
                raise ConfigError(
                    f"{request.name}: got {options.num_beams} beams of up to {length} tokens, but"
                    f" there is memory for {memory.blocks * memory.block} in all",
                    "fewer beams, or fewer new tokens",
                )

    def _adapters(self, name: str) -> AdapterSlots:
        if self._adapter_slots is None:
            raise ConfigError(f"adapter {name}: this backend has the base model only")
        return self._adapter_slots

    def _copy_prefixes(self) -> None:
        """Copy prompt prefixes that are ready now."""
        copied, sources = [], []
        for group in self._running:
            if group.source is None:
                continue
            ready = min(group.cached, self._slots.cached(group.source))
            if ready < group.cached and not self._slots.complete(group.source):
                continue
            group.cached = group.prefilled = self._slots.usable(group.source, ready)
            if group.cached:
                copied.append(group)
                sources.append(group.source)
            group.source = None
        self._copy(sources, [group.slots[0] for group in copied])
        for group in copied:
            self._begin(group)

    def _restart(self) -> None:
        """Prefill texts again that have outgrown the keys in their slots."""
        for group in self._running:
            if group.outgrows(self._info.short_length):
                group.restart()
                self._begin(group)

    def _admit(self) -> None:
        """Admit queued groups while there are free slots."""
        if not self._waiting:
            return
        free = self._free_slots()
        blocked = False
        for group in list(self._waiting) if free else ():
            if group.strategy.width > len(free):
                break
            if group.preempted:
                group.resume()
            self._do_slot_work()  # so that the pool knows what those before have
            try:
                place = self._placement(group, free)
                if self._memory is not None and not self._memory.fits(group, place, self._running):
                    break
                # While a group waits for an adapter slot, only base-model groups may overtake it:
                # others could starve it by keeping their adapters pinned.
                if blocked and group.request.adapter is not None:
                    continue
                slot = group.adapter_slot if group.preempted else self._pin(group.request.adapter)
            except RunnerError as error:
                self._dequeue(group)
                self._unreported += [replace(one, error=error) for one in group.finish("error")]
                continue
            if slot is None:
                blocked = True
                continue
            group.adapter_slot = slot
            group.admitted = group.admitted or time.perf_counter()
            group.preempted = False
            self._waiting.remove(group)
            insort(self._running, group, key=lambda one: one.order)
            self._place(group, place, free)
            free = [one for one in free if one not in group.slots]

    def _free_slots(self) -> list[int]:
        taken = {slot for group in self._running for slot in group.slots_in_use()}
        return [slot for slot in range(self._info.slots) if slot not in taken]

    def _make_room(self) -> None:
        """Free memory until the running groups fit: unused cache first, then the youngest
        group's."""
        if (memory := self._memory) is None:
            return
        idle = deque(self._slots.by_last_use(self._free_slots()))
        self._do_slot_work()
        while memory.lacks(self._running):
            if idle:
                self._release(idle.popleft(), 0)
            else:
                self._preempt(self._running[-1])
            self._do_slot_work()

    def _preempt(self, group: SequenceGroup) -> None:
        """Preempt a group: take its slots until it is admitted again and recomputed."""
        self._running.remove(group)
        for slot in group.slots_in_use():
            self._release(slot, 0)
        group.preempt()
        insort(self._waiting, group, key=lambda one: one.order)
        self.timing.preemptions += 1

    def _release(self, slot: int, length: int) -> None:
        """Keep only the first `length` tokens of a slot."""
        self._slots.truncate(slot, length)
        if self._info.memory is not None:
            assert isinstance(self._backend, Paged)
            self._slot_work.append(partial(self._backend.release, slot, length))

    def _do_slot_work(self) -> None:
        """Change the backend's slots; what raises is tried again later."""
        while self._slot_work:
            self._slot_work[0]()
            del self._slot_work[0]

    def _pin(self, adapter: str | None) -> int | None:
        return BASE if adapter is None else self._adapters(adapter).pin(adapter)

    def _cacheable(self, group: SequenceGroup) -> NDArray[np.int32]:
        """The first tokens of a group's text that may come from the cache, and one more."""
        prompt = group.texts[0][1]
        if group.scored is not None:
            prompt = prompt[: group.request.scored_from]
        if group.request.pooling == "mean":  # of all tokens, none of them from the cache
            prompt = prompt[:1]
        return prompt

    def _placement(self, group: SequenceGroup, free: Sequence[int]) -> Placement:
        """A slot for a group's text, and its cached prefix."""
        # Waiting for the prefill of a later group would invert the order.
        ahead = {
            slot
            for one in self._running
            if one.order < group.order and not group.begun
            for slot in one.filling[:1]
        }
        return self._slots.place(self._cacheable(group), self._version(group), free, ahead)

    def _place(self, group: SequenceGroup, place: Placement, free: Sequence[int]) -> None:
        """Give slots to a group, and what is cached of its text."""
        others = [slot for slot in self._slots.by_last_use(free) if slot != place.slot]
        others = others[: group.strategy.width - 1]
        group.slots = [*others]
        group.slots.insert(group.texts[0][0], place.slot)
        if stored := self._stored_prefix(group, self._cacheable(group)[:-1], place):
            assert self._stored is not None
            group.prefilled = stored.end
            if not group.begun:
                group.cached = stored.end
            self._begin(group)
            self._slot_work.append(partial(self._stored.restore, stored))
            self._slots.restored(place.slot, stored.end)
        else:
            group.prefilled = place.cached
            if not group.begun:
                group.cached = place.cached
            if place.source != place.slot and self._slots.cached(place.source) < place.cached:
                group.source, group.prefilled = place.source, 0
            elif place.source != place.slot:
                self._copy([place.source], [place.slot])
            self._begin(group)
        for slot in others:  # one of which may be the source
            self._release(slot, 0)

    def _stored_prefix(
        self, group: SequenceGroup, text: NDArray[np.int32], place: Placement
    ) -> StoredPrefix | None:
        """The stored prefix of a prompt, if it is longer by enough than the cached one."""
        if self._stored is None:
            return None
        start = place.cached if place.source == place.slot else 0
        return self._stored.find(place.slot, text, group.request.adapter, start, place.cached)

    def _begin(self, group: SequenceGroup) -> None:
        for place, (slot, (_, text)) in enumerate(zip(group.filling, group.texts, strict=True)):
            if group.scored is not None and not self._info.exact:
                text = text[:0]  # chunked differently, so not reusable as a prefix
            self._release(slot, 0 if place else group.prefilled)
            self._slots.begin(slot, text, self._version(group))

    def _version(self, group: SequenceGroup) -> int:
        """Version of the keys of a group's texts, by its adapter and their length: cached prefixes
        are only shared within a version."""
        name, short = group.request.adapter, self._info.short_length
        adapter = 0 if name is None else self._adapters(name).version(name)
        return 2 * adapter + (short is not None and len(group.texts[0][1]) > short)

    def _compose(self) -> SchedulerOutput:
        """The decode rows, and prefill chunks up to the budget."""
        step = SchedulerOutput()
        decoding = [group for group in self._running if group.decoding]
        most, drafts = None, self._drafts
        # No drafts beside prefills or while requests wait for a slot: each token of the budget
        # counts.
        if drafts is not None and len(decoding) == len(self._running) and not self._waiting:
            sequences = sum(len(group.strategy.running()) for group in decoding)
            most = partial(self._most_drafted, drafts, sequences)
            drafts.draft(most, decoding)
        for group in decoding:
            rows = group.newest(most)
            step.rows += rows
            step.decoding.append((group, rows))
        room, scored = self._budget - len(step.rows), self._info.most_logits
        if step.rows and self._pace is not None:
            room = min(room, self._pace.most(scored=False))
            scored = min(scored, self._pace.most(scored=True))
        for group in self._running:
            if group.decoding or group.source is not None:
                continue
            tokens = self._chunk_size(group, room, scored)
            if not tokens:
                break
            row = group.chunk(tokens)
            step.rows.append(row)
            step.prompts.append(group)
            room -= tokens
            if group.scored is not None:
                scored -= row.logits
                step.scored = True
        return step

    def _most_drafted(self, drafts: Drafts, sequences: int, rate: float) -> int:
        """Tokens to draft for one of so many sequences, whose drafts are accepted at this rate."""
        room = min(self._budget, self._info.most_logits) // sequences - 1
        return max(0, min(room, drafts.most(sequences, rate)))

    def _chunk_size(self, group: SequenceGroup, room: int, scored: int) -> int:
        """Size of a group's next prefill chunk within the remaining budget."""
        unit, most = self._info.chunk, room
        if group.scored is not None:
            unit, most = min(unit, self._info.most_logits), min(room, group.unscored + scored)
        if group.remaining <= most:
            return group.remaining
        end = group.prefilled + most
        return max(0, end - end % unit - group.prefilled)

    def _advance(
        self, step: SchedulerOutput, logits: NDArray[np.float32], hidden: NDArray[np.float32] | None
    ) -> None:
        """Choose the next tokens from the logits of a step."""
        sources: list[int] = []
        targets: list[int] = []
        restarted: list[SequenceGroup] = []
        at = pooled = 0

        def chosen(
            group: SequenceGroup, events: Sequence[Event], moves: Sequence[tuple[int, int]]
        ) -> None:
            self._unreported += group.completed(events)
            sources.extend(group.slots[index] for index, _ in moves)
            targets.extend(group.slots[index] for _, index in moves)

        for group, rows in step.decoding:
            end = at + sum(row.logits for row in rows)
            texts = [tokens for _, tokens in group.strategy.tokens()]
            lengths = [len(tokens) for tokens in texts]
            drafts = [row.tokens[1:].tolist() if row.logits > 1 else () for row in rows]
            events, moves = group.strategy.advance(logits[at:end], drafts)
            step.sampled += sum(isinstance(event, Token) for event in events) or len(rows)
            for row, tokens, length in zip(rows, texts, lengths, strict=True):
                if row.logits > 1:  # of the drafted tokens those that were chosen
                    row = replace(row, tokens=row.tokens[: max(1, len(tokens) - length)])
                self._slots.wrote(row, of_prompt=False)
            chosen(group, events, moves)
            at = end
        for row in step.of_prompts:
            self._slots.wrote(row, of_prompt=self._info.exact or row.logits < 2)
        for group, row in zip(step.prompts, step.of_prompts, strict=True):
            if row.hidden:
                assert hidden is not None
                found, pooled = hidden[pooled : pooled + row.logits], pooled + row.logits
            else:
                found, at = logits[at : at + row.logits], at + row.logits
            events, moves = group.fill(len(row.tokens), found)
            chosen(group, events, moves)
            if moves and not group.decoding:  # its next text begins as this one
                restarted.append(group)
            if self._stored is not None and not row.hidden:
                text = self._slots.tokens(row.slot, row.position + len(row.tokens))
                self._stored.save(row.slot, text, group.request.adapter, group.id)
        self._copy(sources, targets)
        for group in restarted:
            self._begin(group)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if targets:
            self._slot_work.append(partial(self._backend.copy, sources, targets))
            self._slots.copied(sources, targets)

    def _retire(self) -> None:
        """Remove finished groups."""
        over = [group for group in self._running if not group.strategy.running()]
        for group in over:
            self._running.remove(group)
            for slot in group.filling:  # other slots may be another group's by now
                self._slots.abandon(slot)
            self._unpin(group)

    def _dequeue(self, group: SequenceGroup) -> None:
        """Remove a group that is over before it has slots."""
        self._waiting.remove(group)
        if group.preempted:  # its adapter has stayed
            self._unpin(group)

    def _unpin(self, group: SequenceGroup) -> None:
        if (adapter := group.request.adapter) is not None:
            self._adapters(adapter).unpin(adapter)

    def _count(self, step: SchedulerOutput, seconds: float) -> None:
        """Account for a step's seconds, without compiling; every token has an equal share."""
        groups = [group for group, rows in step.decoding for _ in rows] + step.prompts
        prompts = sum(len(row.tokens) for row in step.of_prompts)
        tokens = sum(len(row.tokens) for row in step.rows)
        if self._pace is not None:
            self._pace.took(prompts, seconds, scored=step.scored)
        self.timing.prefill_tokens += prompts
        self.timing.decode_tokens += step.sampled
        if self._drafts is not None and not step.prompts:  # drafts are of steps without prompts
            drafted = sum(row.logits - 1 for row in step.rows)
            self.timing.drafted_tokens += drafted
            accepted = max(0, step.sampled - len(step.rows))
            self.timing.accepted_tokens += accepted
            self._drafts.took(len(step.rows), drafted, accepted, seconds)
        self.timing.prefill_s += seconds * prompts / tokens
        self.timing.decode_s += seconds * (tokens - prompts) / tokens
        for group, row in zip(groups, step.rows, strict=True):
            part, name = seconds * len(row.tokens) / tokens, group.request.adapter
            self.adapter_s[name] = self.adapter_s.get(name, 0.0) + part


def _is_of(event: Event, id: int, index: int | None) -> bool:
    """True if an event belongs to a request and its sequence `index` (None: any)."""
    own = event.index if isinstance(event, Token) else event.completion.return_index
    return event.id == id and index in (None, own)
