"""lite-runner: YAML-driven jobs for large language models on MindSpore.

The Python API hangs on this package (`from lite_runner import pipeline`) and is imported when it
is first used: the command line needs none of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lite_runner.api.auto_model import AutoModel, AutoModelForCausalLM
    from lite_runner.api.auto_tokenizer import (
        AutoProcessor,
        AutoTokenizer,
        BloomTokenizer,
        BloomTokenizerFast,
        ChatGLM2Tokenizer,
        ChatGLM3Tokenizer,
        ChatGLMTokenizer,
        GPT2Tokenizer,
        GPT2TokenizerFast,
        LlamaTokenizer,
        LlamaTokenizerFast,
        Qwen2Tokenizer,
        Qwen2TokenizerFast,
    )
    from lite_runner.api.config import AutoConfig, PretrainedConfig
    from lite_runner.api.context import (
        ContextConfig,
        ParallelContextConfig,
        build_context,
        init_context,
    )
    from lite_runner.api.family_configs import (
        BloomConfig,
        ChatGLM2Config,
        GLMConfig,
        GPT2Config,
        LlamaConfig,
        Qwen2Config,
    )
    from lite_runner.api.infer_config import InferConfig
    from lite_runner.api.infer_task import InferTask
    from lite_runner.api.mindformer_config import (
        MindFormerConfig,
        build_parallel_config,
        transform_and_load_checkpoint,
    )
    from lite_runner.api.model import PreTrainedModel
    from lite_runner.api.network import (
        BloomLMHeadModel,
        ChatGLM2ForConditionalGeneration,
        GLMChatModel,
        GLMForPreTraining,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        Qwen2ForCausalLM,
    )
    from lite_runner.api.options import GenerationConfig
    from lite_runner.api.parallel_config import TransformerOpParallelConfig
    from lite_runner.api.pipelines import pipeline
    from lite_runner.api.register import register, register_inputs
    from lite_runner.api.streamers import TextIteratorStreamer, TextStreamer
    from lite_runner.api.text_generation_pipeline import TextGenerationPipeline
    from lite_runner.api.tokenizer import PreTrainedTokenizer
    from lite_runner.api.tools import get_last_checkpoint, get_real_rank, logger, str2bool
    from lite_runner.api.trainer import Trainer, TrainingArguments
    from lite_runner.errors import RunnerError

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
    "ChatGLM2Config",
    "ChatGLM2ForConditionalGeneration",
    "ChatGLM2Tokenizer",
    "ChatGLM3Tokenizer",
    "ChatGLMTokenizer",
    "ContextConfig",
    "GLMChatModel",
    "GLMConfig",
    "GLMForPreTraining",
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
    "RunnerError",
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
    "AutoConfig": "api.config",
    "AutoModel": "api.auto_model",
    "AutoModelForCausalLM": "api.auto_model",
    "AutoProcessor": "api.auto_tokenizer",
    "AutoTokenizer": "api.auto_tokenizer",
    "BloomConfig": "api.family_configs",
    "BloomLMHeadModel": "api.network",
    "BloomTokenizer": "api.auto_tokenizer",
    "BloomTokenizerFast": "api.auto_tokenizer",
    "ChatGLM2Config": "api.family_configs",
    "ChatGLM2ForConditionalGeneration": "api.network",
    "ChatGLM2Tokenizer": "api.auto_tokenizer",
    "ChatGLM3Tokenizer": "api.auto_tokenizer",
    "ChatGLMTokenizer": "api.auto_tokenizer",
    "ContextConfig": "api.context",
    "GLMChatModel": "api.network",
    "GLMConfig": "api.family_configs",
    "GLMForPreTraining": "api.network",
    "GPT2Config": "api.family_configs",
    "GPT2LMHeadModel": "api.network",
    "GPT2Tokenizer": "api.auto_tokenizer",
    "GPT2TokenizerFast": "api.auto_tokenizer",
    "GenerationConfig": "api.options",
    "InferConfig": "api.infer_config",
    "InferTask": "api.infer_task",
    "LlamaConfig": "api.family_configs",
    "LlamaForCausalLM": "api.network",
    "LlamaTokenizer": "api.auto_tokenizer",
    "LlamaTokenizerFast": "api.auto_tokenizer",
    "MindFormerConfig": "api.mindformer_config",
    "ParallelContextConfig": "api.context",
    "PreTrainedModel": "api.model",
    "PreTrainedTokenizer": "api.tokenizer",
    "PretrainedConfig": "api.config",
    "Qwen2Config": "api.family_configs",
    "Qwen2ForCausalLM": "api.network",
    "Qwen2Tokenizer": "api.auto_tokenizer",
    "Qwen2TokenizerFast": "api.auto_tokenizer",
    "RunnerError": "errors",
    "TextGenerationPipeline": "api.text_generation_pipeline",
    "TextIteratorStreamer": "api.streamers",
    "TextStreamer": "api.streamers",
    "Trainer": "api.trainer",
    "TrainingArguments": "api.trainer",
    "TransformerOpParallelConfig": "api.parallel_config",
    "build_context": "api.context",
    "build_parallel_config": "api.mindformer_config",
    "get_last_checkpoint": "api.tools",
    "get_real_rank": "api.tools",
    "init_context": "api.context",
    "logger": "api.tools",
    "pipeline": "api.pipelines",
    "register": "api.register",
    "register_inputs": "api.register",
    "str2bool": "api.tools",
    "transform_and_load_checkpoint": "api.mindformer_config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
