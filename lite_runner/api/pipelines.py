"""pipeline(): texts in, texts out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lite_runner.api.config import PretrainedConfig
from lite_runner.api.model import AutoModel, PreTrainedModel, checked_options, texts_of
from lite_runner.api.streamers import Streamer
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ConfigError

TASKS = ("text_generation",)


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
        **options: Any,
    ) -> None:
        """`tokenizer`: None takes the checkpoint's own. `options` (max_length, do_sample, ...) hold
        for every call that does not give them itself. Raises ConfigError for an unknown one."""
        self.model = model
        self.tokenizer = tokenizer or model.tokenizer
        checked_options(options, model.config)
        self._streamer = streamer
        self._add_special_tokens = add_special_tokens
        self._is_greedy = is_sample_acceleration
        self._options = options

    def __call__(
        self,
        inputs: str | Sequence[str],
        *,
        streamer: Streamer | None = None,
        add_special_tokens: bool | None = None,
        is_sample_acceleration: bool | None = None,
        **options: Any,
    ) -> list[dict[str, list[str]]]:
        """[{"text_generation_text": [prompt and completion]}], one for each text of `inputs`.

        `is_sample_acceleration` says that the model itself chooses the likeliest token: sampling
        with it is a ConfigError.
        """
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise ConfigError(f"inputs[{index}]: got {type(text).__name__}, expected a text")
        options = {**self._options, **options}
        special = self._add_special_tokens if add_special_tokens is None else add_special_tokens
        greedy = self._is_greedy if is_sample_acceleration is None else is_sample_acceleration
        if greedy and options.get("do_sample", self.model.config.do_sample):
            raise ConfigError(
                "is_sample_acceleration=True chooses the likeliest token; got do_sample=True too",
                "is_sample_acceleration=False",
            )
        core = self.tokenizer.core
        prompts = [core.encode(text, special) for text in texts]
        completions = self.model.complete(
            prompts, options, streamer=streamer or self._streamer, tokenizer=core
        )
        stop = options.get("stop") or ()
        found: list[dict[str, list[str]]] = [{"text_generation_text": []} for _ in texts]
        made = texts_of(completions, core, (stop,) if isinstance(stop, str) else stop)
        for completion, text in zip(completions, made, strict=True):
            prompt = texts[completion.prompt_index]
            found[completion.prompt_index]["text_generation_text"].append(prompt + text)
        return found


def pipeline(
    task: str,
    model: PreTrainedModel | PretrainedConfig | str | Path | tuple[str | Path, ...] | None = None,
    tokenizer: PreTrainedTokenizer | None = None,
    *,
    backend: Literal["ms", "mslite"] = "ms",
    **kwargs: Any,
) -> TextGenerationPipeline:
    """A pipeline for `task` ("text_generation").

    `model`: a name, a model or a folder; with backend="mslite", which runs exported models, a
    name, the paths of the MindIR files (prefill, increment), or a folder that holds them, and
    `kwargs` may give fields of InferConfig (ge_config_path, device_id, infer_seq_length, ...).
    All other `kwargs` are options of TextGenerationPipeline. Raises ConfigError, ArtifactError.
    """
    check_task(task)
    if model is None:
        raise ConfigError("pipeline: no model given", "model='smollm2_135m', or a model object")
    if backend == "mslite":
        from lite_runner.api.infer import InferTask, infer_config

        if isinstance(model, (PreTrainedModel, PretrainedConfig)):
            raise ConfigError(
                "pipeline: backend='mslite' runs exported models; got a model object",
                "give the model's name, the paths of its MindIR files or their folder",
            )
        config, rest = infer_config(model, kwargs)
        return InferTask.get_infer_task(task, config, tokenizer=tokenizer, **rest)
    if backend != "ms":
        near = did_you_mean(nearest(str(backend), ("ms", "mslite")))
        raise ConfigError(f"backend: got {backend!r}, expected ms or mslite{near}")
    if isinstance(model, tuple):
        raise ConfigError(
            "pipeline: MindIR files run with backend='mslite'; got backend='ms'", "backend='mslite'"
        )
    if isinstance(model, PretrainedConfig):
        model = AutoModel.from_config(model)
    elif not isinstance(model, PreTrainedModel):
        model = AutoModel.from_pretrained(model)
    return TextGenerationPipeline(model, tokenizer, **kwargs)


def check_task(task: str) -> None:
    """Raises ConfigError unless `task` is known."""
    if task not in TASKS:
        near = did_you_mean(nearest(str(task).replace("-", "_"), TASKS))
        raise ConfigError(f"task: got {task!r}, expected one of {', '.join(TASKS)}{near}")
