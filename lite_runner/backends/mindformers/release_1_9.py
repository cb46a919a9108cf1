"""MindFormers 1.9.0, on mindspore 2.10: read from its sources.

Its networks are made for Ascend. Of those that it calls legacy, Llama computes on a CPU where the
yaml asks for it by plain operators; for greedy tokens mint.argmax, which has no kernel for a CPU,
has a stand-in: see worker.py. The cache is of paged attention, which has none either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.mindformers.python import PYTHON_1_9
from lite_runner.backends.mindformers.release import (
    Family,
    MindFormersRelease,
    hides_pads,
    llama_faults,
    llama_settings,
)


def _llama_faults(model: Decoder) -> Iterator[str]:
    scaling = model.rotary.scaling if model.rotary else None
    if scaling is not None and scaling.type not in ("linear", "llama3"):
        yield f"no {scaling.type} scaling of rotary positions is translated for it"
    yield from llama_faults(model)
    if model.feed_forward.bias:
        yield "its Llama has no biases in the feed-forward"


def _llama(model: Decoder) -> dict[str, Any]:
    settings = llama_settings(model) | {
        "attn_proj_has_bias": model.attention.out_bias,
        "tie_word_embeddings": model.tie_word_embeddings,
        "fused_rms_norm": False,
        "use_flash_attention": False,
    }
    assert model.rotary is not None
    if (scaling := model.rotary.scaling) is None:
        return settings
    if scaling.type == "linear":
        return settings | {"extend_method": "PI", "scaling_factor": scaling.factor}
    return settings | {
        "extend_method": "LLAMA3",
        "scaling_factor": {
            "factor": float(scaling.factor),
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_length,
        },
    }


def _llama_ascend(model: Decoder) -> dict[str, Any]:
    plain = ("use_rope_slice", "fused_rms_norm")
    settings = {name: value for name, value in _llama(model).items() if name not in plain}
    return settings | {"use_flash_attention": True}


V1_9_0 = MindFormersRelease(
    "1.9.0",
    "2.10.0",
    PYTHON_1_9,
    {"LlamaConfig": Family(_llama_faults, _llama, hides_pads)},
    sections={"use_legacy": True, "parallel": {}, "parallel_config": {}},
    context={"postprocess_use_numpy": True},
    caches=False,
    beams=False,
    exports=False,
)
# On Ascend by its own operators, and with a cache. Written from its sources and its yamls: never
# run, for want of a device.
V1_9_0_ASCEND = replace(
    V1_9_0,
    families={"LlamaConfig": Family(_llama_faults, _llama_ascend, hides_pads)},
    context={},
    caches=True,
    blocks=16,
)
