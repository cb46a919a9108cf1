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
    from lite_runner.api.config import (
        AutoConfig,
        BloomConfig,
        ChatGLM2Config,
        GLMConfig,
        GPT2Config,
        LlamaConfig,
        PretrainedConfig,
        Qwen2Config,
        TransformerOpParallelConfig,
    )
    from lite_runner.api.context import (
        ContextConfig,
        ParallelContextConfig,
        build_context,
        init_context,
    )
    from lite_runner.api.exported import InferConfig
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
    from lite_runner.api.pipelines import InferTask, TextGenerationPipeline, pipeline
    from lite_runner.api.register import (
        PREFILL_MODEL_INPUT_MAP,
        BaseInputsOfInfer,
        InputOfInfer,
        get_bloom_inc_model_input,
        get_llama_prefill_model_input,
        get_llm_common_prefill_model_input,
        register,
        register_inputs,
    )
    from lite_runner.api.streamers import TextIteratorStreamer, TextStreamer
    from lite_runner.api.tokenizer import PreTrainedTokenizer
    from lite_runner.api.tools import (
        LoraConfig,
        MindFormerConfig,
        PetConfig,
        build_parallel_config,
        get_last_checkpoint,
        get_real_rank,
        logger,
        str2bool,
        transform_and_load_checkpoint,
    )
    from lite_runner.api.trainer import Trainer, TrainingArguments
    from lite_runner.errors import RunnerError
    from lite_runner.mindir.graph_inputs import CommonInputsOfInfer

__version__ = "0.1.0"

__all__ = [
    "PREFILL_MODEL_INPUT_MAP",
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoProcessor",
    "AutoTokenizer",
    "BaseInputsOfInfer",
    "BloomConfig",
    "BloomLMHeadModel",
    "BloomTokenizer",
    "BloomTokenizerFast",
    "ChatGLM2Config",
    "ChatGLM2ForConditionalGeneration",
    "ChatGLM2Tokenizer",
    "ChatGLM3Tokenizer",
    "ChatGLMTokenizer",
    "CommonInputsOfInfer",
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
    "InputOfInfer",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "LoraConfig",
    "MindFormerConfig",
    "ParallelContextConfig",
    "PetConfig",
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
    "get_bloom_inc_model_input",
    "get_last_checkpoint",
    "get_llama_prefill_model_input",
    "get_llm_common_prefill_model_input",
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
    "PREFILL_MODEL_INPUT_MAP": "api.register",
    "AutoConfig": "api.config",
    "AutoModel": "api.auto_model",
    "AutoModelForCausalLM": "api.auto_model",
    "AutoProcessor": "api.auto_tokenizer",
    "AutoTokenizer": "api.auto_tokenizer",
    "BaseInputsOfInfer": "api.register",
    "BloomConfig": "api.config",
    "BloomLMHeadModel": "api.network",
    "BloomTokenizer": "api.auto_tokenizer",
    "BloomTokenizerFast": "api.auto_tokenizer",
    "ChatGLM2Config": "api.config",
    "ChatGLM2ForConditionalGeneration": "api.network",
    "ChatGLM2Tokenizer": "api.auto_tokenizer",
    "ChatGLM3Tokenizer": "api.auto_tokenizer",
    "ChatGLMTokenizer": "api.auto_tokenizer",
    "CommonInputsOfInfer": "mindir.graph_inputs",
    "ContextConfig": "api.context",
    "GLMChatModel": "api.network",
    "GLMConfig": "api.config",
    "GLMForPreTraining": "api.network",
    "GPT2Config": "api.config",
    "GPT2LMHeadModel": "api.network",
    "GPT2Tokenizer": "api.auto_tokenizer",
    "GPT2TokenizerFast": "api.auto_tokenizer",
    "GenerationConfig": "api.options",
    "InferConfig": "api.exported",
    "InferTask": "api.pipelines",
    "InputOfInfer": "api.register",
    "LlamaConfig": "api.config",
    "LlamaForCausalLM": "api.network",
    "LlamaTokenizer": "api.auto_tokenizer",
    "LlamaTokenizerFast": "api.auto_tokenizer",
    "LoraConfig": "api.tools",
    "MindFormerConfig": "api.tools",
    "ParallelContextConfig": "api.context",
    "PetConfig": "api.tools",
    "PreTrainedModel": "api.model",
    "PreTrainedTokenizer": "api.tokenizer",
    "PretrainedConfig": "api.config",
    "Qwen2Config": "api.config",
    "Qwen2ForCausalLM": "api.network",
    "Qwen2Tokenizer": "api.auto_tokenizer",
    "Qwen2TokenizerFast": "api.auto_tokenizer",
    "RunnerError": "errors",
    "TextGenerationPipeline": "api.pipelines",
    "TextIteratorStreamer": "api.streamers",
    "TextStreamer": "api.streamers",
    "Trainer": "api.trainer",
    "TrainingArguments": "api.trainer",
    "TransformerOpParallelConfig": "api.config",
    "build_context": "api.context",
    "build_parallel_config": "api.tools",
    "get_bloom_inc_model_input": "api.register",
    "get_last_checkpoint": "api.tools",
    "get_llama_prefill_model_input": "api.register",
    "get_llm_common_prefill_model_input": "api.register",
    "get_real_rank": "api.tools",
    "init_context": "api.context",
    "logger": "api.tools",
    "pipeline": "api.pipelines",
    "register": "api.register",
    "register_inputs": "api.register",
    "str2bool": "api.tools",
    "transform_and_load_checkpoint": "api.tools",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
