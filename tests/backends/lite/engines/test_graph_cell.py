"""MindIR in MindSpore's own runtime: shared Parameters, bound arrays, files that do not load."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.engines.graph_cell import GraphCellEngine
from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import Graph, GraphName, TensorSpec

KEY = b"0123456789abcdef"


class Store(nn.Cell):
    """Adds its input to a state, and answers with the state."""

    def __init__(self, factor: float, size: int = 2) -> None:
        super().__init__()
        self.state = Parameter(Tensor(np.zeros(size, np.float32)), "state", False)
        self.factor = factor

    def construct(self, x: Tensor) -> Tensor:
        return ops.assign_add(self.state, x * self.factor)


def write(folder: Path, stem: str, cell: nn.Cell, shape: list[int | None], **key: object) -> Path:
    ms.export(
        cell,
        Tensor(shape=shape, dtype=ms.float32) if None in shape else Tensor(np.zeros(shape, "f4")),
        file_name=str(folder / stem),
        file_format="MINDIR",
        **key,
    )
    return folder / f"{stem}.mindir"


def engine(paths: dict[GraphName, Path], shape: tuple[int, ...] = (2,), **options: object):
    spec = (TensorSpec("x", shape, "float32"),)
    specs = {name: Graph(path.name, spec, spec) for name, path in paths.items()}
    return GraphCellEngine(paths, specs, EngineOptions("graph-cell", **options))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plain"), "plain", Store(1.0), [2])


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("locked")
    return write(folder, "locked", Store(1.0), [2], enc_key=KEY, enc_mode="AES-GCM")


def test_two_graphs_share_their_parameters_both_ways(plain: Path, tmp_path: Path) -> None:
    pair = engine({"prefill": plain, "increment": write(tmp_path, "tenfold", Store(10.0), [2])})
    for graph in ("prefill", "increment"):
        pair.bind(graph, [(2,)])[0][...] = [1, 2]
    states = [
        pair.run(graph)[0].tolist() for graph in ("prefill", "increment", "prefill", "increment")
    ]
    assert states == [[1, 2], [11, 22], [12, 24], [22, 44]]


def test_graphs_of_different_exports_are_refused(plain: Path, tmp_path: Path) -> None:
    other = write(tmp_path, "other", Store(1.0, size=3), [3])
    with pytest.raises(ArtifactError, match=r"state is .*\(3,\).*\(2,\).*not of one export"):
        engine({"prefill": plain, "increment": other})


def test_bound_arrays_stay_until_the_shapes_change(tmp_path: Path) -> None:
    class Double(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return x + x

    model = engine({"model": write(tmp_path, "double", Double(), [None])}, (-1,))
    for size in (2, 5, 1):
        (array,) = model.bind("model", [(size,)])
        array[...] = np.arange(size)
        first = model.run("model")[0]
        array += 1  # seen by the next run, though MindSpore may hold the first one's tensor
        assert model.bind("model", [(size,)])[0] is array
        second = model.run("model")[0]
        assert np.array_equal(first, 2 * np.arange(size))
        assert np.array_equal(second, 2 * np.arange(size) + 2)
    model.close()
    model.close()


def test_an_encrypted_file_opens_with_its_key(locked: Path) -> None:
    model = engine({"model": locked}, key=KEY)
    model.bind("model", [(2,)])[0][...] = 3
    assert model.run("model")[0].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("key", "message"), [(None, "without a key"), (b"fedcba9876543210", "with this key")]
)
def test_an_encrypted_file_without_its_key(locked: Path, key: bytes | None, message: str) -> None:
    with pytest.raises(ArtifactError, match=f"encrypted, and does not open {message}") as caught:
        engine({"model": locked}, key=key)
    assert "enc_key" in caught.value.hint


def test_a_key_for_a_file_that_has_none(plain: Path) -> None:
    with pytest.raises(ArtifactError, match="not a MindIR encrypted"):
        engine({"model": plain}, key=KEY)


def test_another_version_of_mindir(plain: Path, tmp_path: Path) -> None:
    model = ModelProto()
    model.ParseFromString(plain.read_bytes())
    model.mind_ir_version = 9
    newer = tmp_path / "newer.mindir"
    newer.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="support the mind ir version: 9") as caught:
        engine({"model": newer})
    assert "Call Stack" not in caught.value.message


@pytest.mark.parametrize("content", [b"", b"no MindIR" * 100, None], ids=["empty", "other", "cut"])
def test_a_broken_file(plain: Path, tmp_path: Path, content: bytes | None) -> None:
    broken = tmp_path / "broken.mindir"
    broken.write_bytes(plain.read_bytes()[:200] if content is None else content)
    with pytest.raises(ArtifactError, match=r"broken\.mindir: MindSpore .* cannot load it"):
        engine({"model": broken})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file"):
        engine({"model": tmp_path / "absent.mindir"})


def test_inputs_that_the_graph_does_not_take(plain: Path) -> None:
    model = engine({"model": plain})
    model.bind("model", [(3,)])
    with pytest.raises(ArtifactError, match=r"plain\.mindir: MindSpore .* cannot run it"):
        model.run("model")


def test_a_library_that_a_graph_names_is_not_loaded(plain: Path, tmp_path: Path) -> None:
    model = ModelProto.FromString(plain.read_bytes())
    model.primitives[0].attribute.add(name="func_type")  # as ops.Custom has it
    path = tmp_path / "custom.mindir"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="contains custom operators"):
        engine({"model": path})
