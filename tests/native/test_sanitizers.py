"""The operators compiled with sanitizers, under the other tests and under a driver of their own."""

from __future__ import annotations

import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner import native
from lite_runner.native import fingerprint
from tests.native.conftest import UNSANITIZED
from tests.native.kept import kept

SOURCES = Path(native.__file__).parent / "src"
# Of `undefined` those that the address sanitizer does not find as well: with its checks for null
# pointers and the sizes of objects, compiling takes half as long again.
SANITIZERS = (
    "address,alignment,bounds,integer-divide-by-zero,return,shift,"
    "signed-integer-overflow,unreachable"
)
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")))

# Many short jobs of changing sizes, with pauses in which the threads fall asleep.
DRIVER = """
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "threads.h"

int main() {
  for (int count : {1, 4, 2, 5, 5, 3}) {
    lite_runner::set_threads(count);
    for (int job = 0; job < 300; ++job) {
      std::vector<long> results(job % 17 + 1, -1);  // no atomics: each is one thread's
      long total = 0;
      const auto items = static_cast<int64_t>(results.size());
      lite_runner::parallel_for(items, [&](int64_t item, int thread) {
        if (thread < 0 || thread >= count) std::abort();
        results[item] = item * job;
      });
      for (long result : results) total += result;
      if (total != job * (items * (items - 1) / 2)) std::abort();
      if (job % 100 == 99) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  std::puts("done");
}
"""

# Ranks as threads, of which some are late; then one leaves, and the others notice.
PEERS = """
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "peers.h"

using lite_runner::Peers;

int main() {
  for (int size : {2, 5}) {
    const int file = memfd_create("peers", 0);
    if (ftruncate(file, Peers::bytes(size))) std::abort();
    void* memory = mmap(nullptr, Peers::bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    std::vector<std::unique_ptr<Peers>> peers;
    for (int rank = 0; rank < size; ++rank) {
      const std::string path = "/proc/self/fd/" + std::to_string(file);
      const int own = open(path.c_str(), O_RDWR);
      peers.push_back(std::make_unique<Peers>(memory, own, rank, size, 50));
    }
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank)
      ranks.emplace_back([&, rank] {
        Peers& mine = *peers[rank];
        for (int turn = 0; turn < 300; ++turn) {
          const int64_t count = turn % 7 ? 64 : 5000;
          for (int64_t i = 0; i < count; ++i) mine.own()[i] = static_cast<float>(turn + rank * i);
          if ((turn + rank) % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          if (!mine.meet(Peers::kPlace)) std::abort();
          for (int64_t i = 0; i < count; ++i)
            for (int other = 0; other < size; ++other)
              if (mine.of(other)[i] != static_cast<float>(turn + other * i)) std::abort();
        }
        if (rank == 1) return peers[1].reset();
        while (mine.meet(Peers::kPlace)) continue;
        if (mine.lost() < 0 || mine.meet(Peers::kPlace)) std::abort();
      });
    for (auto& rank : ranks) rank.join();
    munmap(memory, Peers::bytes(size));
    close(file);
  }
  std::puts("done");
}
"""


# Kernels are templates of how many rows they take at once, up to 12: of as many as they may, and of
# one, which the rows that are left take. Those between are the same text.
REST = re.compile(r"unrolled<most - 1>\(.*?\n  }\);", re.DOTALL)
ONE_BY_ONE = "for (; row < rows; ++row) body(std::integral_constant<int64_t, 1>{}, row);"
NAME = re.compile(r"const Kernels (\w+) =")


def with_fewer_tiles(folder: Path) -> list[Path]:
    """The sources, copied to `folder`: kernels take all rows that they may at once, or one; those
    of the same text as others, which are tested less, are empty."""
    changed = 0
    for path in SOURCES.iterdir():
        text, count = REST.subn(ONE_BY_ONE, path.read_text("utf-8"))
        changed += count
        if path.stem in UNSANITIZED:
            (name,) = NAME.findall(text)
            text = f'#include "layers.h"\nconst lite_runner::Kernels lite_runner::{name}{{""}};\n'
        (folder / path.name).write_text(text, encoding="utf-8")
    assert changed == 1, f"in_tiles of rows.inl has not {REST.pattern}"
    return sorted(folder.glob("*.cc"))


def compiled(sources: list[Path], target: Path, *flags: str) -> Path:
    """A program or, with -shared, a library; each source compiled beside the others, with
    the headers beside the last."""
    common = [COMPILER, "-std=c++17", "-pthread", f"-I{sources[-1].parent}"]
    common += [flag for flag in flags if flag != "-shared"]
    objects = [str(target.parent / f"{source.stem}.o") for source in sources]
    # Elsewhere than on x86-64, which takes its portable kernels from there, of the same text.
    names = ["reproducible"] if platform.machine() != "x86_64" else []
    plain = {f"{name}.cc": ["-fno-sanitize=all", "-O0"] for name in names}
    started = [
        subprocess.Popen([*common, *plain.get(source.name, []), "-c", str(source), "-o", output])
        for source, output in zip(sources, objects, strict=True)
    ]
    assert [process.wait() for process in started] == [0] * len(sources)
    subprocess.run([COMPILER, *flags, "-pthread", *objects, "-o", str(target)], check=True)
    return target


def runtime(name: str) -> str:
    done = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def sanitized(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with sanitizers."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    # What is undefined ends the process, which says in which test: with messages, compiling takes
    # a quarter longer.
    flags = [
        *("-Og", "-g1", "-fno-math-errno", "-fPIC", "-shared"),
        *(f"-fsanitize={SANITIZERS}", "-fsanitize-undefined-trap-on-error"),
        f'-DLITE_RUNNER_SOURCES="{fingerprint.sources()}"',
    ]
    if b"clang" not in version:  # checks by calls: in line they take a quarter more of its time
        flags += ["--param", "asan-instrumentation-with-call-threshold=0"]

    def build() -> Path:
        sources = with_fewer_tiles(tmp_path_factory.mktemp("sources"))
        return compiled(sources, tmp_path / "operators.so", *flags)

    this = inspect.getsource(with_fewer_tiles)
    return kept(tmp_path_factory, "sanitized", COMPILER, [*flags, *UNSANITIZED, this], build)


def test_sanitizers_find_nothing(sanitized: Path) -> None:
    folder = Path(__file__).parent
    names = ("amx", "linear", "layers", "attention", "structs", "model", "search")
    tests = [str(folder / f"test_{name}.py") for name in names]
    tests += ["-k", "not without_memory"]  # of which the sanitizer itself takes more
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qsx", "-n", "0", "-p", "no:cacheprovider", *tests],
        env={
            **os.environ,
            "SANITIZED_OPERATORS": str(sanitized),
            "LD_PRELOAD": runtime("libasan.so"),
            "ASAN_OPTIONS": "detect_leaks=0",  # those of the interpreter
        },
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


@pytest.mark.parametrize(("text", "source"), [(DRIVER, "threads.cc"), (PEERS, "peers.cc")])
def test_threads_and_ranks_do_not_race(text: str, source: str, tmp_path: Path) -> None:
    driver = tmp_path / "driver.cc"
    driver.write_text(text)
    program = compiled(
        [driver, SOURCES / source], tmp_path / "driver", "-O1", "-g1", "-fsanitize=thread"
    )
    # Some kernels place memory where ThreadSanitizer does not expect it.
    fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*fixed, str(program)], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-5000:]
