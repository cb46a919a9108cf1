"""What stands behind a model object: its files, tokenizer, adapters and backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lite_runner.api.adapters import AdapterIds, OpenAdapters, names_of
from lite_runner.api.config import PretrainedConfig
from lite_runner.api.engine import Engine
from lite_runner.api.hooks import Hooks
from lite_runner.api.options import checked_options, without_call_options
from lite_runner.api.ranks import manual_parallel, own_ranks, with_seed
from lite_runner.config.options import GenerateOptions
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.generation import Completion
from lite_runner.model.locate import locate
from lite_runner.model.tokenizer import tokenizer_of
from lite_runner.plan.job import Job, fit

if TYPE_CHECKING:
    from lite_runner.api.parameters import Parameters
    from lite_runner.backends.base import Backend
    from lite_runner.model.files import ModelFiles
    from lite_runner.text.tokenizer import Tokenizer


class LoadedModel:
    """The model of a config, for one call at a time; opened anew where a setting has changed."""

    def __init__(self, config: PretrainedConfig, files: ModelFiles | None) -> None:
        """Finds the `files`, where they are not given. Raises ConfigError, ArtifactError."""
        self.config = config
        self.parameters: Parameters | None = None  # the weights, where a script asked for them
        self._lock = threading.Lock()
        self._engine = Engine()
        self._adapters = OpenAdapters()
        self._settings = without_call_options(config.run_config())
        self.files = files or locate(self._settings)
        self._missing: tuple[GenerateOptions, ArtifactError] | None = None  # why no tokenizer
        self._written: tuple[int, ...] = ()  # of the parameters that the backend was loaded from

    @contextmanager
    def opened(self) -> Iterator[None]:
        """For this thread alone, with the files as the settings are now."""
        with self._lock, manual_parallel():
            settings = without_call_options(self.config.run_config())
            if settings != self._settings:
                self._engine.close()
                self.files, self._settings = locate(settings), settings
            yield

    def complete(
        self,
        prompts: Sequence[list[int]],
        options: Mapping[str, Any],
        hooks: Hooks,
        tokenizer: Tokenizer | None,
        adapter_id: AdapterIds,
    ) -> list[Completion]:
        """See PreTrainedModel.complete."""
        config = self.config.run_config(checked_options(options, self.config, prompts))
        if adapter_id is None and not config.merges_adapter:
            adapter_id = config.adapter_id
        names = names_of(adapter_id, len(prompts))
        if not prompts:
            return []
        with self.opened():
            config = with_seed(config)
            if tokenizer is None:
                exports = config.backend != "ms" and self.files.exported is None
                needed = exports or bool(config.generation(self.files.model).stop)
                with suppress(ArtifactError):  # who needs one says so
                    tokenizer = self.tokenizer(fetching=needed)
            adapters = self._adapters.job(config, self.files, names)
            job = replace(fit(config, self.files, tokenizer, prompts), adapters=adapters)
            if job.generation.stop and tokenizer is None:
                raise ConfigError("stop texts need a tokenizer, and the checkpoint has none")
            hooks.check(job.generation, own_ranks(config))
            return self._engine.generate(
                config,
                self._weights(),
                job,
                tokenizer,
                hooks,
                min_slots=self.config.batch_size,
            )

    def backend(self, length: int) -> Backend:
        """The backend with a slot of `length` tokens to write to; within `opened`."""
        config = self.config.run_config()
        job = Job((), (), config.generation(self.files.model), slots=1, length=length)
        job = replace(job, adapters=self._adapters.job(config, self.files, []))
        self._engine.forget_prefixes()
        return self._engine.backend_for(
            config, self._weights(), job, min_slots=self.config.batch_size
        )

    def tokenizer(self, *, fetching: bool) -> Tokenizer:
        """The checkpoint's, as of `tokenizer_of`; one that could not be fetched is not
        tried again before a setting changes. Raises ArtifactError."""
        settings = without_call_options(self.config.run_config())
        before = self._missing[1] if self._missing and self._missing[0] == settings else None
        try:
            again = fetching and before is None
            return tokenizer_of(settings, self.files, fetching=again)
        except ArtifactError as error:
            if fetching and before is not None:
                raise ArtifactError(before.message, before.hint) from error
            if fetching:
                self._missing = settings, error
            raise

    def close(self) -> None:
        """Free the weights and the KV cache, and unmap the checkpoint."""
        with self._lock:
            self._engine.close()
            self.files = replace(self.files, gguf=None)

    def _weights(self) -> ModelFiles:
        """The checkpoint, or the parameters where a script has written to them."""
        written = self.parameters.written() if self.parameters is not None else ()
        if written != self._written:
            self._engine.close()
            self._written = written
        if self.parameters is None or not written:
            return self.files
        return replace(self.files, held=self.parameters.tensors())
