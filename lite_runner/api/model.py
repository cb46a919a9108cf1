"""Models: `generate` and all that it takes, as MindFormers has it; AutoModel makes them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lite_runner.api.adapters import AdapterIds, OpenAdapters, names_of, taken
from lite_runner.api.config import AutoConfig, PretrainedConfig, settings_of
from lite_runner.api.ids import rows_of
from lite_runner.api.options import OPTIONS, checked_options, merged_options
from lite_runner.api.outputs import Steps, sequences_of
from lite_runner.api.ranks import from_all, manual_parallel, own_ranks, with_seed
from lite_runner.api.streamers import InTurn, Streamer
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.backends.base import Backend
from lite_runner.config.options import GenerateOptions
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.generation import Completion, OnLogits, Scheduler, generate
from lite_runner.model import model_files
from lite_runner.model.model_files import ModelFiles
from lite_runner.plan.session import Job, fit, grown, load, share, with_backend
from lite_runner.system import environment
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.text.transcript import Transcript
from lite_runner.weights.lora.adapter import Adapter

if TYPE_CHECKING:
    from lite_runner.api.network import Network


@dataclass
class _Call:
    """One `complete`: what it computes, and who hears of it."""

    job: Job
    tokenizer: Tokenizer | None
    streamer: Streamer | None
    on_logits: OnLogits | None


class PreTrainedModel:
    """A model and its weights, which are read at the first `generate`.

    It grows with what is asked for: for more sequences at once, or longer ones, than it has room
    for, its cache is made anew and its graph compiled again, and the weights stay; those of an
    exported model are read again, and so is all where a setting of `config` or the adapters change.
    `config.batch_size` makes room from the start. Calls from several threads follow one another.
    """

    def __init__(self, config: PretrainedConfig, files: ModelFiles | None = None) -> None:
        """Checks the config and finds the `files`, where they are not given.

        Raises ConfigError, ArtifactError.
        """
        self.config = config.copy()
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._scheduler: Scheduler | None = None  # of the backend, which knows what its slots hold
        self._known: Sequence[Adapter] = ()  # the adapters that the backend knows
        self._adapters = OpenAdapters()
        self._missing: tuple[GenerateOptions, ArtifactError] | None = (
            None  # a tokenizer, and for what
        )
        self._settings = lasting(self.config.run_config())
        self._files = files or model_files.locate(self._settings)

    @property
    def tokenizer(self) -> PreTrainedTokenizer:
        """The one that belongs to the checkpoint. Raises ArtifactError where there is none."""
        core = self._own_tokenizer(fetching=True)
        return PreTrainedTokenizer(core, self._files.model.pad_token_id)

    @property
    def max_length(self) -> int:
        """Tokens that a sequence may have: the model's context, or the positions of its graphs."""
        given = self._files.given
        return self._files.model.seq_length if given is None else given.manifest.seq_length

    def generate(
        self,
        input_ids: Any,
        generation_config: Any = None,
        *,
        streamer: Streamer | None = None,
        adapter_id: AdapterIds = None,
        **options: Any,
    ) -> Any:
        """Prompt and new ids of each sequence, an eos token that ended it too: a list of lists.

        `input_ids`: a list of ids, or a list, array or tensor of such rows; the padding at the end
        of a row is left out. `options` are those of the config: max_length, max_new_tokens,
        do_sample, top_k, ...; None leaves one to `generation_config`, or to the model.
        `num_return_sequences` of one prompt stand beside each other. `adapter_id`: a name of
        adapter_path's, or one for each prompt; None is the base. With return_dict_in_generate=True
        it is {"sequences": that, "scores", "logits"}, the last two a list with an array
        [sequences, vocab] a step where output_scores or output_logits asks for it, else None; and
        where the options of that name ask for it "logprobs" and "prompt_logprobs", of each sequence
        what result.json has. Raises ConfigError for what is unknown or does not fit.
        """
        options = merged_options(generation_config, options)
        pad = options.get("pad_token_id")
        prompts = rows_of(input_ids, self._files.model, pad)
        steps = Steps(options) if options.get("return_dict_in_generate") else None
        completions = self.complete(
            prompts,
            options,
            streamer=streamer,
            adapter_id=adapter_id,
            on_logits=steps.on_logits if steps and steps.wanted else None,
            in_a_dict=steps is not None,
        )
        if steps is None:
            return sequences_of(prompts, completions)
        return steps.result(prompts, completions)

    def chat(
        self,
        tokenizer: PreTrainedTokenizer,
        query: str,
        history: list[dict[str, str]] | None = None,
        system_role_name: str = "system",
        user_role_name: str = "user",
        assistant_role_name: str = "assistant",
        instruction: str = "",
        max_length: int | None = 512,
        do_sample: bool = True,
        top_k: int = 50,
        *,
        generation_config: Any = None,
        streamer: Streamer | None = None,
        adapter_id: AdapterIds = None,
        **options: Any,
    ) -> tuple[str, list[dict[str, str]]]:
        """The answer to `query`, and the messages so far with both; with MindFormers' defaults.

        `instruction` begins a new conversation; `options` are those of `generate`. Raises
        ConfigError where the tokenizer has no chat template.
        """
        if history is None:
            begin = [{"role": system_role_name, "content": instruction}] if instruction else []
        else:
            begin = list(history)
        messages = [*begin, {"role": user_role_name, "content": query}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        longest = None if max_length is None else min(max_length, self.max_length)
        chosen = {"max_length": longest, "do_sample": do_sample, "top_k": top_k, **options}
        (made,) = self.complete(
            rows_of(ids, self._files.model),
            merged_options(generation_config, chosen),
            streamer=streamer,
            adapter_id=adapter_id,
        )
        answer: str = tokenizer.decode(made.token_ids, skip_special_tokens=True)
        return answer, [*messages, {"role": assistant_role_name, "content": answer}]

    def complete(
        self,
        prompts: list[list[int]],
        options: Mapping[str, Any],
        *,
        streamer: Streamer | None = None,
        tokenizer: Tokenizer | None = None,
        adapter_id: AdapterIds = None,
        on_logits: OnLogits | None = None,
        in_a_dict: bool = False,
    ) -> list[Completion]:
        """What follows each of `prompts` (token ids); see `generate`, whose dict has log-
        probabilities too.

        `tokenizer` tells which other tokens end a text; None: the checkpoint's own. That one is
        fetched only where stop texts or an export need it: ids do without.
        """
        config = self.config.run_config(checked_options(options, self.config, prompts))
        for name in () if in_a_dict else ("logprobs", "prompt_logprobs"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name}: only what generate gives with return_dict_in_generate=True has them",
                    f"model.generate(..., {name}={getattr(config, name)},"
                    " return_dict_in_generate=True)",
                )
        if adapter_id is None and not config.merges_adapter:
            adapter_id = config.adapter_id
        names = names_of(adapter_id, len(prompts))
        if not prompts:
            return []
        with self._lock, manual_parallel():
            self._locate()
            config = with_seed(config)
            if tokenizer is None:
                exports = config.backend == "mslite" and self._files.given is None
                needed = exports or bool(config.generation(self._files.model).stop)
                with suppress(ArtifactError):  # who needs one says so
                    tokenizer = self._own_tokenizer(fetching=needed)
            adapters = self._adapters.job(config, self._files, names)
            job = replace(fit(config, self._files, tokenizer, prompts), adapters=adapters)
            generation = job.generation
            if generation.stop and tokenizer is None:
                raise ConfigError("stop texts need a tokenizer, and the checkpoint has none")
            several = max(generation.num_beams, generation.num_return_sequences) > 1
            if streamer is not None and several:
                raise ConfigError(
                    "streamer: not with num_beams or num_return_sequences above 1: their tokens do"
                    " not come one after another",
                    "leave the streamer out",
                )
            if on_logits is not None and generation.num_beams > 1:
                raise ConfigError("output_scores and output_logits: not with num_beams above 1")
            if on_logits is not None and own_ranks(config).data > 1:
                raise ConfigError("output_scores and output_logits: not with data_parallel above 1")
            return self._run(config, _Call(job, tokenizer, streamer, on_logits))

    def set_train(self, mode: bool = True) -> PreTrainedModel:
        """As in MindSpore. Raises ConfigError for True: there is no training here."""
        if mode:
            raise ConfigError("set_train(True): lite-runner does not train", "set_train(False)")
        return self

    def close(self) -> None:
        """Give back the memory, as `del model` does; the next `generate` reads the weights again.

        What MindSpore keeps of a graph stays, once for each that was compiled: with the operators
        of this project under 1 MB a layer, with its own about 2 MB; and some 80 MB once a process.
        """
        with self._lock:
            self._drop()

    def _locate(self) -> None:
        """Find the files anew where a setting was changed since."""
        settings = lasting(self.config.run_config())
        if settings != self._settings:
            self._drop()
            self._files, self._settings = model_files.locate(settings), settings

    def _own_tokenizer(self, *, fetching: bool) -> Tokenizer:
        """The checkpoint's, as of `model_files.tokenizer_of`; what was once not to be had is not
        tried again before a setting changes. Raises ArtifactError."""
        settings = lasting(self.config.run_config())
        before = self._missing[1] if self._missing and self._missing[0] == settings else None
        try:
            again = fetching and before is None
            return model_files.tokenizer_of(settings, self._files, fetching=again)
        except ArtifactError as error:
            if fetching and before is not None:
                raise ArtifactError(before.message, before.hint) from error
            if fetching:
                self._missing = settings, error
            raise

    def _weights(self) -> ModelFiles:
        """What the backend is to be loaded from."""
        return self._files

    def _run(self, config: GenerateOptions, call: _Call) -> list[Completion]:
        ranks, tokenizer, stop = own_ranks(config), call.tokenizer, call.job.generation.stop
        job = share(config, call.job, ranks)
        if not job.tokens:  # fewer prompts than copies of the model
            return from_all([], ranks)
        scheduler = self._scheduler_of(self._room_for(config, job, tokenizer), config)
        transcripts: dict[tuple[int, int], Transcript] = {}
        prompts = [list(ids) for ids in job.tokens]
        turn = InTurn(call.streamer, prompts) if call.streamer is not None else None

        def on_token(prompt: int, part: int, token: int) -> bool:
            if turn is not None:
                turn.on_token(prompt - job.first, token)
            if not stop or tokenizer is None:
                return False
            transcript = transcripts.setdefault((prompt, part), Transcript(tokenizer, stop))
            transcript.put(token)
            return transcript.stopped

        def on_finish(completion: Completion) -> None:
            if turn is not None:
                turn.on_finish(completion.prompt_index - job.first)

        try:
            outcome = generate(
                scheduler,
                job.asked(keep_logits=call.on_logits is not None),
                first_index=job.first,
                on_token=on_token,
                on_finish=on_finish,
                on_logits=call.on_logits,
            )
        finally:
            if turn is not None:
                turn.close()
        if outcome.interrupted:
            raise KeyboardInterrupt
        return from_all(outcome.completions, ranks)

    def _scheduler_of(self, backend: Backend, config: GenerateOptions) -> Scheduler:
        """The scheduler of former calls, whose texts new ones may go on from, or a new one."""
        if self._scheduler is None:
            self._scheduler = Scheduler(backend, prefix_cache=config.prefix_cache == "auto")
        return self._scheduler

    def _room_for(self, config: GenerateOptions, job: Job, tokenizer: Tokenizer | None) -> Backend:
        """The backend: grown where it lacks slots or length, built anew where it lacks adapters."""
        files, backend = self._weights(), self._backend
        device = environment.resolve_device(config.context.device_target)
        room = replace(job, slots=max(job.slots, self.config.batch_size))
        if backend is not None:
            info, ranks = backend.info, own_ranks(config)
            room = replace(
                room,
                slots=max(room.slots, info.slots),
                length=max(job.length, info.max_length),
            )
            if taken(backend.adapters, self._known, job.adapters, config, files.model, ranks):
                self._know(job)
                if info.slots >= job.slots and info.max_length >= job.length:
                    return backend
                if self._grow(backend, config, device, room):
                    return backend
            backend = None
            self._drop()
        config = with_backend(config, files, room)
        backend = load(config, files, device, room, tokenizer, own_ranks(config))
        backend.prepare()
        self._backend, self._known = backend, ()
        self._know(job)
        return backend

    def _know(self, job: Job) -> None:
        """The backend has the adapters of a job."""
        every = (*self._known, *(job.adapters.adapters if job.adapters else ()))
        self._known = list({one.name: one for one in every}.values())

    def _grow(self, backend: Backend, config: GenerateOptions, device: str, room: Job) -> bool:
        self._scheduler = None
        try:
            if not grown(backend, config, self._files, device, room):
                return False
            backend.prepare()
        except BaseException:
            self._drop()  # half of it may be there
            raise
        return True

    def _drop(self) -> None:
        self._scheduler = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None


def lasting(config: GenerateOptions) -> GenerateOptions:
    """What of a config a backend is built for: without what each call may choose."""
    chosen: dict[str, Any] = dict.fromkeys(("adapter_id", "predict_batch_size", *OPTIONS))
    chosen |= {"predict_data": "", "chat": False, "truncate": "none", "seed": config.seed}
    return replace(config, **chosen)


class AutoModel:
    """Makes models; has no objects of its own."""

    @classmethod
    def from_pretrained(
        cls, name_or_dir: str | Path, *, checkpoint_name_or_path: str | Path = "", **settings: Any
    ) -> Network:
        """The model of a name of conf/model, a folder or a checkpoint.

        `checkpoint_name_or_path`: weights to take in place of the model's own; `settings` are
        attributes of its config, as use_past=True. Raises ConfigError, ArtifactError.
        """
        keys = {"load_checkpoint": str(checkpoint_name_or_path)} if checkpoint_name_or_path else {}
        config = PretrainedConfig(settings_of(str(name_or_dir), **keys))
        config.update(settings)
        return cls.from_config(config)

    @classmethod
    def from_config(
        cls, config: PretrainedConfig | str | Path | Mapping[str, Any], **settings: Any
    ) -> Network:
        """The model of an AutoConfig, or of a yaml file as run_mindformer takes it, or of what
        such a file holds.

        `settings` are attributes of its config, which are set for this model alone.
        """
        from lite_runner.api.network import network_of

        if isinstance(config, PretrainedConfig):
            config = config.copy()
        else:
            config = AutoConfig.from_pretrained(config)
        config.update(settings)
        return network_of(config)


class AutoModelForCausalLM(AutoModel):
    """Another of MindFormers' names of it."""
