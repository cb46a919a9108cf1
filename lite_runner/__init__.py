"""lite-runner: YAML-driven jobs for large language models on MindSpore.

The Python API hangs on this package (`from lite_runner import pipeline`) and is imported when it
is first used: the command line needs none of it.
"""

import functools
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
    from lite_runner.api.llm import LLM, Output, Outputs
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

__version__ = "1.0.0rc1"

__all__ = [
    "LLM",
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
    "Output",
    "Outputs",
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


@functools.cache
def _module_of() -> dict[str, str]:
    """The module of each name, as the imports for type checkers say it."""
    import ast  # not used by the command line
    from pathlib import Path

    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    return {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_module_of()[name]), name)
    return value  # the next use does not come here


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
