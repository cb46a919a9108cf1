"""AutoModel: a model object with MindFormers' `generate`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lite_runner import environment, model_files, progress
from lite_runner.api.config import AutoConfig, PretrainedConfig, settings_of
from lite_runner.api.streamers import InTurn, Streamer
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.backends.base import Backend
from lite_runner.config.fields import show
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.schema import RunConfig
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.generation import Completion, generate
from lite_runner.session import Job, fit, load
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.text.transcript import Transcript

# pad_token_id is the model's; all others are keys of the config.
OPTIONS = tuple(name for name in GenerationConfig.__dataclass_fields__ if name != "pad_token_id")
_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # and what is "off"


class PreTrainedModel:
    """A model and its weights, which are read at the first `generate`.

    It grows with what is asked for: more sequences at once, or longer ones, than it has room for
    are a reason to build it anew; `config.batch_size` makes room from the start. Calls from
    several threads follow one another.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        """Checks the config and finds the files. Raises ConfigError, ArtifactError."""
        self.config = config.copy()
        run = self.config.run_config()
        self._files = model_files.locate(run)
        self._backend: Backend | None = None
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> PreTrainedTokenizer:
        """The one that belongs to the checkpoint. Raises ArtifactError where there is none."""
        core = model_files.tokenizer_of(self.config.run_config(), self._files)
        return PreTrainedTokenizer(core, self._files.model.pad_token_id)

    def generate(
        self, input_ids: Any, *, streamer: Streamer | None = None, **options: Any
    ) -> list[list[int]]:
        """Prompt and new ids of each sequence, without the token that ended it.

        `input_ids`: a list of ids, or a list, array or tensor of such rows; the padding at the end
        of a row is left out. `options` are those of the config: max_length, max_new_tokens,
        do_sample, top_k, ...; None leaves one to the model. `num_return_sequences` of one prompt
        stand beside each other. Raises ConfigError for what is unknown or does not fit.
        """
        prompts = self._rows(input_ids)
        completions = self.complete(prompts, options, streamer=streamer)
        return [[*prompts[one.prompt_index], *one.token_ids] for one in completions]

    def complete(
        self,
        prompts: list[list[int]],
        options: Mapping[str, Any],
        *,
        streamer: Streamer | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> list[Completion]:
        """What follows each of `prompts` (token ids); see `generate`.

        `tokenizer` tells which other tokens end a text; None: the checkpoint's own.
        """
        config = self.config.run_config(checked_options(options, self.config))
        if not prompts:
            return []
        if tokenizer is None:
            with suppress(ArtifactError):  # ids need none
                tokenizer = self.tokenizer.core
        job = fit(config, self._files, tokenizer, prompts)
        generation = job.generation
        if generation.stop and tokenizer is None:
            raise ConfigError("stop texts need a tokenizer, and the checkpoint has none")
        if streamer is not None and max(generation.num_beams, generation.num_return_sequences) > 1:
            raise ConfigError(
                "streamer: not with num_beams or num_return_sequences above 1: their tokens do not"
                " come one after another",
                "leave the streamer out",
            )
        with self._lock:
            return self._run(config, job, streamer, tokenizer)

    def set_train(self, mode: bool = True) -> PreTrainedModel:
        """As in MindSpore. Raises ConfigError for True: there is no training here."""
        if mode:
            raise ConfigError("set_train(True): lite-runner does not train", "set_train(False)")
        return self

    def close(self) -> None:
        """Give back the memory; the next `generate` reads the weights again."""
        with self._lock:
            self._drop()

    def _run(
        self, config: RunConfig, job: Job, streamer: Streamer | None, tokenizer: Tokenizer | None
    ) -> list[Completion]:
        backend = self._room_for(config, job, tokenizer)
        stop = job.generation.stop
        transcripts: dict[tuple[int, int], Transcript] = {}
        prompts = [list(ids) for ids in job.tokens]
        turn = InTurn(streamer, prompts) if streamer is not None else None

        def on_token(prompt: int, part: int, token: int) -> bool:
            if turn is not None:
                turn.on_token(prompt, token)
            if not stop or tokenizer is None:
                return False
            transcript = transcripts.setdefault((prompt, part), Transcript(tokenizer, stop))
            transcript.put(token)
            return transcript.stopped

        def on_finish(prompt: int, _part: int) -> None:
            if turn is not None:
                turn.on_finish(prompt)

        try:
            outcome = generate(
                backend, job.tokens, job.generation, on_token=on_token, on_finish=on_finish
            )
        finally:
            if turn is not None:
                turn.close()
        if outcome.interrupted:
            raise KeyboardInterrupt
        return outcome.completions

    def _room_for(self, config: RunConfig, job: Job, tokenizer: Tokenizer | None) -> Backend:
        """The backend, built anew where it lacks slots or length."""
        slots = max(job.slots, self.config.batch_size)
        length = job.length
        if self._backend is not None:
            if self._backend.slots >= job.slots and self._backend.max_length >= length:
                return self._backend
            slots, length = max(slots, self._backend.slots), max(length, self._backend.max_length)
            self._drop()
        device = environment.resolve_device(config.context.device_target)
        room = Job(job.prompts, job.tokens, job.generation, slots, length)
        backend = load(config, self._files, device, room, tokenizer)
        backend.prepare()
        self._backend = backend
        return backend

    def _drop(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def _rows(self, input_ids: Any) -> list[list[int]]:
        """Rows of ids, one for a flat list, without padding at the end."""
        values = input_ids.asnumpy() if hasattr(input_ids, "asnumpy") else input_ids
        if not isinstance(values, (list, tuple, np.ndarray)):
            raise ConfigError(f"input_ids: got {show(input_ids)}, expected a list of token ids")
        flat = len(values) > 0 and np.ndim(values[0]) == 0
        rows = [[_token(id) for id in row] for row in ([values] if flat else values)]
        vocab, pad = self._files.model.vocab_size, self._files.model.pad_token_id
        for index, row in enumerate(rows):
            wrong = next((id for id in row if not 0 <= id < vocab), None)
            if wrong is not None:
                raise ConfigError(
                    f"input_ids[{index}]: got the id {wrong}, expected 0 to {vocab - 1}",
                    "use the model's own tokenizer",
                )
            while row and row[-1] == pad:
                row.pop()
        return rows


def _token(id: Any) -> int:
    if isinstance(id, bool) or not isinstance(id, (int, np.integer)):
        raise ConfigError(f"input_ids: got {show(id)}, expected token ids")
    return int(id)


def checked_options(options: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Generation options as top-level keys of a config. Raises ConfigError for an unknown one."""
    for name in options:
        if name not in OPTIONS:
            near = did_you_mean(nearest(name, OPTIONS))
            raise ConfigError(
                f"{name}: no such option of generate{near}", f"there are {', '.join(OPTIONS)}"
            )
    given = {name: value for name, value in options.items() if value is not None}
    if "max_length" in given and "max_new_tokens" not in given:
        given["max_new_tokens"] = None  # the config's own must not win over it
    if not given.get("do_sample", config.do_sample):
        # MindFormers' users give them with do_sample=False, and say so in its documents.
        idle = [name for name, off in _SAMPLING.items() if given.pop(name, off) != off]
        if idle:
            progress.detail(f"{', '.join(idle)}: no effect with do_sample=False")
    return given


class AutoModel:
    """Makes models; has no objects of its own."""

    @classmethod
    def from_pretrained(
        cls, name_or_dir: str | Path, *, checkpoint_name_or_path: str | Path = "", **settings: Any
    ) -> PreTrainedModel:
        """The model of a name of conf/model, a folder or a checkpoint.

        `checkpoint_name_or_path`: weights to take in place of the model's own; `settings` are
        attributes of its config, as use_past=True. Raises ConfigError, ArtifactError.
        """
        keys = {"load_checkpoint": str(checkpoint_name_or_path)} if checkpoint_name_or_path else {}
        config = PretrainedConfig(settings_of(str(name_or_dir), **keys))
        config.update(settings)
        return PreTrainedModel(config)

    @classmethod
    def from_config(cls, config: PretrainedConfig | str | Path) -> PreTrainedModel:
        """The model of an AutoConfig, or of a yaml file as run_mindformer takes it."""
        if not isinstance(config, PretrainedConfig):
            config = AutoConfig.from_pretrained(config)
        return PreTrainedModel(config)


class BloomLMHeadModel(PreTrainedModel):
    """MindFormers' name of a BLOOM."""


class LlamaForCausalLM(PreTrainedModel):
    """MindFormers' name of a Llama."""


def texts_of(
    completions: Sequence[Completion], tokenizer: Tokenizer, stop: Sequence[str]
) -> list[str]:
    """The text of each completion, without the prompt, cut at a stop text."""
    texts = []
    for completion in completions:
        transcript = Transcript(tokenizer, stop)
        for token in completion.token_ids:
            transcript.put(token)
        transcript.finish()
        texts.append(transcript.text)
    return texts
