"""The real mindformers 1.0.2 on mindspore 2.0.0, ready to import, on CPU and without chatter.

Import this before mindformers. mindspore 2.0.0, the only one of its time on the package index,
lacks two names that mindformers 1.0.2 mentions, and tools/export.py imports models that its wheel
does not hold; none of them is used by bloom, gpt2 or llama on CPU.
"""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType

os.environ.setdefault("GLOG_v", "3")

import mindspore
from mindspore.parallel import _cost_model_context

mindspore.bfloat16 = mindspore.common.dtype.bfloat16 = mindspore.common.dtype.type_none
_cost_model_context._set_rp_matmul_mem_coef = lambda coefficient: None

for name in ("research", "research.baichuan2"):
    sys.modules[name] = ModuleType(name)
for name, model in (
    ("research.baichuan2.baichuan2_7b", "Baichuan7BV2ForCausalLM"),
    ("research.baichuan2.baichuan2_13b", "Baichuan13BV2ForCausalLM"),
):
    sys.modules[name] = ModuleType(name)
    setattr(sys.modules[name], model, None)

mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
logging.disable(logging.WARNING)  # also what MindFormers says of each parameter it loads
