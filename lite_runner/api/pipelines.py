"""pipeline(): makes what a task takes of a model's name, files or object."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

from lite_runner.api.auto_model import AutoModel
from lite_runner.api.config import PretrainedConfig
from lite_runner.api.exported import exported_config
from lite_runner.api.infer_config import infer_config
from lite_runner.api.model import PreTrainedModel
from lite_runner.api.options import is_option
from lite_runner.api.text_generation_pipeline import TextGenerationPipeline, check_task
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ConfigError


def pipeline(
    task: str,
    model: PreTrainedModel | PretrainedConfig | str | Path | tuple[str | Path, ...] | None = None,
    tokenizer: PreTrainedTokenizer | None = None,
    image_processor: None = None,
    audio_processor: None = None,
    backend: Literal["ms", "mslite", "auto"] = "ms",
    **kwargs: Any,
) -> TextGenerationPipeline:
    """A pipeline for `task` ("text_generation").

    `model`: a name, a model or a folder; with backend="mslite", which runs exported models, a
    name, the paths of the MindIR files (prefill, increment), or a folder that holds them, and
    `kwargs` may give fields of InferConfig (ge_config_path, device_id, infer_seq_length, ...).
    backend="auto" packs a checkpoint into the cache once, and runs it without MindSpore; "mslite"
    with engine="native" does so too, or is a ConfigError where that cannot be.
    All other `kwargs` are options of TextGenerationPipeline, or settings of a model that is made
    here (kv_cache, quant, adapter_path, threads, ...). Raises ConfigError, ArtifactError.
    """
    check_task(task)
    for name, given in ("image_processor", image_processor), ("audio_processor", audio_processor):
        if given is not None:
            raise ConfigError(f"pipeline: {name} has no meaning for {task}", f"{name}=None")
    if model is None:
        raise ConfigError("pipeline: no model given", "model='smollm2_135m', or a model object")
    native = kwargs.get("engine") == "native"
    if backend == "mslite" and not native:
        if isinstance(model, (PreTrainedModel, PretrainedConfig)):
            raise ConfigError(
                "pipeline: backend='mslite' runs exported models; got a model object",
                "give the model's name, the paths of its MindIR files or their folder",
            )
        config, rest = infer_config(model, kwargs)
        return TextGenerationPipeline(PreTrainedModel(exported_config(config)), tokenizer, **rest)
    if backend not in ("ms", "mslite", "auto"):
        near = did_you_mean(nearest(str(backend), ("ms", "mslite", "auto")))
        raise ConfigError(f"backend: got {backend!r}, expected ms, mslite or auto{near}")
    if isinstance(model, tuple):
        raise ConfigError(
            f"pipeline: MindIR files run with backend='mslite'; got backend={backend!r}",
            "backend='mslite', without engine=",
        )
    if isinstance(model, PreTrainedModel):
        if backend != "ms":
            raise ConfigError(
                f"pipeline: backend={backend!r} is of a model made here; got a model object",
                f"AutoModel.from_pretrained(..., backend={backend!r})",
            )
    else:
        settings = {name: value for name, value in kwargs.items() if not _is_of_pipeline(name)}
        kwargs = {name: value for name, value in kwargs.items() if name not in settings}
        if backend != "ms":
            settings["backend"] = backend
        if isinstance(model, PretrainedConfig):
            model = AutoModel.from_config(model, **settings)
        else:
            model = AutoModel.from_pretrained(model, **settings)
    return TextGenerationPipeline(model, tokenizer, **kwargs)


def _is_of_pipeline(name: str) -> bool:
    return is_option(name) or name in inspect.signature(TextGenerationPipeline).parameters
