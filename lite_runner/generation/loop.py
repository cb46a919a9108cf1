"""The token loop: a schedule of rows over cache slots.

A prompt waits until it gets the slots it needs, is prefilled once, shares its cache with its
other sequences by a copy, and from then on gives a row per sequence and step. A slot that
becomes free goes to the next prompt at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import Backend, Row
from lite_runner.config.generation import GenerationConfig, OwnOptions, of_each
from lite_runner.errors import ConfigError
from lite_runner.generation.beam import Beams
from lite_runner.generation.result import (
    Completion,
    Generation,
    GenerationTiming,
    OnFinish,
    OnLogits,
    OnToken,
)
from lite_runner.generation.samples import Samples


class Job(Protocol):
    """The search for one prompt's completions."""

    prompt: NDArray[np.int32]
    prompt_index: int
    adapter: int
    width: int  # slots it needs

    def begin(self, slots: Sequence[int], logits: NDArray[np.float32]) -> None: ...
    def rows(self) -> list[Row]: ...
    def advance(self, logits: NDArray[np.float32]) -> tuple[list[int], list[int]]: ...
    def slots_in_use(self) -> list[int]: ...
    def finished(self) -> list[int]: ...
    def completions(self) -> list[Completion]: ...


class Pool(Protocol):
    """Adapters, of which only some can be in use at a time."""

    places: int

    def keep(self, adapters: Collection[int]) -> None:
        """These are in use; none of them makes room for another."""
        ...


def longest_prompt(config: GenerationConfig, max_length: int) -> int:
    """Tokens a prompt may have so that all the new tokens asked for it fit `max_length`."""
    return _room(config, max_length) - _least_new(config)


def _room(config: GenerationConfig, max_length: int) -> int:
    """Tokens that prompt and new ones may have together."""
    return min(max_length, config.max_length or max_length)


def _least_new(config: GenerationConfig) -> int:
    """New tokens that there must be room for."""
    return config.max_new_tokens or 1 if config.max_length is None else 1


def check_lengths(
    lengths: Sequence[int],
    config: GenerationConfig,
    max_length: int,
    own: Sequence[OwnOptions] = (),
) -> None:
    """ConfigError naming every prompt that is empty or does not fit; call before loading.

    `lengths` are those of the prompts in tokens, `max_length` the tokens the model can hold, `own`
    what each prompt has of its own.
    """
    faults = []
    for index, (length, mine) in enumerate(
        zip(lengths, of_each(config, own, len(lengths)), strict=True)
    ):
        longest, new = longest_prompt(mine, max_length), _least_new(mine)
        room = min(max_length, longest + new)
        if length == 0:
            faults.append(f"prompt {index} is empty: it has no tokens")
        elif length > longest:
            faults.append(
                f"prompt {index} does not fit: {length} tokens and {new} new, "
                f"{length + new} together, but at most {room} fit"
            )
    if faults:
        error = ConfigError.of(faults)
        error.hint = "shorten it, ask for fewer new tokens, or cut it with truncate=left"
        if not any(length > longest for length in lengths):
            error.hint = "give it a text of at least one token, or leave it out"
        raise error


def generate(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    own: Sequence[OwnOptions] = (),
    adapters: Sequence[int] | None = None,
    pool: Pool | None = None,
    first_index: int = 0,
    on_token: OnToken | None = None,
    on_finish: OnFinish | None = None,
    on_logits: OnLogits | None = None,
) -> Generation:
    """Completions of `prompts` (token ids), ordered by prompt and return index.

    There may be more prompts than slots; pass them all in one call, since a prompt's index is
    part of its seed. Where they are a part of a longer list, `first_index` is the first one's
    place in it. `own` is what each prompt has of its own, empty: nothing; with a seed of its own
    its text is what it is alone. `adapters` is one for each prompt; none: the base model. A prompt
    whose adapter finds no room in the `pool` waits.
    `on_token(prompt, return, token)` sees every new token but eos, and ends the sequence by
    answering true (stop texts); beam search, where no token is sure until the end, never calls
    it. `on_finish(completion)` follows the last token of each. `on_logits` sees what
    each token is chosen by, that of eos too, and no beams either.
    KeyboardInterrupt ends the loop with what there is.
    Raises ConfigError where a prompt does not fit or the slots are too few, RunnerError where
    the logits are not finite.
    """
    check_lengths([len(prompt) for prompt in prompts], config, backend.max_length, own)
    if config.num_beams > backend.slots:
        raise ConfigError(f"num_beams={config.num_beams}, but there are {backend.slots} slots")
    jobs = list(_jobs(backend, prompts, config, own, adapters, first_index, on_token, on_logits))
    schedule = _Schedule(backend, jobs, pool, on_finish)
    interrupted = False
    try:
        schedule.run()
    except KeyboardInterrupt:
        interrupted = True
    completions = [completion for job in jobs for completion in job.completions()]
    return Generation(completions, schedule.timing, interrupted)


def _jobs(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    shared: GenerationConfig,
    own: Sequence[OwnOptions],
    adapters: Sequence[int] | None,
    first_index: int,
    on_token: OnToken | None,
    on_logits: OnLogits | None,
) -> Iterator[Job]:
    configs = of_each(shared, own, len(prompts))
    for place, (tokens, config) in enumerate(zip(prompts, configs, strict=True)):
        index = first_index + place
        prompt = np.asarray(tokens, dtype=np.int32)
        adapter = adapters[place] if adapters is not None else 0
        limit = _new_tokens(len(prompt), config, backend.max_length)
        if config.num_beams > 1:
            yield Beams(prompt, index, config, limit=limit, adapter=adapter)
            continue
        # More sequences than slots: the prompt is prefilled once for every full set of them.
        returns = range(config.num_return_sequences)
        for start in range(0, len(returns), backend.slots):
            yield Samples(
                prompt,
                index,
                returns[start : start + backend.slots],
                config,
                limit=limit,
                adapter=adapter,
                alone=bool(own) and own[place].seed is not None,
                on_token=on_token,
                on_logits=on_logits,
            )


def _new_tokens(prompt_length: int, config: GenerationConfig, max_length: int) -> int:
    """The most tokens that may follow a prompt of that length."""
    left = _room(config, max_length) - prompt_length
    return left if config.max_new_tokens is None else min(left, config.max_new_tokens)


class _Schedule:
    def __init__(
        self,
        backend: Backend,
        jobs: Sequence[Job],
        pool: Pool | None,
        on_finish: OnFinish | None,
    ) -> None:
        self.timing = GenerationTiming()
        self._backend = backend
        self._waiting = deque(jobs)
        self._running: list[Job] = []
        self._pool = pool
        self._on_finish = on_finish
        self._reported: set[tuple[int, int]] = set()
        self._start = time.perf_counter()

    def run(self) -> None:
        while self._waiting or self._running:
            self._prefill(list(self._admit()))
            self._decode()

    def _admit(self) -> Iterator[tuple[Job, list[int]]]:
        """The next prompts, in order, as far as there are free slots, and their slots."""
        taken = {slot for job in self._running for slot in job.slots_in_use()}
        free = [slot for slot in range(self._backend.slots) if slot not in taken]
        in_use = {job.adapter for job in self._running} - {0}
        while self._waiting and self._waiting[0].width <= len(free):
            together = in_use | {self._waiting[0].adapter} - {0}
            if self._pool is not None:
                if len(together) > self._pool.places:
                    break
                self._pool.keep(together)
            in_use = together
            job = self._waiting.popleft()
            slots, free = free[: job.width], free[job.width :]
            yield job, slots

    def _prefill(self, admitted: Sequence[tuple[Job, list[int]]]) -> None:
        if not admitted:
            return
        began = time.perf_counter()
        rows = [Row(slots[0], job.prompt, 0, job.adapter) for job, slots in admitted]
        logits = self._backend.forward(rows)
        targets = [(slots[0], slot) for _, slots in admitted for slot in slots[1:]]
        self._copy([source for source, _ in targets], [target for _, target in targets])
        self._running += [job for job, _ in admitted]
        for (job, slots), row in zip(admitted, logits, strict=True):
            job.begin(slots, row)
            self._report_first_token()
        self.timing.prefill_s += time.perf_counter() - began
        self.timing.prefill_tokens += sum(len(row.tokens) for row in rows)
        self._retire()

    def _decode(self) -> None:
        if not self._running:
            return
        began = time.perf_counter()
        rows = [job.rows() for job in self._running]
        logits = self._backend.forward([row for part in rows for row in part])
        start = 0
        sources: list[int] = []
        targets: list[int] = []
        for job, part in zip(self._running, rows, strict=True):
            moved = job.advance(logits[start : start + len(part)])
            sources += moved[0]
            targets += moved[1]
            start += len(part)
        self._copy(sources, targets)
        self.timing.decode_s += time.perf_counter() - began
        self.timing.decode_tokens += start
        self._retire()

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if targets:
            self._backend.copy(sources, targets)

    def _retire(self) -> None:
        """Tell of what is final, and drop the jobs that are done."""
        for job in self._running:
            keys = {(job.prompt_index, part) for part in job.finished()} - self._reported
            self._reported |= keys
            if keys and self._on_finish:
                for completion in job.completions():
                    if (completion.prompt_index, completion.return_index) in keys:
                        self._on_finish(completion)
        self._running = [job for job in self._running if job.slots_in_use()]

    def _report_first_token(self) -> None:
        if self.timing.time_to_first_token_s is None:
            self.timing.time_to_first_token_s = time.perf_counter() - self._start
