"""Golden Stick's round-to-nearest, with the two scripts of MindFormers' document 001."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lite_runner import AutoModel
from lite_runner.api.golden_stick import PTQConfig, RoundToNearest
from lite_runner.errors import ConfigError
from tests.paths import ROOT

QUANTIZE = """
import mindspore as ms
from mindformers import AutoModel

config = "tiny_llama"
model = AutoModel.from_config(config)

from mindspore_gs.common import BackendTarget
from mindspore_gs.ptq import PTQMode, PTQConfig
from mindspore_gs.ptq import RoundToNearest as RTN
from mindspore_gs.ptq.network_helpers import NetworkHelper
from mindspore_gs.ptq.network_helpers.mf_net_helpers import MFLlama2Helper

cfg = PTQConfig(
    mode=PTQMode.QUANTIZE, backend=BackendTarget.ASCEND, weight_quant_dtype=ms.dtype.int8)
llamaa_helper = MFLlama2Helper(config)
rtn = RTN(cfg)
rtn.apply(model, llamaa_helper)
rtn.convert(model)

ms.save_checkpoint(model.parameters_dict(), 'quantinized.ckpt')
"""
DEPLOY = """
import mindspore as ms
from mindformers import AutoModel

model = AutoModel.from_config("tiny_llama")
for parameter in model.get_parameters():  # what is loaded below is what counts
    parameter.set_data(ms.ops.zeros_like(parameter))
model_input = [1, 2, 3, 4]

from mindspore_gs.common import BackendTarget
from mindspore_gs.ptq import PTQMode, PTQConfig
from mindspore_gs.ptq import RoundToNearest as RTN
from mindspore_gs.ptq.network_helpers import NetworkHelper

cfg = PTQConfig(
    mode=PTQMode.DEPLOY, backend=BackendTarget.ASCEND, weight_quant_dtype=ms.dtype.int8)
rtn = RTN(cfg)
rtn.apply(model)
rtn.convert(model)
ms.load_checkpoint('quantinized.ckpt', model)

model_output = model.generate(model_input, max_new_tokens=8, do_sample=False)
print(model.config.quant, model_output[0])
"""


def test_the_documents_scripts(tmp_path: Path) -> None:
    output = ""
    for name, script in ("quantize.py", QUANTIZE), ("deploy.py", DEPLOY):
        (tmp_path / name).write_text(script)
        done = subprocess.run(
            [sys.executable, "-m", "lite_runner.mindformers", "--device_target", "CPU", name],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "LITE_RUNNER_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        output = done.stdout
    model = AutoModel.from_pretrained("tiny_llama", quant="a16w8")
    expected = model.generate([1, 2, 3, 4], max_new_tokens=8, do_sample=False)[0]
    assert output == f"a16w8 {expected}\n"


def test_a_blacklist_names_modules_that_stay_floats() -> None:
    def tokens_of(model: Any) -> Any:
        return model.generate([1, 2, 3, 4], max_new_tokens=8, do_sample=False)

    model = AutoModel.from_pretrained("tiny_llama")
    names = ["lm_head", "w2"]
    RoundToNearest(PTQConfig(opname_blacklist=names)).convert(model)
    expected = AutoModel.from_pretrained("tiny_llama", quant="a16w8", modules_to_not_convert=names)
    assert list(model.config.modules_to_not_convert) == names
    assert tokens_of(model) == tokens_of(expected)
    RoundToNearest(PTQConfig(opname_blacklist="lm_head")).convert(model)
    assert list(model.config.modules_to_not_convert) == ["lm_head"]
    RoundToNearest(PTQConfig()).convert(model)  # of another list, none is left
    assert tokens_of(model) == tokens_of(AutoModel.from_pretrained("tiny_llama", quant="a16w8"))


def test_types() -> None:
    model = AutoModel.from_pretrained("tiny_llama")
    RoundToNearest(PTQConfig(act_quant_dtype="int8", kvcache_quant_dtype="int8")).convert(model)
    assert (model.config.quant, model.config.kv_cache) == ("a8w8", "int8")
    RoundToNearest(PTQConfig(weight_quant_dtype="qint4x2")).convert(model)
    assert model.config.quant == "a16w4"


def test_invalid_quantization() -> None:
    with pytest.raises(ConfigError, match="got weight_quant_dtype=float16, act_quant_dtype=None"):
        RoundToNearest(PTQConfig(weight_quant_dtype="float16"))
    model = AutoModel.from_pretrained("tiny_llama")
    RoundToNearest(PTQConfig(opname_blacklist=["lm_heed"])).convert(model)
    with pytest.raises(ConfigError, match="got 'lm_heed', which is in no name of the model's"):
        model.generate([1, 2], max_new_tokens=2)
    with pytest.raises(ConfigError, match="apply: got str, expected a model"):
        RoundToNearest().apply("model")  # type: ignore[arg-type]
