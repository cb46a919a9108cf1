"""Memory of cutting a checkpoint into shards, and of merging them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.weights.layouts import expected_tensors
from tests.paths import ROOT
from tests.sizes import resized

Configs = Mapping[str, Decoder]

# Cuts a safetensors file of zeros that takes no room on the disk, and says how much it held.
HELD = """
import sys
from pathlib import Path
from lite_runner.config.ranks import Ranks
from lite_runner.weights.sharding.reshard import whole_tensors
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
