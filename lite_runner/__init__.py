"""lite-runner: YAML-driven jobs for large language models on MindSpore.

The Python API hangs on this package (`from lite_runner import pipeline`) and is imported when it
is first used: the command line needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lite_runner.api.config import AutoConfig, BloomConfig, LlamaConfig
    from lite_runner.api.context import (
        ContextConfig,
        ParallelContextConfig,
        build_context,
        init_context,
    )
    from lite_runner.api.infer import InferConfig, InferTask
    from lite_runner.api.model import AutoModel, BloomLMHeadModel, LlamaForCausalLM
    from lite_runner.api.pipelines import TextGenerationPipeline, pipeline
    from lite_runner.api.register import register, register_inputs
    from lite_runner.api.streamers import TextIteratorStreamer, TextStreamer
    from lite_runner.api.tokenizer import AutoTokenizer, BloomTokenizer, LlamaTokenizer
    from lite_runner.api.tools import get_last_checkpoint, get_real_rank, str2bool
    from lite_runner.api.trainer import Trainer, TrainingArguments

__version__ = "0.1.0"

__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoTokenizer",
    "BloomConfig",
    "BloomLMHeadModel",
    "BloomTokenizer",
    "ContextConfig",
    "InferConfig",
    "InferTask",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaTokenizer",
    "ParallelContextConfig",
    "TextGenerationPipeline",
    "TextIteratorStreamer",
    "TextStreamer",
    "Trainer",
    "TrainingArguments",
    "build_context",
    "get_last_checkpoint",
    "get_real_rank",
    "init_context",
    "pipeline",
    "register",
    "register_inputs",
    "str2bool",
]

_MODULE_OF = {
    "AutoConfig": "config",
    "AutoModel": "model",
    "AutoTokenizer": "tokenizer",
    "BloomConfig": "config",
    "BloomLMHeadModel": "model",
    "BloomTokenizer": "tokenizer",
    "ContextConfig": "context",
    "InferConfig": "infer",
    "InferTask": "infer",
    "LlamaConfig": "config",
    "LlamaForCausalLM": "model",
    "LlamaTokenizer": "tokenizer",
    "ParallelContextConfig": "context",
    "TextGenerationPipeline": "pipelines",
    "TextIteratorStreamer": "streamers",
    "TextStreamer": "streamers",
    "Trainer": "trainer",
    "TrainingArguments": "trainer",
    "build_context": "context",
    "get_last_checkpoint": "tools",
    "get_real_rank": "tools",
    "init_context": "context",
    "pipeline": "pipelines",
    "register": "register",
    "register_inputs": "register",
    "str2bool": "tools",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.api.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)  # the next use does not come here
    return value
