"""The worker engine: with the true MindSpore Lite, and with stand-ins that misbehave."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from lite_runner.backends.lite.engines import worker
from lite_runner.backends.lite.engines.lite_release import convert_to_ms
from lite_runner.backends.lite.engines.worker import WorkerEngine
from lite_runner.errors import ArtifactError, EnvironmentFault, RunnerError

SHAPES = [(4, 3), (4, 3), (5,)]

# lite_worker.py itself, in this Python, over a Lite that returns its only input.
STAND_IN = """
import enum, os, runpy, signal, sys, time, types

def act(what):
    if what == "chatter":
        print("[WARNING] a library says something", flush=True)
        os.write(1, b"and again")
    if what == "refuse":
        raise RuntimeError("not such a one")
    if what == "die":
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(3)
    if what == "hang":
        while True:
            time.sleep(60)

class DataType(enum.Enum):
    FLOAT32 = 43

class Tensor:
    name, dtype, shape = "x", DataType.FLOAT32, [2, 3]
    def set_data_from_numpy(self, array):
        self.array = array
    def get_data_to_numpy(self):
        return self.array

class Model:
    def __init__(self):
        self.tensors = [Tensor()]
    def build_from_file(self, path, kind, context):
        act({load!r})
    def get_inputs(self):
        return self.tensors
    def resize(self, tensors, shapes):
        act({resize!r})
        if {resize!r} != "ignore":
            tensors[0].shape = shapes[0]
    def predict(self, tensors):
        act({run!r})
        return tensors

lite = types.ModuleType("mindspore_lite")
lite.Model = Model
lite.ModelType = types.SimpleNamespace(MINDIR=0, MINDIR_LITE=1)
lite.Context = lambda: types.SimpleNamespace(cpu=types.SimpleNamespace())
sys.modules["mindspore_lite"] = lite
act({start!r})
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""

Engine = Callable[..., WorkerEngine]


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def python_that_runs(folder: Path, program: str) -> Path:
    """A "Lite Python" that always runs `program`; it gets both scripts."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    return script(folder / "python", f'exec "{sys.executable}" "{folder}/program.py" "$3" "$4"\n')


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Engine]:
    """`stand_in(run="hang")` is an engine over a Lite that hangs in predict, and so on."""
    engines = []
    model = tmp_path / "model.mindir"
    model.touch()

    def start(**behaviour: str) -> WorkerEngine:
        acts = {name: behaviour.get(name, "") for name in ("start", "load", "resize", "run")}
        python = python_that_runs(tmp_path, STAND_IN.format(**acts))
        engines.append(WorkerEngine({"model": model}, threads=1, python=python))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_a_python_that_cannot_be_started_leaves_no_files_open(tmp_path: Path) -> None:
    model = tmp_path / "model.mindir"
    model.touch()
    gc.collect()
    before = psutil.Process().num_fds()
    with pytest.raises(EnvironmentFault, match="cannot be started"):
        WorkerEngine({"model": model}, threads=1, python=tmp_path / "no python")
    gc.collect()
    assert psutil.Process().num_fds() == before


@pytest.fixture(scope="module")
def lite(lite_python: Path, tiny_mindir: Path) -> Iterator[WorkerEngine]:
    engine = WorkerEngine(
        {"prefill": tiny_mindir, "increment": tiny_mindir}, threads=2, python=lite_python
    )
    yield engine
    engine.close()


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ends(pid: int, seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def check(engine: WorkerEngine, graph: str, shapes: list[tuple[int, ...]]) -> None:
    """Run the tiny graph on random numbers and compare with NumPy."""
    generator = np.random.default_rng(len(shapes[0]))
    arrays = engine.bind(graph, shapes)  # type: ignore[arg-type]
    for array in arrays:
        array[...] = generator.integers(-9, 9, array.shape)
    x, y, i = arrays
    before = [array.copy() for array in arrays]
    outputs = engine.run(graph)  # type: ignore[arg-type]
    for output, expected in zip(outputs, (x + y, x * x, i + i), strict=True):
        np.testing.assert_array_equal(output, expected)
        assert output.dtype == expected.dtype
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)  # a run does not write to its inputs


def test_lite_computes_on_shared_memory(lite: WorkerEngine) -> None:
    check(lite, "prefill", SHAPES)
    arrays = lite.bind("prefill", SHAPES)
    assert arrays is lite.bind("prefill", SHAPES)
    arrays[0][0, 0] = 7
    assert lite.run("prefill")[1][0, 0] == 49  # no bind is needed to see what changed


def test_int64_inputs_are_int32(lite: WorkerEngine) -> None:
    assert [spec.dtype for spec in lite.inputs["prefill"]] == ["float32", "float32", "int32"]
    assert [array.dtype.name for array in lite.bind("prefill", SHAPES)][2] == "int32"
    assert [spec.name for spec in lite.inputs["prefill"]] == ["x", "y", "i"]


def test_shapes_grow_and_shrink(lite: WorkerEngine) -> None:
    for rows in (1, 700, 3, 5000, 1):
        check(lite, "prefill", [(rows, 3), (rows, 3), (rows,)])
    assert all(not array.any() for array in lite.bind("prefill", [(9, 9), (9, 9), (9,)]))


def test_graphs_are_bound_each_by_itself(lite: WorkerEngine) -> None:
    check(lite, "prefill", [(64, 2), (64, 2), (64,)])
    prefill = lite.bind("prefill", [(64, 2), (64, 2), (64,)])[0]
    expected = prefill.copy()
    check(lite, "increment", [(1, 2), (1, 2), (1,)])
    check(lite, "increment", [(6, 3), (6, 3), (6,)])
    np.testing.assert_array_equal(prefill, expected)
    np.testing.assert_array_equal(lite.run("prefill")[1], expected * expected)


def test_other_inputs_than_the_graph_takes(lite: WorkerEngine) -> None:
    with pytest.raises(ArtifactError, match="has 3 inputs, expected 2") as caught:
        lite.bind("prefill", SHAPES[:2])
    assert "export the model again" in caught.value.hint
    for wrong in ((4, 3, 1), (4, 0)):
        with pytest.raises(ArtifactError, match="input x of shape"):
            lite.bind("prefill", [wrong, *SHAPES[1:]])


def test_shapes_that_lite_refuses(lite: WorkerEngine) -> None:
    with pytest.raises(ArtifactError, match=r"resizing tiny\.mindir.*MindSpore Lite"):
        lite.bind("prefill", [(4, 3), (5, 7), (2,)])
    check(lite, "prefill", SHAPES)  # and it is there for others


def test_arrays_stay_readable_after_the_end(lite_python: Path, tiny_mindir: Path) -> None:
    engine = WorkerEngine({"model": tiny_mindir}, threads=None, python=lite_python)
    x = engine.bind("model", SHAPES)[0]
    x[...] = 3
    (_, product, _) = engine.run("model")
    engine.close()
    engine.close()
    assert not is_running(engine.pid)
    assert (x == 3).all() and (product == 9).all()
    with pytest.raises(RunnerError, match="already closed"):
        engine.run("model")
    with pytest.raises(RunnerError, match="already closed"):
        engine.bind("model", [(1, 1), (1, 1), (1,)])


def test_converted_models(lite_python: Path, tiny_mindir: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny.ms"
    convert_to_ms(tiny_mindir, model, weight_fp16=False)
    engine = WorkerEngine({"model": model}, threads=1, python=lite_python)
    check(engine, "model", SHAPES)
    engine.close()


def test_a_mindir_of_another_version(lite_python: Path, exported_mindir: Path) -> None:
    with pytest.raises(EnvironmentFault, match="this MindSpore Lite reads at most") as caught:
        WorkerEngine({"model": exported_mindir}, threads=1, python=lite_python)
    assert f"{exported_mindir}: MindIR version 3" in caught.value.message
    assert "MindSpore Lite 2.6 or newer" in caught.value.hint


@pytest.mark.parametrize("suffix", ["mindir", "ms"])
def test_a_file_that_is_no_model(lite_python: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"some.{suffix}"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(ArtifactError, match=f"loading {path}"):
        WorkerEngine({"model": path}, threads=1, python=lite_python)
    with pytest.raises(ArtifactError, match="no such file"):
        WorkerEngine({"model": tmp_path / "none.ms"}, threads=1, python=lite_python)


def test_a_python_without_lite(tiny_mindir: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="No module named 'mindspore_lite'") as caught:
        WorkerEngine({"model": tiny_mindir}, threads=1, python=Path(sys.executable))
    assert "make lite" in caught.value.hint
    broken = script(tmp_path / "python", "").with_name("python")
    broken.write_text("#!/no/such/interpreter\n")
    with pytest.raises(EnvironmentFault, match="cannot be started"):
        WorkerEngine({"model": tiny_mindir}, threads=1, python=broken)


def test_chatter_on_stdout_is_not_taken_for_an_answer(stand_in: Engine) -> None:
    engine = stand_in(load="chatter", resize="chatter", run="chatter")
    (x,) = engine.bind("model", [(2, 5)])
    x[...] = 4
    for _ in range(3):
        assert (engine.run("model")[0] == 4).all()


@pytest.mark.parametrize(
    ("behaviour", "error", "words"),
    [
        ({"start": "die"}, EnvironmentFault, "importing mindspore_lite.*killed by SIGKILL"),
        ({"start": "exit"}, EnvironmentFault, "importing mindspore_lite.*exit code 3"),
        ({"load": "die"}, EnvironmentFault, r"loading .*/model\.mindir: .*killed by SIGKILL"),
        ({"load": "refuse"}, ArtifactError, r"loading .*/model\.mindir: .*not such a one"),
    ],
)
def test_a_worker_that_fails_at_the_start(
    stand_in: Engine, behaviour: dict[str, str], error: type[RunnerError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        stand_in(**behaviour)
    assert type(caught.value) is error
    assert ("the last words" in caught.value.message) == ("die" in behaviour.values())


@pytest.mark.parametrize(
    ("run", "words"), [("die", "was killed by SIGKILL"), ("exit", "ended with exit code 3")]
)
def test_a_worker_that_dies_in_a_run(stand_in: Engine, run: str, words: str) -> None:
    engine = stand_in(run=run)
    engine.bind("model", [(2, 5)])
    with pytest.raises(RunnerError, match=rf"running model\.mindir: MindSpore Lite {words}"):
        engine.run("model")
    with pytest.raises(RunnerError, match="already closed"):
        engine.run("model")


@pytest.mark.parametrize("where", ["start", "load", "resize", "run"])
def test_a_worker_that_hangs(stand_in: Engine, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    limits = {"start": "START_SECONDS", "load": "LOAD_SECONDS", "run": "RUN_SECONDS"}
    if where != "resize":
        monkeypatch.setattr(worker, limits[where], 0.3)
    with pytest.raises(RunnerError, match=r"gave no answer in 0\.3 s"):
        engine = stand_in(**{where: "hang"})
        monkeypatch.setattr(worker, "LOAD_SECONDS", 0.3)
        engine.bind("model", [(2, 5)])
        engine.run("model")
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "program.py" in " ".join(child.cmdline())]


def test_refusals_leave_the_worker_there(stand_in: Engine) -> None:
    engine = stand_in(run="refuse")
    engine.bind("model", [(2, 5)])
    for _ in range(2):
        with pytest.raises(RunnerError, match="failed: not such a one"):
            engine.run("model")
    engine.ping()


def test_a_resize_that_does_nothing(stand_in: Engine) -> None:
    engine = stand_in(resize="ignore")
    with pytest.raises(ArtifactError, match=r"resizing model\.mindir to \[\(9, 5\)\]"):
        engine.bind("model", [(9, 5)])
    with pytest.raises(RunnerError, match="not bound"):
        engine.run("model")


ANSWER = """
import json, struct, sys
while sys.stdin.buffer.read(4):
    sys.stdin.buffer.read1(1 << 16)
    body = {body!r}
    sys.stdout.buffer.write(struct.pack("<I", len(body)) + body)
    sys.stdout.buffer.flush()
"""
SPEC = '"name": "x", "shape": [2], "dtype": "float32"'


@pytest.mark.parametrize(
    "program",
    [
        "print('Welcome to this shell, dear user.', flush=True); import time; time.sleep(60)",
        ANSWER.format(body=b"{"),
        ANSWER.format(body=b"\xff\xfe"),
        ANSWER.format(body=b"[1]"),
        ANSWER.format(body=b'{"answer": 5}'),
        ANSWER.format(body=b'{"answer": {"inputs": [{}]}}'),
        ANSWER.format(body=b'{"answer": {"inputs": [{"name": 1, "shape": "x", "dtype": "i4"}]}}'),
    ],
)
def test_a_worker_that_answers_garbage(tmp_path: Path, program: str) -> None:
    python = python_that_runs(tmp_path, program)
    with pytest.raises(RunnerError, match=r"invalid (answer|inputs)"):
        WorkerEngine({"model": python}, threads=1, python=python)


@pytest.mark.parametrize(
    "outputs",
    [
        "",  # not described
        ', "outputs": [{"shape": [2], "dtype": "float32", "offset": 4000000}]',
        ', "outputs": [{"shape": [2], "dtype": "float32", "offset": -8}]',
        ', "outputs": [{"shape": [-2], "dtype": "float32", "offset": 0}]',
        ', "outputs": [{"shape": [2], "dtype": "object", "offset": 0}]',
        ', "outputs": [{"shape": [2], "dtype": "float33", "offset": 0}]',
        ', "outputs": [{"shape": [2], "dtype": "float32"}]',
    ],
)
def test_outputs_that_cannot_be(tmp_path: Path, outputs: str) -> None:
    body = f'{{"answer": {{"inputs": [{{{SPEC}}}]{outputs}}}}}'
    python = python_that_runs(tmp_path, ANSWER.format(body=body.encode()))
    engine = WorkerEngine({"model": python}, threads=1, python=python)
    engine.bind("model", [(2,)])
    with pytest.raises(RunnerError, match="returned invalid outputs"):
        engine.run("model")
    assert not is_running(engine.pid)


def test_ctrl_c_does_not_reach_it(lite: WorkerEngine) -> None:
    assert os.getpgid(lite.pid) != os.getpgid(0)
    os.kill(lite.pid, signal.SIGINT)
    check(lite, "prefill", SHAPES)


def test_ctrl_c_while_waiting_ends_it(stand_in: Engine) -> None:
    engine = stand_in(run="hang")
    engine.bind("model", [(2, 5)])
    # As lite_runner.system.signals passes a Ctrl-C on; SIGINT itself may be MindSpore's here.
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.run("model")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_running(engine.pid)


def test_it_outlives_the_thread_that_made_it(stand_in: Engine) -> None:
    engines: list[WorkerEngine] = []
    thread = threading.Thread(target=lambda: engines.append(stand_in()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    engines[0].ping()


def test_a_forgotten_engine_ends_its_worker(tmp_path: Path) -> None:
    (tmp_path / "model.mindir").touch()
    acts = dict.fromkeys(("start", "load", "resize", "run"), "")
    python = python_that_runs(tmp_path, STAND_IN.format(**acts))
    engine = WorkerEngine({"model": tmp_path / "model.mindir"}, threads=1, python=python)
    pid = engine.pid
    del engine
    gc.collect()
    assert ends(pid)


PARENT = """
import sys
from pathlib import Path
from lite_runner.backends.lite.engines.worker import WorkerEngine

engine = WorkerEngine({{"model": Path({model!r})}}, threads=1, python=Path({python!r}))
engine.bind("model", [(2, 5)])
print(engine.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["sys.stdin.read()", "engine.run('model')"])
def test_no_orphan_survives_a_killed_parent(tmp_path: Path, then: str) -> None:
    model = tmp_path / "model.mindir"
    model.touch()
    acts = {"start": "", "load": "", "resize": "", "run": "hang"}
    python = python_that_runs(tmp_path, STAND_IN.format(**acts))
    (tmp_path / "parent.py").write_text(
        PARENT.format(model=str(model), python=str(python), then=then)
    )
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)  # until it is in the run
        assert is_running(pid)
        parent.kill()
    assert ends(pid)


def test_the_library_path_of_mindspore_is_not_inherited(
    lite_python: Path, tiny_mindir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/venv/mindspore/lib/plugin/cpu:/usr/local/lib")
    engine = WorkerEngine({"model": tiny_mindir}, threads=1, python=lite_python)
    environment = psutil.Process(engine.pid).environ()
    engine.close()
    assert environment["LD_LIBRARY_PATH"] == "/usr/local/lib"


def test_names_with_blanks(lite_python: Path, tiny_mindir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ein Ordner für Modelle"
    folder.mkdir()
    path = Path(shutil.copy(tiny_mindir, folder))
    engine = WorkerEngine({"model": path}, threads=1, python=lite_python)
    check(engine, "model", SHAPES)
    engine.close()
