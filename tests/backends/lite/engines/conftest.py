"""Small graphs, as MindSpore writes them and as MindSpore Lite 2.0.0 reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def exported_mindir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x + y, x * x, i + i of float32 [2, 3] twice and int64 [2], in MindSpore's newest version."""
    import mindspore as ms
    from mindspore import nn, ops

    class Sums(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.add = ops.Add()
            self.mul = ops.Mul()

        def construct(self, x, y, i):  # type: ignore[no-untyped-def]
            return self.add(x, y), self.mul(x, x), self.add(i, i)

    path = tmp_path_factory.mktemp("mindir") / "exported.mindir"
    x = ms.Tensor(np.zeros((2, 3), np.float32))
    ms.export(
        Sums(), x, x, ms.Tensor(np.zeros(2, np.int64)), file_name=str(path), file_format="MINDIR"
    )
    return path


@pytest.fixture(scope="session")
def tiny_mindir(exported_mindir: Path) -> Path:
    """The same in the version that Lite 2.0.0 reads; these operators need no other change."""
    from mindspore.train import mind_ir_pb2

    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(exported_mindir.read_bytes())
    model.mind_ir_version = 1
    for primitive in model.primitives:
        primitive.prim_type = 1
    path = exported_mindir.with_name("tiny.mindir")
    path.write_bytes(model.SerializeToString())
    return path
