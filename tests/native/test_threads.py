"""The threads that share the work: idle, after a fork, and where the system gives none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner import native

SOURCES = Path(native.__file__).parent / "src"

# Each of these is a process of its own, whose threads and limits are nobody else's.
WORK = f"""
import ctypes, os, resource, sys, time
import numpy as np
from lite_runner.native import matrices
operators = ctypes.CDLL({str(native.LIBRARY)!r})
weight = np.random.default_rng(0).standard_normal((4096, 256), np.float32)
block = matrices.matrix(weight).block()
x = np.ones((8, 256), np.float32)
expected = np.tile(weight.sum(1), (8, 1))

def multiply(out):
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (block, x, out)]
    operators.lite_runner_linear(pointers[0], pointers[1], ctypes.c_int64(8), pointers[2])

def work():
    out = np.zeros((8, 4096), np.float32)
    multiply(out)
    np.testing.assert_allclose(out, expected, atol=1e-3)

def threads():
    return len(os.listdir("/proc/self/task"))
"""


def run(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WORK + body], capture_output=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_without_work_sleep() -> None:
    used = run("""
operators.lite_runner_set_threads(5)
before = threads()
for _ in range(50): work()
assert threads() - before == 4
time.sleep(0.2)
start = time.process_time()
time.sleep(1)
print(time.process_time() - start)
""")
    assert float(used) < 0.02


def test_the_number_of_threads_changes() -> None:
    run("""
operators.lite_runner_set_threads(1)
work()
before = threads()
for count in (3, 1, 8, 2, 2):
    operators.lite_runner_set_threads(count)
    for _ in range(20): work()
    # One thread alone needs no others, and those that there were may stay.
    assert count == 1 or threads() - before == count - 1
""")


def test_a_fork_starts_threads_of_its_own() -> None:
    run("""
operators.lite_runner_set_threads(3)
for _ in range(10):
    work()
    child = os.fork()
    if child == 0:
        try:
            assert threads() == 1
            work()
            assert threads() == 3
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    work()
""")


def test_fewer_threads_than_wanted_do_the_work() -> None:
    """Without memory for more stacks; elsewhere the number of processes is limited."""
    count = run("""
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
out = np.zeros((8, 4096), np.float32)
multiply(out)
out[:] = 0
before = threads()
resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20), resource.RLIM_INFINITY))
operators.lite_runner_set_threads(200)
multiply(out)
print(threads() - before)
# NumPy needs memory to compare.
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
np.testing.assert_allclose(out, expected, atol=1e-3)
""")
    assert 0 < int(count) < 100


@pytest.mark.parametrize("processes", [3])
def test_more_processes_than_cores_finish(processes: int) -> None:
    """Nobody waits for a thread that has no core to run on."""
    script = (
        WORK
        + """
operators.lite_runner_set_threads(4)
for _ in range(200): work()
"""
    )
    started = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(processes)]
    assert [process.wait(60) for process in started] == [0] * processes
