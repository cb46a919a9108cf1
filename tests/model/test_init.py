"""Descriptions of a model's files, and their tensors by rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lite_runner.architectures.quantization import Quant, Quantization
from lite_runner.config.schema import AdapterOptions, RunConfig
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError, NonFiniteError, RunnerError
from lite_runner.model import ModelFiles, explained_nonfinite
from lite_runner.model.adapters import with_adapter
from lite_runner.model.locate import locate
from tests.paths import REFERENCE

Configure = Callable[..., RunConfig]


def test_random_weights_have_no_files(configure: Configure) -> None:
    files = locate(configure("model=tiny_llama", "load_checkpoint=random").source)
    assert files.is_local and files.location() == "random" and files.stored_bytes() == 0
    whole = files.whole()
    assert whole.keys() == files.tensors().keys()
    rank = files.resharded(Ranks(1, 1, 2), vocab_parallel=True)
    shapes = {name: (tensor.shape, rank[name].shape) for name, tensor in whole.items()}
    assert shapes["model.layers.0.feed_forward.w1.weight"][1] == (
        shapes["model.layers.0.feed_forward.w1.weight"][0][0] // 2,
        shapes["model.layers.0.feed_forward.w1.weight"][0][1],
    )


def test_a_folder_counts_the_files_that_hold_weights(configure: Configure) -> None:
    folder = REFERENCE / "llama"
    files = locate(configure("model=auto", f"load_checkpoint={folder}").source)
    assert files.stored_bytes() == (folder / "model.safetensors").stat().st_size
    assert files.location().startswith(f"{folder}: ") and files.location().endswith(" here")


def test_tensors_in_memory_take_the_place_of_the_files(configure: Configure) -> None:
    files = locate(configure("model=auto", f"load_checkpoint={REFERENCE / 'llama'}").source)
    held = locate(configure("model=tiny_llama", "load_checkpoint=random").source).whole()
    assert replace(files, held=held).tensors().keys() == held.keys()


def test_wide_matrices_are_rounded_but_not_with_integers(configure: Configure) -> None:
    files = locate(configure("model=auto", f"load_checkpoint={REFERENCE / 'llama'}").source)
    name = "model.layers.0.attention.wq.weight"
    exact, half = files.tensors()[name], replace(files, rounded="float16").tensors()[name]
    assert (exact.dtype, half.dtype) == ("F32", "F16")
    assert np.array_equal(exact.float32().astype(np.float16), half.read())
    quantized = replace(files, rounded="float16", quantization=Quantization("a16w8", 0))
    assert quantized.tensors()[name].integers is not None


def test_unquantized_tensors_of_a_quantized_model_are_not_rounded(configure: Configure) -> None:
    """Such weights stay as they are: its operators compute with all else in float32."""
    files = locate(configure("model=auto", f"load_checkpoint={REFERENCE / 'llama'}").source)
    name = next(iter(files.tensors()))
    half = replace(files, rounded="float16")
    assert half.tensors()[name].dtype == "F16"
    quantized = replace(half, quantization=Quantization("a16w8", 0))
    assert quantized.tensors()[name].dtype == files.tensors()[name].dtype == "F32"


@pytest.mark.parametrize("quant", ["none", "a16w8"])
def test_the_vocabulary_of_a_rank(configure: Configure, quant: Quant) -> None:
    files = locate(configure("model=auto", f"load_checkpoint={REFERENCE / 'llama'}").source)
    files = replace(files, quantization=Quantization(quant, 0))
    (name, whole), *_ = files.tensors().items()
    rows, width = whole.shape
    for files_ in (files, replace(files, auto_trans=True)):
        assert files_.tensors(Ranks(1, 1, 2))[name].shape == (rows // 2, width)
        found = files_.tensors(Ranks(1, 1, 2), vocab_parallel=False)
        assert found[name].shape == whole.shape


def test_a_sharded_checkpoint_is_not_quantized(configure: Configure) -> None:
    files = locate(configure("model=auto", f"load_checkpoint={REFERENCE / 'llama'}").source)
    folder = Path("set")
    (folder / "rank_0").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="parallel=single"):
        replace(files, path=folder, quantization=Quantization("a16w8", 0)).tensors()


WEIGHT = "model.layers.1.attention.wo.weight"


@pytest.fixture
def files(configure: Callable[..., RunConfig]) -> ModelFiles:
    return locate(configure("model=auto", f"load_checkpoint={REFERENCE / 'llama'}").source)


def explained(files: ModelFiles) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught, explained_nonfinite(files):
        raise NonFiniteError("the logits hold NaN", "try float32")
    return caught.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_weight_is_named(files: ModelFiles, value: float, dtype: str) -> None:
    tensors = dict(files.tensors())
    values = tensors[WEIGHT].float32().copy()
    values[-1, -1] = value
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    stored = {"F32": values, "F16": values.astype(np.float16), "BF16": bits}[dtype]
    tensors[WEIGHT] = replace(
        tensors[WEIGHT], dtype=dtype, read=lambda: stored, part=lambda index: stored[index]
    )
    error = explained(replace(files, held=tensors, rounded="float32"))
    assert error.message == f"the logits hold NaN: {WEIGHT} of the checkpoint is not finite"


def test_with_finite_weights_the_computation_overflows(files: ModelFiles) -> None:
    error = explained(files)
    assert "all weights are finite" in error.message and error.hint == "try float32"


def test_without_the_files_the_error_is_as_it_was(files: ModelFiles) -> None:
    assert files.path is not None
    assert explained(replace(files, path=files.path / "gone")).message == "the logits hold NaN"


def test_other_errors_pass(files: ModelFiles) -> None:
    with pytest.raises(RunnerError, match="else"), explained_nonfinite(files):
        raise RunnerError("else")


def test_ranks_have_their_part_of_an_adapter(configure: Configure) -> None:
    given = ("run_mode=convert", "model=auto", f"load_checkpoint={REFERENCE / 'llama'}")
    adapter = REFERENCE.parent / "adapters/llama/ends"
    config = configure(*given, f"adapter_path={adapter}", "merge=true", "convert_output=x")
    assert isinstance(config, AdapterOptions)
    plain = locate(config.source)
    files, ranks, name = with_adapter(plain, config.adapters), Ranks(1, 1, 2), "lm_head.weight"
    part, other = (
        one.resharded(ranks, vocab_parallel=True)[name].float32() for one in (files, plain)
    )
    whole = files.whole()[name].float32()
    assert np.array_equal(part, whole[len(whole) // 2 :]) and not np.array_equal(part, other)
