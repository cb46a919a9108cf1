"""scripts/convert_weight.py, with the commands of MindFormers' documents."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.torch_file import open_torch
from tests.paths import ROOT
from tests.scripts.running import Done, run_program, run_script

FIXTURES = ROOT / "tests/fixtures"
BIN = FIXTURES / "torch/bloom/pytorch_model.bin"


def script(folder: Path, *flags: str) -> Done:
    return run_script(folder, "convert_weight.py", *flags)


def test_the_command_of_the_bloom_document(tmp_path: Path) -> None:
    """As MindFormers' script computes it: q, k and v are the second axis of (heads, 3, size)."""
    (tmp_path / "xxx").mkdir()
    shutil.copyfile(BIN, tmp_path / "xxx/pytorch_model.bin")
    flags = ["--n_head=4", "--hidden_size=16", "--torch_path=xxx/pytorch_model.bin"]
    done = run_program(tmp_path, "convert_weight.py", *flags, "--mindspore_path=output_path")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "output_path/combine.ckpt"
    assert f"wrote {file.relative_to(tmp_path)}, config and tokenizer in" in done.stderr
    given, written = open_torch(BIN), open_ckpt(file)
    for kind, shape in (("weight", (4, 3, 4, 16)), ("bias", (4, 3, 4))):
        fused = given[f"transformer.h.1.self_attention.query_key_value.{kind}"].read()
        for part in range(3):
            wanted = fused.reshape(shape)[:, part].reshape(16, *shape[3:])
            found = written[f"blocks.1.attention.dense{part + 1}.{kind}"].read()
            np.testing.assert_array_equal(found, wanted)
    up = given["transformer.h.0.mlp.dense_h_to_4h.weight"].read()
    np.testing.assert_array_equal(written["blocks.0.output.mapping.weight"].read(), up.T)
    model = model_config_of(file)
    assert model is not None and (model.num_layers, model.num_heads) == (2, 4)
    assert len(open_checkpoint(file, model)) == len(written)
    again = script(tmp_path, *flags, "--mindspore_path=output_path")
    assert again.returncode == 2 and "exists already" in again.stderr


@pytest.mark.parametrize(
    ("flags", "written"),
    [
        (["--torch_ckpt_path={}/", "--mindspore_ckpt_path=llama"], "llama.ckpt"),
        (["--torch_ckpt_path={}/hf.bin", "--mindspore_ckpt_path=a/b.ckpt"], "a/b.ckpt"),
        (["--model=llama", "--input_path={}", "--output_path=x.safetensors"], "x.safetensors"),
    ],
)
def test_the_commands_for_llama_and_back(flags: list[str], written: str, tmp_path: Path) -> None:
    source = FIXTURES / "reference/llama"
    done = script(tmp_path, *(flag.format(source) for flag in flags))
    assert done.returncode == 0, done.stderr
    back = ["--model", "llama", "--reversed", "--input_path", written, "--output_path", "hf"]
    assert script(tmp_path, *back).returncode == 0
    found, expected = tmp_path / "hf/model.safetensors", source / "model.safetensors"
    assert found.read_bytes() == expected.read_bytes()


def test_another_type_is_rounded_to(tmp_path: Path) -> None:
    source = FIXTURES / "reference/gpt2"
    for name, kind in (("fp16", "F16"), ("bf16", "BF16")):
        flags = ["--model=gpt", f"--input_path={source}", f"--output_path={name}.ckpt"]
        assert script(tmp_path, *flags, f"--dtype={name}", "--layers=2").returncode == 0
        written = open_ckpt(tmp_path / f"{name}.ckpt")
        config = model_config_of(source)
        assert config is not None and {one.dtype for one in written.values()} == {kind}
        for key, tensor in open_checkpoint(source, config).items():
            np.testing.assert_allclose(written[key].float32(), tensor.read(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (["--torch_path={bin}"], 4, "no config.json beside the weights"),
        (["--torch_path={bin}", "--n_head=4", "--hidden_size=32"], 2, "--hidden_size: got 32"),
        (["--torch_path={bin}", "--n_head=5"], 2, "expected a divisor of 16"),
        (["--torch_path=gone"], 4, "gone: no such file or folder"),
        (["--input_path={llama}", "--model=bloom"], 2, "--model: got bloom, but"),
        (["--input_path={llama}", "--model=glm"], 2, "invalid choice: 'glm'"),
        (["--input_path={llama}", "--qkv_concat=True"], 2, "q, k and v are written apart"),
        (["--input_path={llama}", "--torch_path=x"], 2, "not allowed with argument"),
    ],
)
def test_bad_input(flags: list[str], code: int, expected: str, tmp_path: Path) -> None:
    places = {"bin": BIN, "llama": FIXTURES / "reference/llama"}
    done = script(tmp_path, *(flag.format(**places) for flag in flags), "--output_path=out")
    assert done.returncode == code and expected in done.stderr
    assert not list(tmp_path.iterdir()) and "Traceback" not in done.stderr


def test_a_pickle_is_not_written(tmp_path: Path) -> None:
    source = FIXTURES / "reference/llama"
    flags = ["--reversed", f"--input_path={source}", "--output_path=pytorch_model.bin"]
    done = script(tmp_path, *flags)
    assert done.returncode == 2 and "give the name of a folder: pytorch_model" in done.stderr
