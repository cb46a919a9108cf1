"""The architectures that come with the package."""

from __future__ import annotations

from lite_runner.architectures.architecture import Architecture
from lite_runner.architectures.bloom import BLOOM
from lite_runner.architectures.chatglm import CHATGLM
from lite_runner.architectures.chatglm_6b import CHATGLM_6B
from lite_runner.architectures.gemma2 import GEMMA2
from lite_runner.architectures.gemma3 import GEMMA3, GEMMA3_TEXT
from lite_runner.architectures.glm import GLM, GLM4
from lite_runner.architectures.gpt2 import GPT2
from lite_runner.architectures.gpt_neox import GPT_NEOX
from lite_runner.architectures.granite import GRANITE
from lite_runner.architectures.llama import LLAMA
from lite_runner.architectures.mistral import MISTRAL
from lite_runner.architectures.mixtral import MIXTRAL
from lite_runner.architectures.olmo2 import OLMO2
from lite_runner.architectures.phi3 import PHI3
from lite_runner.architectures.qwen2 import QWEN2
from lite_runner.architectures.qwen3 import QWEN3
from lite_runner.architectures.qwen3_moe import QWEN3_MOE
from lite_runner.architectures.smollm3 import SMOLLM3
from lite_runner.architectures.starcoder2 import STARCODER2

# In this order messages list them.
BUILT_IN: tuple[Architecture, ...] = (
    *(BLOOM, LLAMA, QWEN2, GPT2, QWEN3, MISTRAL, OLMO2, GRANITE, SMOLLM3),
    *(CHATGLM_6B, CHATGLM, GLM, GLM4, GEMMA2, GEMMA3_TEXT, GEMMA3, QWEN3_MOE, MIXTRAL, PHI3),
    *(STARCODER2, GPT_NEOX),
)
