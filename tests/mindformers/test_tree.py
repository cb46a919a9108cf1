"""MindFormers' modules: the names of each, and the error for others."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

import lite_runner
from lite_runner.mindformers.tree import MODULES

# From MindFormers' documents and example scripts: module, names.
IMPORTED = """
mindformers AutoConfig AutoModel AutoProcessor AutoTokenizer TextStreamer pipeline
mindformers BloomConfig BloomLMHeadModel GPT2Config GPT2LMHeadModel GPT2Tokenizer LlamaConfig
mindformers LlamaForCausalLM LlamaTokenizer LlamaTokenizerFast AutoModelForCausalLM Qwen2Tokenizer
mindformers ContextConfig ParallelContextConfig Trainer TrainingArguments build_context init_context
mindformers TextGenerationPipeline TextIteratorStreamer logger
mindformers.auto_class AutoConfig AutoTokenizer
mindformers MindFormerConfig
mindformers.core.context build_context
mindformers.core.parallel_config build_parallel_config
mindformers.generation TextIteratorStreamer
mindformers.infer.infer_config InferConfig
mindformers.inference InferConfig InferTask
mindformers.inference.infers.text_generator_infer BaseInputsOfInfer InputOfInfer
mindformers.tools.export PREFILL_MODEL_INPUT_MAP get_bloom_inc_model_input
mindformers.inference.infer_config InferConfig
mindformers.models BloomTokenizer LlamaConfig LlamaForCausalLM LlamaTokenizer PreTrainedModel
mindformers.models.auto.configuration_auto AutoConfig
mindformers.models.auto.modeling_auto AutoModel
mindformers.models.bloom BloomConfig BloomLMHeadModel
mindformers.models.glm GLMConfig GLMForPreTraining GLMChatModel ChatGLMTokenizer
mindformers.models.glm.glm_config GLMConfig
mindformers.models.gpt2.gpt2 GPT2LMHeadModel
mindformers.models.gpt2.gpt2_config GPT2Config
mindformers.models.gpt2.gpt2_tokenizer GPT2Tokenizer
mindformers.models.llama LlamaConfig LlamaTokenizer LlamaForCausalLM
mindformers.models.llama.llama LlamaForCausalLM
mindformers.models.llama.llama_config LlamaConfig
mindformers.models.llama.llama_tokenizer_fast LlamaTokenizerFast
mindformers.models.modeling_utils PreTrainedModel
mindformers.models.tokenization_utils PreTrainedTokenizer
mindformers.pipeline pipeline
mindformers.tools logger
mindformers.tools.logger logger
mindformers.tools.register MindFormerConfig
mindformers.tools.register.config MindFormerConfig
mindformers.tools.utils str2bool get_real_rank
mindformers.trainer Trainer TrainingArguments ContextConfig
mindformers.trainer.trainer Trainer
mindformers.trainer.utils get_last_checkpoint transform_and_load_checkpoint
"""
LINES = [line.split() for line in IMPORTED.strip().splitlines()]


def test_imports_of_documents_and_examples() -> None:
    wrong = []
    for path, *names in LINES:
        module = importlib.import_module(f"lite_runner.{path}")
        for name in names:
            if getattr(module, name, None) is not getattr(lite_runner, name):
                wrong.append(f"{path}.{name}")
            elif name not in dir(module):
                wrong.append(f"{name} in dir({path})")
    assert not wrong


def test_every_name_is_one_of_the_api() -> None:
    assert {name for names in MODULES.values() for name in names} <= set(lite_runner.__all__)
    for names in MODULES.values():
        for name in names:
            assert getattr(lite_runner, name) is not None


def test_a_function_wins_over_the_module_of_its_name() -> None:
    from lite_runner.mindformers.pipeline import pipeline as deep

    from lite_runner.mindformers import pipeline

    assert pipeline is deep is lite_runner.pipeline
    module = importlib.import_module("lite_runner.mindformers.pipeline")
    assert module is sys.modules["lite_runner.mindformers.pipeline"]
    assert lite_runner.mindformers.models.llama is not lite_runner.mindformers.models.llama.llama


def test_missing_names_list_existing_ones() -> None:
    with pytest.raises(ImportError, match=r"mindformers has no LlamaConfg; did you mean LlamaCon"):
        from lite_runner.mindformers import LlamaConfg  # noqa: F401
    with pytest.raises(ImportError, match=r"models.llama has no LlamaModel; it has LlamaConfig, "):
        from lite_runner.mindformers.models.llama import LlamaModel  # noqa: F401
    with pytest.raises(ImportError, match=r"has no get_last_checkpoint; it is in mindformers\.tra"):
        from lite_runner.mindformers.tools import get_last_checkpoint  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"mindformers\.models has no t5; it has "):
        importlib.import_module("lite_runner.mindformers.models.t5.t5_config")
    tools = importlib.import_module("lite_runner.mindformers.tools")
    with pytest.raises(AttributeError, match=r"mindformers.tools has no hccl; it has MindFormerC"):
        _ = tools.hccl
    assert not hasattr(tools, "hccl")


def test_a_module_by_its_spec_is_the_module() -> None:
    models = importlib.import_module("lite_runner.mindformers.models")
    spec = importlib.util.find_spec("lite_runner.mindformers.models")
    assert spec is not None
    assert importlib.util.module_from_spec(spec) is models and not hasattr(models, "__file__")
