"""The files, tokenizer, adapters and backend behind a model object, and a call's hooks."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lite_runner.api.config import PretrainedConfig
from lite_runner.api.context import manual_parallel, own_ranks, with_seed
from lite_runner.api.options import checked_options, without_call_options
from lite_runner.api.streamers import SequentialStream, Streamer
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Backend, RunOptions
from lite_runner.config.checks import check_fits
from lite_runner.config.generation import GenerationConfig, structured_options
from lite_runner.config.prompt import adapter_name
from lite_runner.config.schema import GenerateOptions
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.generation import Completion, Engine, Logprobs, OnLogits
from lite_runner.model.adapters import (
    AdapterJob,
    adapter_job,
    adapter_root_of,
    adapters_of,
    check_adapters,
    merged_network,
    only_adapter,
    open_adapter_job,
)
from lite_runner.model.locate import locate, tokenizer_of
from lite_runner.plan import Job, fit, with_ends
from lite_runner.plan.resources import grow_backend, open_backend, resolve_backend, run_options
from lite_runner.records import dataclass
from lite_runner.system import environment
from lite_runner.text.spelling import StopChecker
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights import LazyTensor
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_reader import adapter_folders, shards_of

if TYPE_CHECKING:
    from mindspore import Parameter

    from lite_runner.backends.adapter_slots import AdapterSlots
    from lite_runner.model import ModelFiles

AdapterIds = str | Sequence[str | None] | None


class LoadedModel:
    """The model of a config, for one call at a time; reopened when a setting has changed."""

    def __init__(self, config: PretrainedConfig, files: ModelFiles | None) -> None:
        """Finds the `files`, where they are not given. Raises ConfigError, ArtifactError."""
        self.config = config
        self.parameters: Parameters | None = None  # the weights, where a script asked for them
        self._lock = threading.Lock()
        self._engine = GrowingEngine()
        self._adapters = OpenAdapters()
        self._settings = without_call_options(config.run_config())
        self.files = files or locate(self._settings.source)
        self._missing: tuple[GenerateOptions, ArtifactError] | None = None  # why no tokenizer
        self._written: tuple[int, ...] = ()  # of the parameters that the backend was loaded from

    @contextmanager
    def opened(self) -> Iterator[None]:
        """For this thread alone, with the files as the settings are now."""
        with self._lock, manual_parallel():
            settings = without_call_options(self.config.run_config())
            if settings != self._settings:
                self._engine.close()
                self.files, self._settings = locate(settings.source), settings
            yield

    def complete(
        self,
        prompts: Sequence[list[int]],
        options: Mapping[str, Any],
        hooks: Hooks,
        tokenizer: Tokenizer | None,
        adapter_id: AdapterIds,
    ) -> list[Completion]:
        config = self.config.run_config(checked_options(options, self.config, prompts))
        if adapter_id is None and not config.merges_adapter:
            adapter_id = (
                only_adapter(config.adapters) if config.adapter_id is None else config.adapter_id
            )
        names = names_of(adapter_id, len(prompts))
        if not prompts:
            return []
        with self.opened():
            config = with_seed(config)
            generation = config.generation(self.files.model)
            structured = structured_options(vars(config))
            if tokenizer is None:
                exports = config.in_lite and self.files.exported is None
                needed = exports or bool(generation.stop or structured)
                with suppress(ArtifactError):  # an error only for those that need one
                    tokenizer = self.tokenizer(fetching=needed)
            adapters = self._adapters.job(config, self.files, names)
            if config.model_config() is None:  # model=auto: its sizes are known only now
                check_fits(config, self.files.model)
            job = fit(
                with_ends(generation, config.eos_token_id, self.files.model, tokenizer),
                *(self.files, tokenizer, prompts),
                truncate=config.truncate,
                batch=config.predict_batch_size,
                structured=structured,
            )
            job = replace(job, adapters=adapters)
            if job.generation.stop and tokenizer is None:
                raise ConfigError("stop texts need a tokenizer, and the checkpoint has none")
            hooks.check(job.generation, own_ranks(config))
            return self._engine.generate(
                config, self._weights(), job, tokenizer, hooks, min_slots=self.config.batch_size
            )

    def backend(self, length: int) -> Backend:
        """The backend with a slot of `length` tokens to write to, and the logits of all of them;
        within `opened`. Raises ConfigError for an exported model."""
        config = self.config.run_config()
        job = Job(
            *((), (), config.generation(self.files.model)),
            slots=1,
            length=length,
            adapters=self._adapters.job(config, self.files, []),
            all_logits=True,
        )
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
            return tokenizer_of(settings.tokenizer, self.files, fetching=again)
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
        tensors = self.parameters.tensors()
        if self.files.adapter is not None:
            tensors = merged_network(self.files, tensors)
        return replace(self.files, held=tensors)


class GrowingEngine:
    """An engine, which knows the prefixes in its slots, over a backend that grows."""

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._engine: Engine | None = None
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
        job = job.share(ranks)
        if not job.tokens:  # fewer prompts than replicas
            return gather_completions([], ranks)
        backend = self.backend_for(config, files, job, tokenizer, min_slots=min_slots)
        if self._engine is None:
            self._engine = Engine(
                backend, prefix_cache=config.prefix_cache != "none", speculate=config.looks_up
            )
        with closing(TokenHooks(job, tokenizer, hooks.streamer)) as token_hooks:
            outcome = self._engine.generate(
                job.scheduler_requests(keep_logits=hooks.on_logits is not None),
                first_index=job.first_index,
                on_token=token_hooks.on_token,
                on_finish=token_hooks.on_finish,
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
        asked = run_options(config.settings, job, device, ranks)
        settings = resolve_backend(files, asked, tell=backend is None).settings
        room = replace(job, slots=max(job.slots, min_slots))
        if backend is not None:
            info = backend.info
            room = replace(
                room, slots=max(room.slots, info.slots), length=max(job.length, info.max_length)
            )
            slots = backend.adapters
            if self._adapters.serve(slots, job.adapters, files.model, ranks):
                if info.slots >= job.slots and info.max_length >= job.length:
                    return backend
                options = run_options(settings, room, device, ranks)
                if self._grow(backend, files, options):
                    return backend
            self.close()
        backend = open_backend(files, run_options(settings, room, device, ranks, tokenizer))
        backend.prepare()
        self._backend = backend
        self._adapters.reset(job.adapters)
        return backend

    def forget_prefixes(self) -> None:
        """The slots are about to be overwritten by others than the scheduler."""
        self._engine = None

    def close(self) -> None:
        """Free the weights and the KV cache."""
        self._engine = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def _grow(self, backend: Backend, files: ModelFiles, options: RunOptions) -> bool:
        self._engine = None
        try:
            if not grow_backend(backend, files, options):
                return False
            backend.prepare()
        except BaseException:
            self.close()  # half of it may be there
            raise
        return True


@dataclass(frozen=True)
class Hooks:
    """A streamer and a receiver of logits, as a caller gave them."""

    streamer: Streamer | None = None
    on_logits: OnLogits | None = None

    def check(self, generation: GenerationConfig, ranks: Ranks) -> None:
        """Raises ConfigError for options that a hook cannot follow."""
        several = max(generation.num_beams, generation.num_return_sequences) > 1
        if self.streamer is not None and several:
            raise ConfigError(
                "streamer: not available with num_beams or num_return_sequences above 1, whose"
                " tokens do not arrive in order",
                "leave the streamer out",
            )
        if self.on_logits is None:
            return
        for name, value in ("num_beams", generation.num_beams), ("data_parallel", ranks.data):
            if value > 1:
                raise ConfigError(
                    f"output_scores and output_logits: not available with {name} above 1"
                )


class TokenHooks:
    """Takes every token of a job, for its stop texts and a streamer."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None, streamer: Streamer | None) -> None:
        self._first, self._stop, self._tokenizer = job.first_index, job.generation.stop, tokenizer
        self._checkers: dict[tuple[int, int], StopChecker] = {}
        prompts = [list(ids) for ids in job.tokens]
        self._turn = SequentialStream(streamer, prompts) if streamer is not None else None

    def on_token(self, prompt: int, part: int, token: int) -> bool:
        """True where a stop text is complete."""
        if self._turn is not None:
            self._turn.on_token(prompt - self._first, token)
        if not self._stop or self._tokenizer is None:
            return False
        checker = self._checkers.setdefault(
            (prompt, part), StopChecker(self._tokenizer, self._stop)
        )
        checker.put(token)
        return checker.stopped

    def on_finish(self, completion: Completion) -> None:
        """No token of this sequence follows."""
        if self._turn is not None:
            self._turn.on_finish(completion.prompt_index - self._first)

    def close(self) -> None:
        """The call is over, be it by an error."""
        if self._turn is not None:
            self._turn.close()


def gather_completions(completions: Sequence[Completion], ranks: Ranks) -> list[Completion]:
    """The completions of all replicas, on every rank, in the order of the prompts."""
    if ranks.data == 1:
        return list(completions)
    from lite_runner.backends.collectives import gather

    payloads = gather(completions_to_bytes(completions))
    return [one for data in payloads[:: ranks.tensor] for one in completions_from_bytes(data)]


def completions_to_bytes(completions: Sequence[Completion]) -> bytes:
    """JSON, arrays as lists."""
    return json.dumps([asdict(one) for one in completions], default=np.ndarray.tolist).encode()


def completions_from_bytes(data: bytes) -> list[Completion]:
    """The inverse of `completions_to_bytes`."""
    return [_completion(raw) for raw in json.loads(data)]


def _completion(raw: dict[str, Any]) -> Completion:
    for name in ("logprobs", "prompt_logprobs"):
        if raw[name] is not None:
            raw[name] = Logprobs(
                np.array(raw[name]["chosen"], np.float64),
                np.array(raw[name]["top_ids"], np.int32),
                np.array(raw[name]["top"], np.float64),
            )
    return Completion(**raw)


class Parameters:
    """A Parameter for each tensor of the checkpoint, in float32, under MindFormers' names.

    A second copy of the weights: it is made only where a script asks for one.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        from mindspore import Parameter, Tensor

        self.by_name = {
            name: Parameter(Tensor(tensor.float32()), name=name) for name, tensor in tensors.items()
        }
        self._as_read = self._checksums()

    def written(self) -> tuple[int, ...]:
        """Checksums of the values, () where no script has written to them.

        Every byte is read, since a Parameter can be written to in many ways.
        """
        now = self._checksums()
        return () if now == self._as_read else now

    def _checksums(self) -> tuple[int, ...]:
        return tuple(
            zlib.crc32(np.ascontiguousarray(one.asnumpy()).data) for one in self.by_name.values()
        )

    def tensors(self) -> dict[str, LazyTensor]:
        """The values as they are now."""
        return {name: _lazy(one) for name, one in self.by_name.items()}


def _lazy(parameter: Parameter) -> LazyTensor:
    return LazyTensor(
        tuple(parameter.shape), "F32", lambda: np.ascontiguousarray(parameter.asnumpy())
    )


class OpenAdapters:
    """The adapters of adapter_path, all opened: a call with another one needs no other backend."""

    def __init__(self) -> None:
        self._of: tuple[str, str] | None = None  # the paths that `_opened` is of
        self._opened: dict[str, Adapter] = {}
        self._checked: set[str] = set()

    def job(
        self, config: GenerateOptions, files: ModelFiles, names: Sequence[str | None]
    ) -> AdapterJob | None:
        """The adapter of each prompt (None: the base) among all that the listing has; None where
        the config has no adapter_path.

        Of those that no prompt wants, one that does not open is left out. Raises ArtifactError for
        a wanted one that is not there or does not fit, ConfigError where there is no adapter_path.
        """
        wanted = list(dict.fromkeys(name for name in names if name is not None))
        if config.merges_adapter:
            if wanted:
                raise ConfigError(
                    f"adapter_id={wanted[0]}: pet_type=lora merges one adapter for all prompts",
                    "pet_type=slora takes an adapter_id for each prompt",
                )
            return None
        if not config.adapter_path:
            if wanted:
                raise ConfigError(
                    f"adapter_id={wanted[0]} needs adapter_path=lora_adapter.json",
                    "AutoModel.from_pretrained(..., adapter_path='lora_adapter.json')",
                )
            return None
        path = Path(config.adapter_path).expanduser()
        if shards_of(path, adapter_root_of(config.adapters)):
            return open_adapter_job(config.adapters, files.model, config.ranks, names)
        of = (config.adapter_path, config.adapter_root)
        if of != self._of or not self._opened.keys() >= set(wanted):
            self._open(config, files, wanted)
            self._of = of
        check_adapters([self._opened[n] for n in wanted if n not in self._checked], files)
        self._checked.update(wanted)
        return adapter_job(config.adapters, list(self._opened.values()), names)

    def _open(self, config: GenerateOptions, files: ModelFiles, wanted: Sequence[str]) -> None:
        found = adapters_of(config.adapters, files.model, wanted)
        path = Path(config.adapter_path).expanduser()
        listed = adapter_folders(path, adapter_root_of(config.adapters))
        for name in listed:
            if name not in found:
                try:
                    found |= adapters_of(config.adapters, files.model, [name])
                except ArtifactError:
                    continue  # raised where a call names it
        self._opened = {name: found[name] for name in listed if name in found}
        self._checked.clear()


class LoadedAdapters:
    """The adapters that a running backend knows."""

    def __init__(self) -> None:
        self._known: dict[str, Adapter] = {}

    def reset(self, job: AdapterJob | None) -> None:
        """The backend was loaded with those of a job."""
        self._known = {one.name: one for one in job.adapters} if job else {}

    def serve(
        self, slots: AdapterSlots | None, job: AdapterJob | None, model: Decoder, ranks: Ranks
    ) -> bool:
        """Add a job's new adapters to the backend's slots; False where one does not fit."""
        known = {(one.name, one.folder) for one in self._known.values()}
        new = [one for one in job.adapters if (one.name, one.folder) not in known] if job else []
        if job is None or not new:
            return True
        if slots is None:
            return False
        try:
            for piece in replace(job, adapters=new).of_rank(model, ranks):
                slots.add(piece)
        except ConfigError:
            return False
        self._known |= {one.name: one for one in new}
        return True


def names_of(ids: AdapterIds, prompts: int) -> list[str | None]:
    """The adapter of each prompt; None: the base model. Raises ConfigError for a wrong number."""
    if ids is None or isinstance(ids, str):
        return [adapter_name(ids)] * prompts
    if len(ids) != prompts:
        raise ConfigError(
            f"adapter_id: got {len(ids)} for {prompts} prompts, expected one for each, or one name"
            " for all"
        )
    return [adapter_name(one) for one in ids]
