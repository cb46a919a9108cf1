"""Several cards from Python: their settings in a config, and scripts under msrun and in loops."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from lite_runner import (
    AutoConfig,
    AutoModel,
    TransformerOpParallelConfig,
    get_last_checkpoint,
    init_context,
)
from lite_runner.app import main
from lite_runner.distributed.rank_table import Device, RankTable, TableServer
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.weights.layouts import random_checkpoint
from tests.light_msrun import light_package
from tests.models import model_named
from tests.paths import ROOT

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
OPTIONS = {"max_new_tokens": 8, "do_sample": True, "top_k": 5, "seed": 3}
SCORED = {"max_new_tokens": 4, "logprobs": 2, "prompt_logprobs": 0, "return_dict_in_generate": True}
# As generate_custom.py of the documents: every rank runs it, and gets the whole result.
SCRIPT = f"""
import json, os, sys
import numpy as np
import mindspore as ms
from mindspore.train import Model
from lite_runner import get_last_checkpoint
from lite_runner import AutoConfig, AutoModel, ContextConfig, ParallelContextConfig, init_context
from lite_runner import TransformerOpParallelConfig

data, model = int(sys.argv[1]), int(sys.argv[2])
rank_id, device_num = init_context(
    use_parallel=True,
    context_config=ContextConfig(mode=0, device_target="CPU", device_id=0),
    parallel_config=ParallelContextConfig(
        parallel_mode="SEMI_AUTO_PARALLEL", gradients_mean=False, full_batch=True
    ),
)
for number, parts in enumerate(sys.argv[3:] or [""]):  # without LoRA, then with it
    config = AutoConfig.from_pretrained("tiny_llama")
    config.parallel_config = TransformerOpParallelConfig(data_parallel=data, model_parallel=model)
    if number == 1:  # as 003 has it, but for the commas
        pet_config = {{
            "pet_type": "lora",
            # configuration of lora
            "lora_rank": 16,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "target_modules": '.*wq|.*wk|.*wv|.*wo',
        }}
        config.checkpoint_name_or_path = None
        config.pet_config = pet_config
    network = AutoModel.from_config(config)
    if parts:  # load the part of this rank, as 003 and 004 do
        Model(network).infer_predict_layout(ms.Tensor(np.ones((1, config.seq_length)), ms.int32))
        checkpoint = get_last_checkpoint(os.path.join(parts, f"rank_{{rank_id}}"))
        assert ms.load_param_into_net(network, ms.load_checkpoint(checkpoint)) == ([], [])
    outputs = [
        network.generate({PROMPTS!r}, **{OPTIONS!r}),
        network.generate([[5, 6, 7]], max_new_tokens=9),
        network.generate({PROMPTS!r}, **{SCORED!r}),
    ]
    with open(f"{{['', 'lora_'][number]}}rank_{{rank_id}}.json", "w") as file:
        json.dump([rank_id, device_num, outputs], file)
if len(sys.argv) > 3 and rank_id == 1:
    raise ValueError("of rank 1")
if len(sys.argv) > 3:
    while True:  # it waits for rank 1 for good
        network.generate([[5, 6, 7]])
"""
LOOP = """
export RANK_TABLE_FILE=$1 RANK_SIZE=2
for((i=0; i<2; i++))
do
    export RANK_ID=$i DEVICE_ID=$i
    (python3 "${@:2}" &> rank_$RANK_ID.log; echo $? > rank_$RANK_ID.code) &
done
wait
"""


def test_parallel_config() -> None:
    config = AutoConfig.from_pretrained("tiny_llama")
    assert (config.parallel_config.data_parallel, config.parallel_config.model_parallel) == (1, 1)
    config.parallel_config = {"model_parallel": 2, "micro_batch_num": 4}
    assert config.parallel_config == TransformerOpParallelConfig(
        data_parallel=1, model_parallel=2, vocab_emb_dp=True, recompute=False
    )
    with pytest.raises(ConfigError, match="need 2 ranks, and this job has 1") as caught:
        AutoModel.from_config(config)
    assert "init_context(use_parallel=True)" in str(caught.value)
    for wrong, says in (
        ({"model_paralel": 2}, "did you mean model_parallel"),
        ({"data_parallel": 0}, "data_parallel: got 0"),
        (8, "got 8, expected a TransformerOpParallelConfig or a dict"),
    ):
        with pytest.raises(ConfigError, match=says):
            config.parallel_config = wrong


def test_several_cards_need_msrun() -> None:
    with pytest.raises(EnvironmentFault, match="one of several ranks") as caught:
        init_context(use_parallel=True)
    assert "msrun --worker_num=N" in str(caught.value)


def start(folder: Path, light: str, *command: str) -> subprocess.Popen[str]:
    folder.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": f"{light}{os.pathsep}{ROOT}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """Scripts under msrun and in a loop, at once: most of it is waiting."""
    base = tmp_path_factory.mktemp("ranks")
    (base / "script.py").write_text(SCRIPT)
    (base / "loop.sh").write_text(LOOP)
    table = base / "hccl_2p.json"
    devices = tuple(Device(number, f"192.168.0.{number}") for number in range(2))
    RankTable((TableServer("10.0.0.7", devices),)).write(table)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cut = base / "cut"
    cutting = [
        "run_mode=shard",
        "model=tiny_llama",
        "parallel=tp2",
        "seed=1",
        f"shard_output={cut}",
    ]
    assert main([*cutting, f"output_dir={base}"]) == 0
    with_lora(base / "lora", cut)
    msrun = ["msrun", "--worker_num=2", "--local_worker_num=2", "--join=True"]
    msrun += [f"--master_port={port}", "--log_dir=logs", "../script.py"]
    light = light_package(tmp_path_factory.mktemp("light"))
    running = {
        "dp": start(base / "dp", light, *msrun, "2", "1"),
        "mp": start(
            base / "mp",
            light,
            *("bash", "../loop.sh", str(table), "../script.py", "1", "2"),
            *(str(cut), str(base / "lora")),
        ),
    }
    return {name: (base / name, *finished(process)) for name, process in running.items()}


def with_lora(folder: Path, cut: Path) -> None:
    """`folder`: the two parts of `cut`, with LoRA as MindFormers cuts it; folder/whole.ckpt: the
    whole checkpoint with what A and B add to it."""
    model = model_named("tiny_llama")
    whole = {name: one.float32() for name, one in random_checkpoint(model, 1).items()}
    parts = [dict[str, np.ndarray]() for _ in range(2)]
    draw = np.random.default_rng(0).standard_normal
    for name in [one for one in whole if ".attention.w" in one]:
        outputs, inputs = whole[name].shape
        a, b = draw((16, inputs), np.float32) / 8, draw((outputs, 16), np.float32) / 8
        whole[name] = whole[name] + b @ a  # lora_alpha / lora_rank is 1
        start = f"{name.removesuffix('weight')}mindpet_delta_lora_"
        for rank, part in enumerate(parts):
            rows = name.endswith("wo.weight")  # cut along its inputs, the others their outputs
            part[f"{start}a"] = np.split(a, 2, axis=1)[rank] if rows else a
            part[f"{start}b"] = b if rows else np.split(b, 2)[rank]
    for rank, part in enumerate(parts):
        held = ms.load_checkpoint(get_last_checkpoint(cut / f"rank_{rank}"))
        save_ckpt(folder / f"rank_{rank}/checkpoint.ckpt", {**held, **part})
    save_ckpt(folder / "whole.ckpt", whole)


def save_ckpt(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    every = [{"name": name, "data": ms.Tensor(value)} for name, value in values.items()]
    ms.save_checkpoint(every, str(path))


@pytest.mark.parametrize("name", ["dp", "mp", "lora"])
def test_every_rank_is_given_what_one_process_makes(
    ranks: dict[str, tuple[Path, int, str]], name: str
) -> None:
    folder, code, output = ranks["mp" if name == "lora" else name]
    logs = [path.read_text() for path in folder.glob("*.log")]
    assert code == 0, (output, logs)
    loaded = {
        "dp": {},
        "mp": {"auto_trans_ckpt": True, "load_checkpoint": str(folder.parent / "cut")},
        "lora": {"load_checkpoint": str(folder.parent / "lora/whole.ckpt")},
    }
    model = AutoModel.from_pretrained("tiny_llama", **loaded[name])
    expected = [model.generate(PROMPTS, **OPTIONS), model.generate([[5, 6, 7]], max_new_tokens=9)]
    details = model.generate(PROMPTS, **SCORED)
    model.close()
    for rank in range(2):
        file = folder / f"{'lora_' if name == 'lora' else ''}rank_{rank}.json"
        found: list[Any] = json.loads(file.read_text())
        found_details = found[2].pop()
        assert found == [rank, 2, expected]
        assert found_details["sequences"] == details["sequences"]
        for key in ("logprobs", "prompt_logprobs"):
            assert numbers(found_details[key]) == pytest.approx(numbers(details[key]), abs=1e-4)


def numbers(rows: list[list[dict[str, Any] | None]]) -> list[float]:
    """All that log-probabilities say, in a row."""
    every = [one for row in rows for one in row if one is not None]
    return [
        value for one in every for value in (one["token"], one["logprob"], *np.ravel(one["top"]))
    ]


def test_a_rank_that_fails_ends_the_other(ranks: dict[str, tuple[Path, int, str]]) -> None:
    folder = ranks["mp"][0]
    assert [(folder / f"rank_{rank}.code").read_text() for rank in range(2)] == ["1\n", "1\n"]
    assert "ValueError: of rank 1" in (folder / "rank_1.log").read_text()
    assert "rank 1 has ended before its work was done" in (folder / "rank_0.log").read_text()
