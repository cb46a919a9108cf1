"""Writing shards: memory, errors, and complete folders."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.system import files
from lite_runner.weights import LazyTensor
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.sharding import shard_writer
from lite_runner.weights.sharding.shard_writer import Cutting, write_shards
from lite_runner.weights.sharding.shards import whole_tensors
from tests.paths import ROOT
from tests.sizes import resized
from tests.weights.sharding.test_shards import cut

Configs = Mapping[str, Decoder]
Values = Callable[..., dict[str, LazyTensor]]
Same = Callable[..., None]

# Cuts a safetensors file of zeros that takes no room on the disk, and says how much it held.
HELD = """
import sys
from pathlib import Path
from lite_runner.config.sections import Ranks
from lite_runner.weights.sharding.shards import whole_tensors
from lite_runner.weights.sharding.shard_writer import Cutting, write_shards
sys.path.insert(0, {tests!r})
from conftest import CONFIGS
from tests.sizes import resized
model = resized(CONFIGS["llama"], vocab_size=4096, hidden_size=2048, intermediate_size=8192)
def held():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10
for before, after, tensor in ((Path("x.safetensors"), Path("2"), 2), (Path("2"), Path("4"), 4)):
    tensors = whole_tensors(before, model)
    cutting = Cutting.of_model(model, Ranks(0, 1, tensor), "ckpt", vocab_parallel=True)
    if tensor == 2:
        print(sum(one.nbytes for one in tensors.values()) >> 20, held())
    write_shards(after, tensors, cutting, extra={{}}, workers=2, overwrite=False,
                 advance=lambda size: None)
print(held())
"""


def test_memory_is_bounded_by_little_not_by_the_model(tmp_path: Path, configs: Configs) -> None:
    sizes = {"vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 8192}
    shapes = expected_tensors(resized(configs["llama"], **sizes))
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    done = subprocess.run(
        [sys.executable, "-c", HELD.format(tests=str(ROOT / "tests/weights"))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    (model, before), after = map(int, first.split()), int(last)
    assert model > 400 and max(math.prod(shape) for shape in shapes.values()) * 4 == 64 << 20
    assert after - before < 64, f"{after - before} MiB held for a model of {model} MiB"


class TestWriting:
    """A written folder is complete or untouched."""

    def test_an_existing_folder_is_kept_unless_overwritten(
        self, tmp_path: Path, configs: Configs, values: Values, same: Same
    ) -> None:
        model = configs["gpt2"]
        folder = cut(tmp_path / "x", values(model), model, 2)
        with pytest.raises(ConfigError, match="exists already"):
            cut(folder, values(model), model, 4)
        (folder / "note.txt").touch()
        cut(folder, values(model, seed=1), model, 4, overwrite=True)
        same(whole_tensors(folder, model), values(model, seed=1))
        assert {path.name for path in folder.iterdir()} == {
            *(f"rank_{rank}" for rank in range(4)),
            "strategy",
        }
        assert [path.name for path in tmp_path.iterdir()] == ["x"]

    def test_a_failing_source_leaves_the_old_one(
        self, tmp_path: Path, configs: Configs, values: Values, same: Same
    ) -> None:
        model = configs["gpt2"]
        folder = cut(tmp_path / "x", values(model), model, 2)

        def fail() -> Any:
            raise ArtifactError("the source is broken")

        broken = values(model, seed=1)
        name = list(broken)[-3]
        broken[name] = LazyTensor(broken[name].shape, "F32", fail)
        with pytest.raises(ArtifactError, match="the source is broken"):
            cut(folder, broken, model, 4, overwrite=True)
        same(whole_tensors(folder, model), values(model))
        assert [path.name for path in tmp_path.iterdir()] == ["x"]

    def test_a_disk_that_is_too_small(
        self, tmp_path: Path, configs: Configs, values: Values, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = configs["gpt2"]
        usage = shutil.disk_usage(tmp_path)._replace(free=5 << 20)
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
        cut(tmp_path / "fits", values(model), model, 2)

        def read() -> Any:
            raise AssertionError("nothing may be read")

        large = {name: replace(tensor, read=read) for name, tensor in values(model).items()}
        with pytest.raises(EnvironmentFault, match="the disk is too small: 5 MiB free, 9 MiB"):
            cut(tmp_path / "x", large, model, 2, 4)
        assert [path.name for path in tmp_path.iterdir()] == ["fits"]

    def test_rank_by_rank(
        self, tmp_path: Path, configs: Configs, values: Values, same: Same
    ) -> None:
        model = configs["llama"]
        source = values(model)
        at_once = cut(tmp_path / "at_once", source, model, 4)
        folder = tmp_path / "x"
        for rank in (2, 0, 3, 1):
            cut(folder, source, model, 4, only_rank=rank)
        found, expected = (
            {path.relative_to(top): path.read_bytes() for path in top.rglob("*") if path.is_file()}
            for top in (folder, at_once)
        )
        assert found == expected
        with pytest.raises(ConfigError, match="rank_1: exists already"):
            cut(folder, source, model, 4, only_rank=1)
        with pytest.raises(ConfigError, match=r"of another set \(tp=4 dp=1\)"):
            cut(folder, source, model, 2, 2, only_rank=1, overwrite=True)

    def test_written_bytes_are_counted_of_tensors_without_slices(
        self, tmp_path: Path, configs: Configs, values: Values
    ) -> None:
        model = configs["gpt2"]
        counted: list[int] = []
        cutting = Cutting.of_model(model, Ranks(0, 1, 2), "ckpt", vocab_parallel=True)
        source = values(model)  # none of which has cheap parts
        write_shards(
            tmp_path / "x",
            source,
            cutting,
            extra={},
            workers=1,
            overwrite=False,
            advance=counted.append,
        )
        held = [cutting.of_rank(rank, source).values() for rank in range(2)]
        assert sum(counted) == sum(tensor.nbytes for some in held for tensor in some)

    def test_files_beside(self, tmp_path: Path, configs: Configs, values: Values) -> None:
        model = configs["gpt2"]
        cut(tmp_path / "x", values(model), model, 2, extra={"tokenizer.json": b"{}"})
        assert (tmp_path / "x/tokenizer.json").read_bytes() == b"{}"

    def test_a_system_that_cannot_swap_folders(
        self,
        tmp_path: Path,
        configs: Configs,
        values: Values,
        same: Same,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
        model = configs["gpt2"]
        cut(tmp_path / "x", values(model), model, 2)
        cut(tmp_path / "x", values(model, seed=1), model, 2, overwrite=True)
        same(whole_tensors(tmp_path / "x", model), values(model, seed=1))
        assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_nothing_is_read_once_a_writer_has_failed() -> None:
    stop, sizes = threading.Event(), []
    tensors = {"a": LazyTensor((3,), "F32", lambda: np.ones(3, np.float32))}
    counted = shard_writer._counted(tensors, sizes.append, stop)
    counted["a"].read()
    stop.set()
    with pytest.raises(shard_writer._Stopped):
        counted["a"].read()
    assert sizes == [12]
