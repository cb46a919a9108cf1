"""Kernels on ARM, by a program that qemu runs. The reproducible ones give this processor's bits.

The program is compiled with -O1, which takes a third of the time of -O3 and has to round alike, and
with the optimization that joins products and sums where it may.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lite_runner import native
from tests.backends.native import reproducible
from tests.conftest import NO_ARM
from tests.native.kept import kept

SOURCES = Path(native.__file__).parent / "src"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
# Of the largest logit. Where inputs, keys or values are rounded, a last bit may turn the rounding.
EXACT, ROUNDED = 1e-5, 1e-3
# Reads what `steps_of` has written, calls the library with it, and writes the logits.
DRIVER = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "layers.h"

namespace lite_runner {
const Kernels kPortable{"portable"};  // not compiled: others are chosen
}
using namespace lite_runner;

extern "C" {
int lite_runner_choose(const char* name);
const char* lite_runner_instructions();
int lite_runner_pack(const void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     void*);
int lite_runner_step(const BoundModel*, const int32_t*, int64_t, const float*, const int32_t*,
                     float*, float*);
}

void read(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) std::abort();
}

int64_t number() {
  int64_t value;
  read(&value, sizeof(value));
  return value;
}

template <class T = char>
T* memory(int64_t bytes) {  // zeros
  const size_t whole = (bytes + 64) / 64 * 64;
  return static_cast<T*>(std::memset(std::aligned_alloc(64, whole), 0, whole));
}

template <class T = char>
T* part(int64_t bytes) {
  T* found = memory<T>(bytes);
  read(found, bytes);
  return found;
}

int main(int, char** arguments) {
  if (!std::strcmp(arguments[1], "itself")) {
    const float from[4] = {1, 2, 3, 4};
    float to[64] = {};
    const int code = lite_runner_pack(from, 2, 2, 2, 4, 4, 0, 1, to);
    std::printf("%s %d ", lite_runner_instructions(), code);
    std::printf("%g %g %g %g", to[0], to[1], to[32], to[33]);
    return 0;
  }
  if (!lite_runner_choose(arguments[1])) return 1;
  BoundModel model{};
  for (int64_t* to : {&model.prefix, &model.capacity, &model.vocabulary, &model.slots,
                      &model.positions, &model.rope_rows})
    *to = number();
  const int64_t hidden = number();
  double softcap;
  read(&softcap, sizeof(softcap));
  model.softcap = static_cast<float>(softcap);
  model.count = number();
  model.table_width = number();
  model.blocks = number();
  model.tables = part<int32_t>(number());
  model.window = number();
  model.window_blocks = number();
  model.window_tables = part<int32_t>(number());
  std::vector<BoundLayer> layers(model.count);
  for (BoundLayer& layer : layers) {
    layer = BoundLayer{};
    layer.windowed = number();
    layer.cache.type = static_cast<CacheType>(number());
    layer.cache.block_bytes = number();
    layer.cache.keys = memory(number());
    layer.cache.values = memory(number());
    layer.cache.key_scales = memory<float>(number());
    layer.cache.value_scales = memory<float>(number());
    layer.state_stride = number();
    layer.state = memory<float>(4 * model.slots * layer.state_stride);
    layer.block = part(number());
  }
  model.layers = layers.data();
  float* x = memory<float>(4 * model.capacity * hidden);
  for (int64_t steps = number(); steps > 0; --steps) {
    const int64_t size = number(), table = number(), rows = number();
    const int32_t* words = part<int32_t>(4 * size);
    const float* rope = part<float>(4 * table);
    model.logit_rows = rows;
    float* logits = memory<float>(4 * rows * model.vocabulary);
    if (lite_runner_step(&model, words, size, rope, nullptr, x, logits)) return 2;
    std::fwrite(logits, 4, rows * model.vocabulary, stdout);
  }
}
"""


def _compile(source: Path, target: Path, *flags: str) -> None:
    command = [COMPILER, "-std=c++17", "-O1", "-fexpensive-optimizations", "-fno-math-errno"]
    command += ["-pthread", f"-I{SOURCES}", *flags, "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"{NO_ARM}: apt-get install g++-aarch64-linux-gnu qemu-user")
    folder, this = tmp_path_factory.mktemp("arm"), Path(__file__).read_text(encoding="utf-8")
    return kept(tmp_path_factory, "on-arm", COMPILER, [this], lambda: _built(folder))


def _built(folder: Path) -> Path:
    driver = folder / "driver.cc"
    driver.write_text(DRIVER)
    names = ("reproducible", "dotprod", "operators", "peers", "threads", "training")
    objects = [folder / f"{name}.o" for name in (*names, "driver")]
    sources = [*(SOURCES / f"{name}.cc" for name in names), driver]
    for source, target in zip(sources, objects, strict=True):
        contraction = ["-ffp-contract=off"] if target.stem == "reproducible" else []
        _compile(source, target, '-DLITE_RUNNER_SOURCES="of this test"', *contraction)
    found = folder / "driver"
    subprocess.run([COMPILER, "-pthread", *objects, "-o", found], check=True)
    return found


def _logits(program: Path, kernels: str, steps: bytes = b"") -> bytes:
    environ = {**os.environ, "QEMU_LD_PREFIX": LIBRARIES}
    command = [EMULATOR, program, kernels]
    done = subprocess.run(command, input=steps, capture_output=True, env=environ)
    assert done.returncode == 0, (kernels, done.stderr)
    return done.stdout


def test_instructions_and_packed_matrices_on_arm(program: Path) -> None:
    assert _logits(program, "itself") == b"dotprod 0 1 3 2 4"


def test_logits_on_arm(program: Path) -> None:
    """Those of the fast kernels differ by the rounding of joined products and sums."""
    found = {}
    for key in reproducible.EXPECTED:
        steps = reproducible.steps_of(*key)
        exact, fast = (_logits(program, name, steps) for name in ("reproducible", "dotprod"))
        found[key] = reproducible.hashed(exact)
        expected, logits = np.frombuffer(exact, np.float32), np.frombuffer(fast, np.float32)
        bound = EXACT if key[1:] == ("none", "fp32") else ROUNDED
        np.testing.assert_allclose(logits, expected, atol=bound * abs(expected).max(), rtol=0)
        assert (logits != expected).any()  # they are others
    assert found == reproducible.EXPECTED
