"""pipeline(), TextGenerationPipeline and InferTask: texts in, texts out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lite_runner.api.auto_model import AutoModel
from lite_runner.api.config import PretrainedConfig
from lite_runner.api.exported import InferConfig, exported_config, exported_of, infer_config
from lite_runner.api.loaded_model import AdapterIds
from lite_runner.api.model import PreTrainedModel, texts_of
from lite_runner.api.options import checked_options, is_option, merged_options, stop_texts
from lite_runner.api.settings import read_batch_size
from lite_runner.api.streamers import Streamer
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.config import did_you_mean, nearest
from lite_runner.config.prompt import with_ending
from lite_runner.errors import ConfigError

TASKS = ("text_generation",)
Texts = list[dict[str, list[str]]]


def pipeline(
    task: str | None = None,
    model: Any = None,
    tokenizer: PreTrainedTokenizer | None = None,
    image_processor: None = None,
    audio_processor: None = None,
    backend: Literal["auto", "native", "ms", "mslite"] = "auto",
    *,
    config: Any = None,
    **kwargs: Any,
) -> TextGenerationPipeline:
    """A pipeline for `task` ("text_generation", the only one).

    `model`: a name, a folder, a config, a model or mindspore's Model of one, or the paths of the
    MindIR files (prefill, increment). `backend`: as on the command line; a model object is set to
    it. With "mslite", which runs exported models, `kwargs` may give fields of InferConfig
    (ge_config_path, device_id, infer_seq_length, ...).
    `config`: a PetConfig, which is the pet_config of a model that is made here.
    All other `kwargs` are options of TextGenerationPipeline, or settings of a model that is made
    here (kv_cache, quant, adapter_path, threads, ...). Raises ConfigError, ArtifactError.
    """
    task = TASKS[0] if task is None else task
    check_task(task)
    for name, given in ("image_processor", image_processor), ("audio_processor", audio_processor):
        if given is not None:
            raise ConfigError(f"pipeline: {name} has no effect with {task}", f"{name}=None")
    if model is None:
        raise ConfigError("pipeline: no model given", "model='smollm2_135m', or a model object")
    network = getattr(model, "predict_network", None)  # of a mindspore.Model
    model = network if isinstance(network, PreTrainedModel) else model
    if not isinstance(model, (PreTrainedModel, PretrainedConfig, str, Path, tuple)):
        raise ConfigError(
            f"model: got a {type(model).__name__}, expected a name, a path, a config, a model of"
            " AutoModel, or mindspore's Model of one"
        )
    if config is not None:
        if isinstance(model, PreTrainedModel):
            raise ConfigError(
                "pipeline: config= cannot be given with a model object",
                "AutoModel.from_pretrained(..., pet_config=...)",
            )
        kwargs["pet_config"] = config
    if backend == "auto" and isinstance(model, tuple):
        backend = "mslite"
    if backend == "mslite" and kwargs.get("engine") != "native":
        if isinstance(model, (PreTrainedModel, PretrainedConfig)):
            exported, rest = exported_of(model, kwargs)
        else:
            given, rest = infer_config(model, kwargs)
            exported = exported_config(given)
        return TextGenerationPipeline(PreTrainedModel(exported), tokenizer, **rest)
    if isinstance(model, tuple):
        raise ConfigError(
            f"pipeline: MindIR files run with backend='mslite'; got backend={backend!r}",
            "backend='mslite', without engine=",
        )
    chosen = {} if backend == "auto" else {"backend": backend}  # else as the config has it
    if not isinstance(model, PreTrainedModel):
        settings = {name: value for name, value in kwargs.items() if not _is_of_pipeline(name)}
        kwargs = {name: value for name, value in kwargs.items() if name not in settings}
        if isinstance(model, PretrainedConfig):
            model = AutoModel.from_config(model, **settings, **chosen)
        else:
            model = AutoModel.from_pretrained(model, **settings, **chosen)
        chosen = {}
    created = TextGenerationPipeline(model, tokenizer, **kwargs)
    model.config.update(chosen)
    return created


def _is_of_pipeline(name: str) -> bool:
    return is_option(name) or name in inspect.signature(TextGenerationPipeline).parameters


class InferTask:
    """The tasks that exported models can do."""

    @classmethod
    def get_infer_task(
        cls, task_type: str, task_config: Mapping[str, Any], **kwargs: Any
    ) -> TextGenerationPipeline:
        """The pipeline of a task; `task_config` is an InferConfig, or has its fields; `kwargs` are
        those of TextGenerationPipeline (tokenizer, ...).

        Raises ConfigError for an unknown task, ArtifactError for a model that cannot be run.
        """
        check_task(task_type)
        config = exported_config(InferConfig(task_config))
        return TextGenerationPipeline(PreTrainedModel(config), **kwargs)

    @classmethod
    def check_task_valid(cls, task_type: str) -> bool:
        """True for a known task."""
        return task_type in TASKS

    @classmethod
    def support_list(cls) -> list[str]:
        """The names of all tasks."""
        return list(TASKS)


class TextGenerationPipeline:
    """A model and a tokenizer, to be called with texts."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizer | None = None,
        *,
        streamer: Streamer | None = None,
        add_special_tokens: bool = True,
        is_sample_acceleration: bool = False,
        batch_size: int | None = None,
        adapter_id: AdapterIds = None,
        chat: bool | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> None:
        """`tokenizer`: None takes the checkpoint's own. All else (max_length, do_sample, ...) holds
        for every call that does not give it itself. Raises ConfigError for an unknown option."""
        self.model = model
        self.tokenizer = tokenizer or model.tokenizer
        options = merged_options(generation_config, options)
        checked_options(options, model.config)
        self._streamer = streamer
        self._add_special_tokens = add_special_tokens
        self._is_greedy = is_sample_acceleration
        self._batch_size = None if batch_size is None else read_batch_size(batch_size)
        self._adapter_id = adapter_id
        self._chat = chat
        self._options = options

    def __call__(
        self,
        inputs: str | Sequence[str],
        *,
        streamer: Streamer | None = None,
        add_special_tokens: bool | None = None,
        is_sample_acceleration: bool | None = None,
        batch_size: int | None = None,
        adapter_id: AdapterIds = None,
        chat: bool | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> Texts:
        """[{"text_generation_text": [prompt and completion]}], one for each text of `inputs`.

        With `batch_size`, which must divide their number, one for each batch of so many, as
        MindFormers has it. `adapter_id`: the name of an adapter, or one for each text; "base"
        is the base model, and so is None, unless there is one adapter alone. `chat`: each text is
        what a user says, put into the model's chat template.
        `is_sample_acceleration` says that the model itself chooses the likeliest token: sampling
        with it is a ConfigError. The answer of a chat comes without the question.
        """
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise ConfigError(f"inputs[{index}]: got {type(text).__name__}, expected a string")
        options = merged_options(generation_config, options)
        options = {**self._options, **{n: v for n, v in options.items() if v is not None}}
        greedy = self._is_greedy if is_sample_acceleration is None else is_sample_acceleration
        if greedy and options.get("do_sample", self.model.config.do_sample):
            raise ConfigError(
                "is_sample_acceleration=True chooses the likeliest token, but this call samples",
                "is_sample_acceleration=False",
            )
        batch = self._batch_size if batch_size is None else read_batch_size(batch_size)
        if batch is not None and len(texts) % batch:
            raise ConfigError(
                f"batch_size: got {batch} for {len(texts)} texts, expected a divisor",
                "leave batch_size out: the run chooses it",
            )
        special = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        core, chat = self.tokenizer.core, self._chat if chat is None else chat
        if chat is None:
            chat = self.model.config.chat
        completions = self.model.complete(
            list(self._encoded(texts, special, chat)),
            options,
            streamer=streamer or self._streamer,
            tokenizer=self.tokenizer,
            adapter_id=self._adapter_id if adapter_id is None else adapter_id,
        )
        found: list[list[str]] = [[] for _ in texts]
        generated = texts_of(completions, core, stop_texts(options, self.model.config))
        for completion, text in zip(completions, generated, strict=True):
            before = "" if chat else texts[completion.prompt_index]
            found[completion.prompt_index].append(before + text)
        step = batch or 1
        return [
            {"text_generation_text": [text for row in found[start : start + step] for text in row]}
            for start in range(0, len(texts), step)
        ]

    def __repr__(self) -> str:
        return f"TextGenerationPipeline({self.model.described})"

    def _encoded(self, texts: Sequence[str], special: bool, chat: bool) -> Iterator[list[int]]:
        core = self.tokenizer.core
        for text in texts:
            if chat:
                yield core.encode_chat([{"role": "user", "content": text}])
            else:
                yield with_ending(self.model.prefix, core.encode(text, special))


def check_task(task: str) -> None:
    """Raises ConfigError unless `task` is known."""
    if task not in TASKS:
        near = did_you_mean(nearest(str(task).replace("-", "_"), TASKS))
        raise ConfigError(f"task: got {task!r}, expected one of {', '.join(TASKS)}{near}")
