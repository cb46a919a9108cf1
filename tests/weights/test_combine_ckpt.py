"""combine_ckpt.py of MindFormers' bloom document: shards of a training, with MindSpore's own tools
and with ours. The calls are the document's, for 2 ranks in place of 8."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import model_config_in, open_checkpoint
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.sharding.shard_writer import Cutting, write_shards
from lite_runner.weights.sharding.shards import open_shards
from lite_runner.weights.sharding.strategy import merge_strategies
from tests.paths import FIXTURES

BLOOM = FIXTURES / "reference/bloom"
SUFFIX = "300_8"


@pytest.fixture
def trained() -> Decoder:
    """output/checkpoint and output/strategy as a training on 2 cards leaves them."""
    config = model_config_in(BLOOM)
    assert config is not None
    tensors = open_checkpoint(BLOOM, config)
    cutting = Cutting.of_model(config, Ranks(tensor=2), "ckpt", vocab_parallel=True)
    cut = Path("cut")
    options = {"extra": {}, "workers": 1, "overwrite": False, "advance": lambda count: None}
    write_shards(cut, tensors, cutting, **options)
    (cut / "strategy").rename(Path("output").mkdir() or "output/strategy")
    step = LazyTensor((), "F32", lambda: np.array(2400.0, np.float32))
    for rank in range(2):
        held = open_ckpt(cut / f"rank_{rank}/checkpoint_{rank}.ckpt")
        extra = {
            f"{kind}.{name}": one
            for kind in ("adam_m", "adam_v", "accu_grads")
            for name, one in held.items()
        }
        file = Path(f"output/checkpoint/rank_{rank}/mindformers_rank_{rank}-{SUFFIX}.ckpt")
        write_ckpt(file, {**held, **extra, "global_step": step})
    return config


def same_as_bloom(found: dict[str, LazyTensor], config: Decoder) -> None:
    expected = open_checkpoint(BLOOM, config)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].read(), tensor.read())


def test_checkpoints_combined_by_the_documented_script_are_read(trained: Decoder) -> None:
    ms.merge_pipeline_strategys("output/strategy", "output/merged.ckpt")
    for rank in range(2):
        params = ms.load_checkpoint(
            f"output/checkpoint/rank_{rank}/mindformers_rank_{rank}-{SUFFIX}.ckpt"
        )
        kept = [
            {"name": key, "data": val}
            for key, val in params.items()
            if not ("accu_grads" in key or "adam_" in key)
        ]
        Path(f"output/checkpoint_cleaned/rank_{rank}").mkdir(parents=True)
        ms.save_checkpoint(kept, f"output/checkpoint_cleaned/rank_{rank}/cleaned.ckpt")
    ms.transform_checkpoints(
        "output/checkpoint_cleaned",
        "output/checkpoint_combined",
        ckpt_prefix="combined_",
        src_strategy_file="output/merged.ckpt",
    )
    combined = Path("output/checkpoint_combined/rank_0/combined_0.ckpt")
    same_as_bloom(open_checkpoint(combined, trained), trained)


def test_ours_need_nothing_cleaned_or_combined(trained: Decoder) -> None:
    merge_strategies(Path("output/strategy"), Path("output/merged.ckpt"))
    for strategy in (Path("output/strategy"), Path("output/merged.ckpt")):
        shards = open_shards(Path("output/checkpoint"), trained, strategy)
        same_as_bloom(shards.whole(), trained)
