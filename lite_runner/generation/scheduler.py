"""The scheduler: which rows a backend computes in each step, for any number of requests.

Requests are added and ended at any time. A step takes the newest token of every sequence that goes
on, and fills up with pieces of prompts, so that a long prompt never keeps the others waiting. What
is chosen depends on nothing but the order of `add`, `finish` and `step`: ranks that are told the
same compute the same rows.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import BASE, AdapterSlots, Backend, Row
from lite_runner.config.generation import FinishReason
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.generation.beam import Beams
from lite_runner.generation.job import Job, Search
from lite_runner.generation.lengths import check_lengths, longest_sequence
from lite_runner.generation.logprobs import Places
from lite_runner.generation.request import Event, Finished, Request, Token
from lite_runner.generation.result import GenerationTiming
from lite_runner.generation.samples import Samples
from lite_runner.generation.slots import Slots
from lite_runner.system.signals import deferred


@dataclass
class _Step:
    """The rows of a step, and whose they are."""

    rows: list[Row] = field(default_factory=list)
    decoding: list[tuple[Job, int]] = field(default_factory=list)  # each with its rows
    prompts: list[Job] = field(default_factory=list)  # a row for each, behind the others

    @property
    def of_prompts(self) -> list[Row]:
        """The rows of the prompts."""
        return self.rows[len(self.rows) - len(self.prompts) :]


class Scheduler:
    """Generation for many requests over one backend. For one thread."""

    def __init__(
        self, backend: Backend, token_budget: int | None = None, *, prefix_cache: bool = True
    ) -> None:
        """`token_budget`: tokens of a step at most, None: what the backend likes best;
        `prefix_cache`: a prompt goes on from a slot that holds its beginning.

        Raises ConfigError for a budget without room for a piece of a prompt beside all other slots.
        """
        self.timing = GenerationTiming()
        self.adapter_s: dict[str | None, float] = {}  # seconds of the steps, by adapter
        self._backend, self._info = backend, backend.info
        self._budget = self._info.budget if token_budget is None else token_budget
        least = self._info.slots - 1 + self._info.chunk
        if self._budget < least:
            raise ConfigError(
                f"token_budget: got {self._budget}, expected at least {least}: a token of each of"
                f" {self._info.slots - 1} other slots, and {self._info.chunk} of a prompt"
            )
        self._slots = Slots(self._info, prefix_cache=prefix_cache)
        self._waiting: list[Job] = []  # both in the order in which they are served
        self._running: list[Job] = []
        self._due: list[tuple[list[int], list[int]]] = []  # copies that the backend is to make
        self._untold: list[Event] = []
        self._next_id = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._running)

    @property
    def waiting(self) -> int:
        """Prompts for which there is no slot yet."""
        return len(self._waiting)

    def add(self, request: Request) -> int:
        """Put a request in line; gives its number, larger than all before.

        Raises ConfigError where it does not fit the backend, or its adapter is not known.
        """
        self._check(request)
        id, self._next_id = self._next_id, self._next_id + 1
        top = request.options.prompt_logprobs
        for part, search in enumerate(self._searches(id, request)):
            places = None if top is None else Places(top)
            job = Job(id, (request.priority, id, part), request, search, places)
            insort(self._waiting, job, key=lambda one: one.order)
        return id

    def finish(
        self, id: int, reason: FinishReason = "interrupted", index: int | None = None
    ) -> list[Finished]:
        """End a request now, or only its sequence with the number `index`; what was still going on
        is given as it is, what `step` gave already is not. Its slots are free at the next step."""
        untold = [event for event in self._untold if _is_of(event, id, index)]
        self._untold = [event for event in self._untold if event not in untold]
        ended = [event for event in untold if isinstance(event, Finished)]
        for job in [one for one in (*self._running, *self._waiting) if one.id == id]:
            ended += job.finish(reason, index)
        self._waiting = [job for job in self._waiting if job.search.lanes()]
        self._retire()
        return ended

    def step(self) -> list[Event]:
        """Compute a step, and tell what came of it. After an exception of the backend, or Ctrl-C,
        the next step is the same again: nothing is lost, nor told twice."""
        began, compiled = time.perf_counter(), self._backend.compile_s
        with deferred():
            self._share()
            self._admit()
            while self._due:
                self._backend.copy(*self._due[0])
                del self._due[0]
        step = self._compose()
        if step.rows:
            logits = self._backend.forward(step.rows)
            with deferred():
                self._advance(step, logits)
                self._retire()
                compiling = self._backend.compile_s - compiled
                self._count(step, time.perf_counter() - began - compiling)
        events, self._untold = self._untold, []
        return events

    def _check(self, request: Request) -> None:
        options, info = request.options, self._info
        check_lengths([len(request.prompt)], [options], info.max_length, [request.name])
        for token in (int(request.prompt.min()), int(request.prompt.max())):
            if not 0 <= token < info.vocab_size:
                raise ConfigError(
                    f"{request.name}: got token {token}, expected 0 to {info.vocab_size - 1}"
                )
        if options.num_beams > info.slots:
            raise ConfigError(f"num_beams={options.num_beams}, but there are {info.slots} slots")
        several = max(options.num_beams, min(options.num_return_sequences, info.slots)) > 1
        if several and not info.can_copy:
            raise ConfigError(
                "beams and num_return_sequences copy the cache from row to row, which"
                f" {info.engine} cannot"
            )
        if options.num_beams > 1 and options.logprobs is not None:
            raise ConfigError("logprobs are not available with num_beams above 1")
        if options.prompt_logprobs is not None and not info.most_logits:
            raise ConfigError(
                f"prompt_logprobs: {info.engine} gives logits after a prompt's last token alone"
            )
        if request.adapter is not None:
            self._adapters(request.adapter).version(request.adapter)

    def _adapters(self, name: str) -> AdapterSlots:
        if self._backend.adapters is None:
            raise ConfigError(f"adapter {name}: this backend has the base model alone")
        return self._backend.adapters

    def _searches(self, id: int, request: Request) -> list[Search]:
        options, slots = request.options, self._info.slots
        length = len(request.prompt)
        limit = longest_sequence(length, options, self._info.max_length) - length
        if options.num_beams > 1:
            return [Beams(id, request, limit)]
        # More sequences than slots: the prompt is computed once for every full set of them.
        returns = range(options.num_return_sequences)
        parts = [returns[start : start + slots] for start in range(0, len(returns), slots)]
        return [Samples(id, request, part, limit) for part in parts]

    def _share(self) -> None:
        """Copy beginnings of prompts that were waited for, now that they are there."""
        copied, sources = [], []
        for job in self._running:
            if job.source is None:
                continue
            ready = min(job.cached, self._slots.held(job.source))
            if ready < job.cached and not self._slots.complete(job.source):
                continue
            job.cached = job.filled = ready - ready % self._info.chunk
            if job.cached:
                copied.append(job)
                sources.append(job.source)
            job.source = None
        self._copy(sources, [job.slots[0] for job in copied])
        for job in copied:
            self._begin(job)

    def _admit(self) -> None:
        """Give slots to those who are first in line, as far as there are free ones."""
        if not self._waiting:
            return
        copies: dict[int, int] = {}  # target -> source, as the slots are before any of them
        taken = {slot for job in self._running for slot in job.slots_in_use()}
        free = [slot for slot in range(self._info.slots) if slot not in taken]
        held_up = False
        for job in list(self._waiting) if free else ():
            if job.search.width > len(free):
                break
            # While one waits for an adapter's slot, only the base model, which needs none, may
            # overtake it: others could keep the adapters for ever that are in its way.
            if held_up and job.request.adapter is not None:
                continue
            try:
                slot = self._pin(job.request.adapter)
            except RunnerError as error:
                self._waiting.remove(job)
                self._untold += [replace(one, error=error) for one in job.finish("error")]
                continue
            if slot is None:
                held_up = True
                continue
            job.adapter_slot = slot
            self._waiting.remove(job)
            insort(self._running, job, key=lambda one: one.order)
            self._place(job, free, copies)
            free = [one for one in free if one not in job.slots]
        if copies:
            self._due.append((list(copies.values()), list(copies)))

    def _pin(self, adapter: str | None) -> int | None:
        return BASE if adapter is None else self._adapters(adapter).pin(adapter)

    def _place(self, job: Job, free: Sequence[int], copies: dict[int, int]) -> None:
        """Choose the slots of a job, and where the beginning of its prompt comes from."""
        prompt = job.request.prompt if job.prompt_logprobs is None else job.request.prompt[:0]
        # Who waited for one behind would be overtaken by those between.
        ahead = {one.slots[0] for one in self._running if not one.begun and one.order < job.order}
        place = self._slots.place(prompt, self._version(job), free, ahead)
        others = [slot for slot in self._slots.oldest(free) if slot != place.slot]
        job.slots = [place.slot, *others[: job.search.width - 1]]
        job.cached = job.filled = place.cached
        if place.source != place.slot and self._slots.held(place.source) < place.cached:
            job.source, job.filled = place.source, 0
        elif place.source != place.slot:
            copies[place.slot] = copies.get(place.source, place.source)
            self._slots.copied([place.source], [place.slot])
        self._begin(job)

    def _begin(self, job: Job) -> None:
        prompt = job.request.prompt
        if job.prompt_logprobs is not None and not self._info.exact:
            prompt = prompt[:0]  # its pieces are others, which nobody goes on from
        self._slots.cut(job.slots[0], job.filled)
        self._slots.begin(job.slots[0], prompt, self._version(job))

    def _version(self, job: Job) -> int:
        """Of what computes a job: texts of another go on from none of its."""
        name = job.request.adapter
        return 0 if name is None else self._adapters(name).version(name)

    def _compose(self) -> _Step:
        """The newest token of every sequence, and pieces of prompts up to the budget."""
        step = _Step()
        for job in self._running:
            if job.begun:
                rows = job.newest()
                step.rows += rows
                step.decoding.append((job, len(rows)))
        room, scored = self._budget - len(step.rows), self._info.most_logits
        for job in self._running:
            if job.begun or job.source is not None:
                continue
            tokens = self._piece(job, room, scored)
            if not tokens:
                break
            row = job.chunk(tokens)
            step.rows.append(row)
            step.prompts.append(job)
            room -= tokens
            if job.prompt_logprobs is not None:
                scored -= tokens
        return step

    def _piece(self, job: Job, room: int, scored: int) -> int:
        """Tokens of a job's prompt that the step still has room for."""
        unit, most = self._info.chunk, room
        if job.prompt_logprobs is not None:
            unit, most = min(unit, self._info.most_logits), min(room, scored)
        if job.left <= most:
            return job.left
        end = job.filled + most
        return max(0, end - end % unit - job.filled)

    def _advance(self, step: _Step, logits: NDArray[np.float32]) -> None:
        """Choose the next tokens by the logits of a step."""
        sources: list[int] = []
        targets: list[int] = []
        prompts = step.of_prompts
        for row in step.rows[: len(step.rows) - len(prompts)]:
            self._slots.wrote(row, of_prompt=False)
        for row in prompts:
            self._slots.wrote(row, of_prompt=self._info.exact or row.logits < 2)
        at = 0
        for job, count in step.decoding:
            found, moves = job.search.advance(logits[at : at + count])
            self._untold += job.told(found)
            sources += [job.slots[lane] for lane, _ in moves]
            targets += [job.slots[lane] for _, lane in moves]
            at += count
        for job, row in zip(step.prompts, prompts, strict=True):
            found = job.fill(len(row.tokens), logits[at : at + row.logits])
            at += row.logits
            self._untold += job.told(found)
            if job.begun:
                rest = [slot for slot in job.slots_in_use() if slot != job.slots[0]]
                sources += [job.slots[0]] * len(rest)
                targets += rest
        self._copy(sources, targets)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if targets:
            self._due.append((sources, targets))
            self._slots.copied(sources, targets)

    def _retire(self) -> None:
        """Let go of the jobs that are over."""
        over = [job for job in self._running if not job.search.lanes()]
        for job in over:
            self._running.remove(job)
            if not job.begun:  # else the slot may be another's by now
                self._slots.give_up(job.slots[0])
            if job.request.adapter is not None:
                self._adapters(job.request.adapter).unpin(job.request.adapter)

    def _count(self, step: _Step, seconds: float) -> None:
        """A step took so long, without compiling; each token had an equal part in it."""
        jobs = [job for job, count in step.decoding for _ in range(count)] + step.prompts
        prompts = sum(len(row.tokens) for row in step.of_prompts)
        tokens = sum(len(row.tokens) for row in step.rows)
        self.timing.prefill_tokens += prompts
        self.timing.decode_tokens += tokens - prompts
        self.timing.prefill_s += seconds * prompts / tokens
        self.timing.decode_s += seconds * (tokens - prompts) / tokens
        for job, row in zip(jobs, step.rows, strict=True):
            part, name = seconds * len(row.tokens) / tokens, job.request.adapter
            self.adapter_s[name] = self.adapter_s.get(name, 0.0) + part


def _is_of(event: Event, id: int, index: int | None) -> bool:
    """Whether an event is of a request, and of its sequence `index` (None: of any)."""
    own = event.index if isinstance(event, Token) else event.completion.return_index
    return event.id == id and index in (None, own)
