"""lite-runner: YAML-driven jobs for large language models on MindSpore.

The Python API hangs on this package (`from lite_runner import pipeline`) and is imported when it
is first used: the command line needs none of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lite_runner.api.auto_tokenizer import (
        AutoProcessor,
        AutoTokenizer,
        BloomTokenizer,
        BloomTokenizerFast,
        GPT2Tokenizer,
        GPT2TokenizerFast,
        LlamaTokenizer,
        LlamaTokenizerFast,
        Qwen2Tokenizer,
        Qwen2TokenizerFast,
    )
    from lite_runner.api.config import (
        AutoConfig,
        BloomConfig,
        GPT2Config,
        LlamaConfig,
        PretrainedConfig,
        Qwen2Config,
    )
    from lite_runner.api.context import (
        ContextConfig,
        ParallelContextConfig,
        build_context,
        init_context,
    )
    from lite_runner.api.infer import InferConfig, InferTask
    from lite_runner.api.mindformer_config import (
        MindFormerConfig,
        build_parallel_config,
        transform_and_load_checkpoint,
    )
    from lite_runner.api.model import AutoModel, AutoModelForCausalLM, PreTrainedModel
    from lite_runner.api.network import (
        BloomLMHeadModel,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        Qwen2ForCausalLM,
    )
    from lite_runner.api.options import GenerationConfig
    from lite_runner.api.pipelines import TextGenerationPipeline, pipeline
    from lite_runner.api.ranks import TransformerOpParallelConfig
    from lite_runner.api.register import register, register_inputs
    from lite_runner.api.streamers import TextIteratorStreamer, TextStreamer
    from lite_runner.api.tokenizer import PreTrainedTokenizer
    from lite_runner.api.tools import get_last_checkpoint, get_real_rank, logger, str2bool
    from lite_runner.api.trainer import Trainer, TrainingArguments

__version__ = "0.1.0"

__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoProcessor",
    "AutoTokenizer",
    "BloomConfig",
    "BloomLMHeadModel",
    "BloomTokenizer",
    "BloomTokenizerFast",
    "ContextConfig",
    "GPT2Config",
    "GPT2LMHeadModel",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "GenerationConfig",
    "InferConfig",
    "InferTask",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "MindFormerConfig",
    "ParallelContextConfig",
    "PreTrainedModel",
    "PreTrainedTokenizer",
    "PretrainedConfig",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "TextGenerationPipeline",
    "TextIteratorStreamer",
    "TextStreamer",
    "Trainer",
    "TrainingArguments",
    "TransformerOpParallelConfig",
    "build_context",
    "build_parallel_config",
    "get_last_checkpoint",
    "get_real_rank",
    "init_context",
    "logger",
    "pipeline",
    "register",
    "register_inputs",
    "str2bool",
    "transform_and_load_checkpoint",
]

_MODULE_OF = {
    "AutoConfig": "config",
    "AutoModel": "model",
    "AutoModelForCausalLM": "model",
    "AutoProcessor": "auto_tokenizer",
    "AutoTokenizer": "auto_tokenizer",
    "BloomConfig": "config",
    "BloomLMHeadModel": "network",
    "BloomTokenizer": "auto_tokenizer",
    "BloomTokenizerFast": "auto_tokenizer",
    "ContextConfig": "context",
    "GPT2Config": "config",
    "GPT2LMHeadModel": "network",
    "GPT2Tokenizer": "auto_tokenizer",
    "GPT2TokenizerFast": "auto_tokenizer",
    "GenerationConfig": "options",
    "InferConfig": "infer",
    "InferTask": "infer",
    "LlamaConfig": "config",
    "LlamaForCausalLM": "network",
    "LlamaTokenizer": "auto_tokenizer",
    "LlamaTokenizerFast": "auto_tokenizer",
    "MindFormerConfig": "mindformer_config",
    "ParallelContextConfig": "context",
    "PreTrainedModel": "model",
    "PreTrainedTokenizer": "tokenizer",
    "PretrainedConfig": "config",
    "Qwen2Config": "config",
    "Qwen2ForCausalLM": "network",
    "Qwen2Tokenizer": "auto_tokenizer",
    "Qwen2TokenizerFast": "auto_tokenizer",
    "TextGenerationPipeline": "pipelines",
    "TextIteratorStreamer": "streamers",
    "TextStreamer": "streamers",
    "Trainer": "trainer",
    "TrainingArguments": "trainer",
    "TransformerOpParallelConfig": "ranks",
    "build_context": "context",
    "build_parallel_config": "mindformer_config",
    "get_last_checkpoint": "tools",
    "get_real_rank": "tools",
    "init_context": "context",
    "logger": "tools",
    "pipeline": "pipelines",
    "register": "register",
    "register_inputs": "register",
    "str2bool": "tools",
    "transform_and_load_checkpoint": "mindformer_config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.api.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)  # the next use does not come here
    return value
