"""The backend of a model object: loaded at the first call, kept and grown for the next ones."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from lite_runner.api.adapters import LoadedAdapters
from lite_runner.api.gather import gather_completions
from lite_runner.api.hooks import Hooks, TokenHooks
from lite_runner.api.ranks import own_ranks
from lite_runner.backends.base import Backend
from lite_runner.config.options import GenerateOptions
from lite_runner.generation import Completion, Scheduler, generate
from lite_runner.plan.backend import grow_backend, resolve_backend
from lite_runner.plan.job import Job, share
from lite_runner.plan.loading import load
from lite_runner.system import environment

if TYPE_CHECKING:
    from lite_runner.model.files import ModelFiles
    from lite_runner.text.tokenizer import Tokenizer


class Engine:
    """A backend, and the scheduler that knows which prefixes its slots hold."""

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._scheduler: Scheduler | None = None
        self._adapters = LoadedAdapters()

    def generate(
        self,
        config: GenerateOptions,
        files: ModelFiles,
        job: Job,
        tokenizer: Tokenizer | None,
        hooks: Hooks,
        *,
        min_slots: int,
    ) -> list[Completion]:
        """The completions of a job's prompts, those of all replicas on every rank.

        Raises KeyboardInterrupt after Ctrl-C, and RunnerError.
        """
        ranks = own_ranks(config)
        job = share(config, job, ranks)
        if not job.tokens:  # fewer prompts than replicas
            return gather_completions([], ranks)
        backend = self.backend_for(config, files, job, tokenizer, min_slots=min_slots)
        if self._scheduler is None:
            self._scheduler = Scheduler(backend, prefix_cache=config.prefix_cache == "auto")
        with closing(TokenHooks(job, tokenizer, hooks.streamer)) as told:
            outcome = generate(
                self._scheduler,
                job.scheduler_requests(keep_logits=hooks.on_logits is not None),
                first_index=job.first_index,
                on_token=told.on_token,
                on_finish=told.on_finish,
                on_logits=hooks.on_logits,
            )
        if outcome.interrupted:
            raise KeyboardInterrupt
        return gather_completions(outcome.completions, ranks)

    def backend_for(
        self,
        config: GenerateOptions,
        files: ModelFiles,
        job: Job,
        tokenizer: Tokenizer | None = None,
        *,
        min_slots: int,
    ) -> Backend:
        """The backend: grown where it lacks slots or length, loaded again where it lacks adapter
        slots. `min_slots`: to allocate, whatever the job needs."""
        device = environment.resolve_device(config.context.device_target)
        ranks, backend = own_ranks(config), self._backend
        room = replace(job, slots=max(job.slots, min_slots))
        if backend is not None:
            info = backend.info
            room = replace(
                room,
                slots=max(room.slots, info.slots),
                length=max(job.length, info.max_length),
            )
            slots = backend.adapters
            if self._adapters.serve(slots, job.adapters, config, files.model, ranks):
                if info.slots >= job.slots and info.max_length >= job.length:
                    return backend
                if self._grow(backend, config, files, device, room):
                    return backend
            self.close()
        config = resolve_backend(config, files, room, device, ranks)
        backend = load(config, files, device, room, tokenizer, ranks)
        backend.prepare()
        self._backend = backend
        self._adapters.reset(job.adapters)
        return backend

    def forget_prefixes(self) -> None:
        """The slots are about to be overwritten by others than the scheduler."""
        self._scheduler = None

    def close(self) -> None:
        """Free the weights and the KV cache."""
        self._scheduler = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def _grow(
        self,
        backend: Backend,
        config: GenerateOptions,
        files: ModelFiles,
        device: str,
        room: Job,
    ) -> bool:
        self._scheduler = None
        try:
            if not grow_backend(backend, config, files, device, room):
                return False
            backend.prepare()
        except BaseException:
            self.close()  # half of it may be there
            raise
        return True
