"""A plugin: a Llama whose norms are an operator in C++: rms_norm.cc, compiled on first use.

python run_lite.py plugins=examples/custom_operator.py load_checkpoint=FOLDER predict_data=hi
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import mindspore as ms
from mindspore import Parameter as State
from mindspore import Tensor, nn, ops
from mindspore.ops import CustomRegOp, DataType

from lite_runner import register
from lite_runner.architectures import KNOWN, Parameter
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import parameters_of
from lite_runner.architectures.spec import Decoder
from lite_runner.networks.decoder import DecoderCell
from lite_runner.networks.layers import BuildOptions, RMSNorm, Weights
from lite_runner.system.user_cache import cache_dir

SOURCE = Path(__file__).with_name("rms_norm.cc")
NAME = "my_llama"  # model_type in config.json
F32 = DataType.F32_Default
INPUTS = (
    CustomRegOp("RmsNorm")
    .input(0, "x")
    .input(1, "gain")
    .input(2, "eps")
    .output(0, "out")
    .dtype_format(F32, F32, F32, F32)
    .target("CPU")
    .get_op_info()
)


def library() -> Path:
    """The compiled source. Compiled graphs name its path, so it is one of the content."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = cache_dir() / "custom" / f"{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")  # ranks may compile at the same time
        compiler = os.environ.get("CXX", "c++")
        options = ["-O3", "-shared", "-fPIC", "-o"]
        subprocess.run([compiler, *options, made, SOURCE], check=True)
        made.replace(path)
    return path


class CppNorm(nn.Cell):
    """RMSNorm by the operator."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__(auto_prefix=False)
        self.gain = norm.gamma
        self.eps = State(Tensor([norm.eps], ms.float32), "eps", requires_grad=False)
        self.operator = ops.Custom(
            f"{library()}:RmsNorm",
            out_dtype=lambda x, gain, eps: x,  # its shape: RmsNormInferShape in the library
            func_type="aot",
            reg_info=INPUTS,
        )

    def construct(self, x: Tensor) -> Tensor:
        return self.operator(x, self.gain, self.eps)


class CppLlama(DecoderCell):
    """The network of every described model, with other norms."""

    def __init__(self, model: Decoder, weights: Weights, options: BuildOptions) -> None:
        super().__init__(model, weights, options)
        for block in self.blocks:
            block.attention_norm = CppNorm(block.attention_norm)
            block.feed_forward_norm = CppNorm(block.feed_forward_norm)


def tensors(model: Decoder) -> Iterable[Parameter]:
    return [one for one in parameters_of(model, KNOWN["llama"].names) if one.role != "head"]


def config(fields: Fields) -> Decoder:
    return dataclasses.replace(KNOWN["llama"].read(fields), architecture=NAME)


register(NAME, network=CppLlama, tensors=tensors, config=config)
