"""MindSpore Lite in process, over the fake wheel of tests/fixtures/fake_lite.

The fake is held to the documentation by the table of signatures below.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, nn, ops

from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.engines.lite import LiteEngine, available
from lite_runner.backends.lite.ge import GeConfig, render
from lite_runner.backends.lite.layouts import StaticPairBackend
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault, RunnerError
from lite_runner.mindir.manifest import GraphName, Manifest
from tests.paths import FIXTURES

KEY = b"0123456789abcdef"
BATCH, LENGTH = 4, 48
SECTIONS = {"ascend_context": {"provider": "ge"}, "ge_session_options": {"ge.event": "notify"}}
NO_FILE = "(model_path, model_type, context=None, config_path=''"

# mindspore.cn/lite/api/en/<version>/mindspore_lite/mindspore_lite.<class>.html, without self.
DOCUMENTED = {
    ("2.0.0", "build_from_file_2_0"): NO_FILE + ")",
    ("2.3.1", "build_from_file_2_2"): NO_FILE + ", config_dict=None)",
    ("2.7.1", "Model._build_from_file"): NO_FILE
    + ", config_dict=None, dec_key=None, dec_mode='AES-GCM', dec_num_parallel=0)",
    ("2.7.1", "Model.get_inputs"): "()",
    ("2.7.1", "Model.predict"): "(inputs, outputs=None)",
    ("2.7.1", "Model.resize"): "(inputs, dims)",
    ("2.7.1", "ModelGroup.add_model"): "(models)",
    ("2.7.1", "ModelGroup.cal_max_size_of_workspace"): "(model_type, context)",
    ("2.7.1", "Tensor.__init__"): "(tensor=None, shape=None, dtype=None, device=None)",
    ("2.7.1", "Tensor.set_data_from_numpy"): "(numpy_obj)",
    ("2.7.1", "Tensor.get_data_to_numpy"): "()",
    ("2.7.1", "Context.__init__"): "()",
}

Make = Callable[..., LiteEngine]


@pytest.fixture
def lite(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The fake wheel, installed."""
    monkeypatch.syspath_prepend(str(FIXTURES / "fake_lite"))
    yield importlib.import_module("mindspore_lite")
    del sys.modules["mindspore_lite"]


def engine(graphs: dict[GraphName, Path], **options: Any) -> LiteEngine:
    device = "Ascend" if len(graphs) > 1 else "CPU"
    return LiteEngine(graphs, EngineOptions("lite", **{"device": device, **options}), "MINDIR")


class Count(nn.Cell):
    """x + 1 to a state of its own, the state as it was, not b, and j + j."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Parameter(ms.Tensor(np.zeros(2, np.float32)), "state", False)

    def construct(self, x, b, j):  # type: ignore[no-untyped-def]
        return ops.assign_add(self.state, x + 1), ops.logical_not(b), j + j


class Double(nn.Cell):
    def construct(self, x):  # type: ignore[no-untyped-def]
        return x + x


def write(folder: Path, stem: str, cell: nn.Cell, *inputs: ms.Tensor, **key: object) -> Path:
    ms.export(cell, *inputs, file_name=str(folder / stem), file_format="MINDIR", **key)
    return folder / f"{stem}.mindir"


def of_count() -> tuple[ms.Tensor, ...]:
    return ms.Tensor(np.zeros(2, "f4")), ms.Tensor(np.zeros(1, bool)), ms.Tensor(np.zeros(3, "i8"))


@pytest.fixture(scope="module")
def count(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("count"), "count", Count(), *of_count())


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = ms.Tensor(shape=[None, 2], dtype=ms.float32)
    return write(tmp_path_factory.mktemp("double"), "double", Double(), x)


@pytest.fixture(scope="module")
def artifact(
    exported_pair: Callable[..., tuple[Manifest, dict[GraphName, Path]]],
) -> Callable[[str], tuple[Manifest, dict[GraphName, Path]]]:
    return lambda case: exported_pair(case, BATCH, LENGTH, target="Ascend")


@pytest.mark.parametrize(("version", "name"), DOCUMENTED)
def test_the_fake_has_the_documented_signatures(lite: ModuleType, version: str, name: str) -> None:
    function = functools.reduce(getattr, name.split("."), lite)
    parameters = list(inspect.signature(function).parameters.values())
    shown = str(inspect.Signature(parameters[1:]))
    assert shown == DOCUMENTED[version, name]


def test_the_fake_has_the_documented_attributes_and_no_more(lite: ModuleType) -> None:
    context = lite.Context()
    for section, name in (("cpu", "threads"), ("ascend", "device"), ("ascend", "rank")):
        with pytest.raises(AttributeError):
            setattr(getattr(context, section), name, 1)
    with pytest.raises(AttributeError):
        context.device_id = 1
    with pytest.raises(ValueError, match=r"cpu.*gpu.*ascend"):
        context.target = ["npu"]
    assert [flag.name for flag in lite.ModelGroupFlag] == [
        *("SHARE_WEIGHT", "SHARE_WORKSPACE", "SHARE_WEIGHT_WORKSPACE")
    ]
    assert lite.ModelGroup().flags is lite.ModelGroupFlag.SHARE_WORKSPACE
    assert {kind.name: kind.value for kind in lite.ModelType} == {"MINDIR": 0, "MINDIR_LITE": 4}
    hidden = inspect.signature(lite.Model.build_from_file)
    assert str(hidden) == "(*args, **kwargs)"  # as in 2.7


@pytest.mark.parametrize("case", ["llama", "bloom"])
def test_a_pair_on_ascend_equals_transformers(
    case: str,
    lite: ModuleType,
    artifact: Callable[[str], tuple[Manifest, Any]],
    reference: Callable[[str], Any],
) -> None:
    manifest, graphs = artifact(case)
    backend = StaticPairBackend(manifest, engine(graphs))
    known = reference(case)
    got = known.run(backend)
    assert backend.info.engine == "lite"
    assert np.abs(got - known.logits).max() <= 1e-4 * np.abs(known.logits).max()
    assert not [call for call in lite.calls if call[0] == "resize"]
    backend.close()
    backend.close()


def test_everything_is_set_before_the_graphs_are_built(lite: ModuleType, count: Path) -> None:
    engine({"prefill": count, "increment": count}, device_id=3, rank_id=2)
    assert lite.calls[:5] == [
        ("add_model", "SHARE_WEIGHT", 2),
        ("target", ["ascend"]),
        ("ascend", "device_id", 3),
        ("ascend", "rank_id", 2),
        ("ascend", "provider", "ge"),
    ]
    build = ("build", "count.mindir", "MINDIR", "", "", None, None)
    assert lite.calls[5:] == [build, build]


def test_a_pair_shares_its_state_and_outputs_are_copies(lite: ModuleType, count: Path) -> None:
    pair = engine({"prefill": count, "increment": count})
    shapes = [(2,), (1,), (3,)]
    assert [spec.dtype for spec in pair.inputs["prefill"]] == ["float32", "bool", "int64"]
    assert pair.inputs["prefill"][0].name.endswith(":x")  # the real names have a prefix too
    for graph, (x, b, j) in (
        ("prefill", ([1, 2], True, [7, 8, 9])),
        ("increment", ([10, 20], False, [2**40, 0, 0])),
    ):
        for array, value in zip(pair.bind(graph, shapes), (x, b, j), strict=True):
            array[...] = value
    first = pair.run("prefill")
    second = pair.run("increment")
    third = pair.run("prefill")
    assert [one.tolist() for one in first] == [[2, 3], [False], [14, 16, 18]]
    assert [one.tolist() for one in second] == [[13, 24], [True], [2**41, 0, 0]]
    assert third[0].tolist() == [15, 27]
    assert pair.bind("prefill", shapes) is pair.bind("prefill", shapes)


def test_threads_of_the_cpu(lite: ModuleType, double: Path) -> None:
    engine({"model": double}, threads=3)
    engine({"model": double})
    everything = len(os.sched_getaffinity(0))
    assert [call for call in lite.calls if call[0] in ("cpu", "target")] == [
        ("target", ["cpu"]),
        ("cpu", "thread_num", 3),
        ("target", ["cpu"]),
        ("cpu", "thread_num", everything),
    ]


def test_a_graph_is_resized_when_its_shapes_change(lite: ModuleType, double: Path) -> None:
    model = engine({"model": double})
    with pytest.raises(RunnerError, match="was not bound"):
        model.run("model")
    for size in (3, 3, 5):
        (array,) = model.bind("model", [(size, 2)])
        array[...] = np.arange(2 * size).reshape(size, 2)
        assert np.array_equal(model.run("model")[0], 2 * array)
        array += 1
        assert np.array_equal(model.run("model")[0], 2 * array)
    assert [call[1] for call in lite.calls if call[0] == "resize"] == [[[3, 2]], [[5, 2]]]


def test_shapes_that_a_graph_does_not_take(lite: ModuleType, count: Path, double: Path) -> None:
    fixed = engine({"model": count})
    with pytest.raises(ArtifactError, match=r"cannot resize it .*the shape is fixed\n  -> "):
        fixed.bind("model", [(3,), (1,), (3,)])
    with pytest.raises(ArtifactError, match="has 3 inputs, expected 1"):
        fixed.bind("model", [(2,)])


def test_lite_that_does_not_resize(
    lite: ModuleType, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite.Model, "resize", lambda self, inputs, dims: None)
    with pytest.raises(ArtifactError, match=r"2\.7\.0 left .*x at \[-1, 2\] .* to \[3, 2\]"):
        engine({"model": double}).bind("model", [(3, 2)])


def test_ge_sections_go_in_a_dict(lite: ModuleType, count: Path) -> None:
    engine({"prefill": count, "increment": count}, ge=GeConfig(sections=SECTIONS))
    builds = [call for call in lite.calls if call[0] == "build"]
    assert [build[3:6] for build in builds] == [("", "", SECTIONS)] * 2


def test_ge_sections_go_in_a_file_where_there_is_no_dict(
    lite: ModuleType, count: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite.Model, "build_from_file", lite.build_from_file_2_0)
    engine({"prefill": count, "increment": count}, ge=GeConfig(sections=SECTIONS))
    text = "[ascend_context]\nprovider=ge\n\n[ge_session_options]\nge.event=notify\n"
    for build in (call for call in lite.calls if call[0] == "build"):
        assert build[4] == text
        assert not Path(str(build[3])).exists()  # it was for the build only


@pytest.mark.parametrize("names", [["a.ini"], ["a.ini", "b.ini"]])
def test_ge_files_are_passed_unchanged(
    lite: ModuleType, count: Path, tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n[ascend_context]\n")
    files = tuple(tmp_path / name for name in names)
    increment = tmp_path / "inc.mindir"
    increment.write_bytes(count.read_bytes())
    # The first file is the prefill's, in whatever order the graphs come.
    engine({"increment": increment, "prefill": count}, ge=GeConfig(files=files))
    builds = [call for call in lite.calls if call[0] == "build"]
    assert [build[1] for build in builds] == ["count.mindir", "inc.mindir"]
    assert [build[3] for build in builds] == [str(files[0]), str(files[-1])]
    assert all(build[5] is None for build in builds)


@pytest.mark.parametrize("given", ["sections", "files"])
@pytest.mark.parametrize("takes_dict", [True, False])
def test_a_rank_table_is_laid_over_them(
    lite: ModuleType,
    count: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    takes_dict: bool,
    given: str,
) -> None:
    """HCCL starts from [ascend_context] of the first graph, and GE by ge.exec.isUseHcom then."""
    if not takes_dict:
        monkeypatch.setattr(lite.Model, "build_from_file", lite.build_from_file_2_0)
    files = (tmp_path / "a.ini", tmp_path / "b.ini")
    for path in files:
        path.write_text(render(SECTIONS).replace("notify", path.stem))
    ge = GeConfig(sections=SECTIONS) if given == "sections" else GeConfig(files=files)
    pair = {"prefill": count, "increment": count}
    engine(pair, rank_id=1, ge=replace(ge, rank_table="/job/table.json"))
    builds = [call for call in lite.calls if call[0] == "build"]
    events = ["notify", "notify"] if given == "sections" else ["a", "b"]
    for build, event in zip(builds, events, strict=True):
        wanted = {
            "ascend_context": {"provider": "ge", "rank_table_file": "/job/table.json"},
            "ge_session_options": {"ge.event": event},
        }
        assert build[5] == wanted if takes_dict else build[4] == render(wanted)


@pytest.mark.parametrize("given", ["sections", "files"])
def test_a_wheel_that_takes_no_ge_options_so(
    lite: ModuleType, count: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Neither a dict nor a file; a dict alone, which no file can be given in."""

    def neither(self: object, model_path: str, model_type: object, context: object) -> None: ...
    def dict_alone(
        self: object, model_path: str, model_type: object, context: object, config_dict: object
    ) -> None: ...

    ini = tmp_path / "a.ini"
    ini.write_text("[ascend_context]\n")
    ge = GeConfig(sections=SECTIONS) if given == "sections" else GeConfig(files=(ini,))
    build = neither if given == "sections" else dict_alone
    monkeypatch.setattr(lite.Model, "build_from_file", build)
    with pytest.raises(EnvironmentFault, match="takes no GE options"):
        engine({"prefill": count, "increment": count}, ge=ge)
    assert not [call for call in lite.calls if call[0] == "build"]


def test_ge_options_that_do_not_fit(lite: ModuleType, count: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only on Ascend, not on CPU"):
        engine({"model": count}, ge=GeConfig(sections=SECTIONS))
    pair = GeConfig(files=(tmp_path / "a", tmp_path / "b"))
    with pytest.raises(ConfigError, match="2 files for 1 graph"):
        engine({"model": count}, device="Ascend", ge=pair)


def test_an_encrypted_model(lite: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path, "locked", Count(), *of_count(), enc_key=KEY, enc_mode="AES-GCM")
    model = engine({"model": path}, key=KEY)
    assert lite.calls[-1][-1] == KEY
    model.bind("model", [(2,), (1,), (3,)])[0][...] = 4
    assert model.run("model")[0].tolist() == [5, 5]
    with pytest.raises(ArtifactError, match="cannot load it with this key"):
        engine({"model": path}, key=b"fedcba9876543210")


def test_a_wheel_that_cannot_decrypt(
    lite: ModuleType, count: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite.Model, "build_from_file", lite.build_from_file_2_2)
    with pytest.raises(EnvironmentFault, match=r"MindSpore Lite 2\.7\.0 cannot read encrypted"):
        engine({"model": count}, key=KEY)
    engine({"prefill": count, "increment": count}, ge=GeConfig(sections=SECTIONS))
    assert lite.calls[-1][5] == SECTIONS


@pytest.mark.parametrize("missing", ["ModelGroup", "ModelGroupFlag"])
def test_a_wheel_without_groups(
    lite: ModuleType, count: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delattr(lite, missing)
    with pytest.raises(EnvironmentFault, match="no ModelGroup with SHARE_WEIGHT"):
        engine({"prefill": count, "increment": count})
    engine({"model": count}, device="Ascend")  # one graph needs none


def test_a_group_that_refuses_its_models(
    lite: ModuleType, count: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(group: object, models: list[object]) -> None:
        raise RuntimeError("ModelGroup's add model failed.")

    monkeypatch.setattr(lite.ModelGroup, "add_model", refuse)
    with pytest.raises(EnvironmentFault, match=r"share weights: ModelGroup's add model failed\."):
        engine({"prefill": count, "increment": count})


def test_a_wheel_without_ranks(
    lite: ModuleType, count: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older(lite.Context):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.ascend = lite._Settings("ascend", device_id=int, precision_mode=str)

    monkeypatch.setattr(lite, "Context", Older)
    with pytest.raises(EnvironmentFault, match=r"no context\.ascend\.rank_id, .*provider"):
        engine({"model": count}, device="Ascend")


def test_a_wheel_that_is_too_old_for_a_graph(
    lite: ModuleType, count: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(self: Any, *given: Any) -> None:
        raise RuntimeError("build_from_file failed! Error is Common error code.")

    monkeypatch.setattr(lite.Model, "build_from_file", build)
    with pytest.raises(ArtifactError, match="cannot load it: build_from_file failed"):
        engine({"model": count})
    monkeypatch.setattr(lite, "__version__", "2.2.14")
    with pytest.raises(EnvironmentFault, match=r"MindIR version 3, but .* at most version 1"):
        engine({"model": count})


def test_a_pair_on_the_cpu(lite: ModuleType, count: Path) -> None:
    with pytest.raises(EnvironmentFault, match="on Ascend only") as caught:
        engine({"prefill": count, "increment": count}, device="CPU")
    assert "engine=graph-cell" in caught.value.hint


def test_a_machine_without_ascend(
    lite: ModuleType, count: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object, target: list[str]) -> None:
        raise RuntimeError("libascendcl.so is not found\n stack")

    monkeypatch.setattr(lite.Context, "target", property(lambda self: [], fails))
    with pytest.raises(EnvironmentFault, match=r"for Ascend: libascendcl\.so is not found\n  -> "):
        engine({"model": count}, device="Ascend")


def test_library_errors_are_reported_in_one_line(
    lite: ModuleType, count: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.mindir"
    broken.write_bytes(b"no MindIR")
    with pytest.raises(ArtifactError, match=r"broken\.mindir: MindSpore Lite 2\.7\.0 cannot load"):
        engine({"model": broken})
    with pytest.raises(ArtifactError, match="no such file"):
        engine({"model": tmp_path / "absent.mindir"})
    model = engine({"model": count})
    model.bind("model", [(2,), (1,), (3,)])

    def fails(self: object, inputs: object, outputs: object = None) -> None:
        raise RuntimeError("predict failed!\n#0 in a stack of C++")

    monkeypatch.setattr(lite.Model, "predict", fails)
    with pytest.raises(ArtifactError, match=r"cannot run it: predict failed!\n  -> "):
        model.run("model")


def test_a_dtype_that_numpy_has_not(
    lite: ModuleType, count: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite.Tensor, "dtype", property(lambda self: lite.DataType.UNKNOWN))
    with pytest.raises(ArtifactError, match="cannot use an input"):
        engine({"model": count})


def test_looking_for_a_wheel_does_not_import_it() -> None:
    """In a process of its own: here MindSpore is imported already."""
    code = (
        "import sys\n"
        "from lite_runner.backends.lite.engines.lite import available\n"
        "imported = {'mindspore', 'mindspore_lite'} & sys.modules.keys()\n"
        "print(available(), sorted(imported))\n"
    )
    for path, found in (("", "False []"), (str(FIXTURES / "fake_lite"), "True []")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": f"{FIXTURES.parents[1]}:{path}"},
            capture_output=True,
            encoding="utf-8",
        )
        assert done.stdout.strip() == found, done.stderr


def test_no_wheel(count: Path) -> None:
    assert not available()
    with pytest.raises(EnvironmentFault, match="does not import in this Python"):
        engine({"model": count})
