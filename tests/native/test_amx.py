"""Products by AMX's tiles, of the library as it is built.

Where the processor lacks the instructions, each of them raises SIGILL, and a handler does what
Intel's manual says, and checks what that asks for.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lite_runner import native
from lite_runner.native import fingerprint, matrices
from lite_runner.native.structs import UNITS, Format
from lite_runner.weights import widened
from lite_runner.weights.quantization.quantized import QuantizedTensor, packed
from tests.native import test_blocks, test_linear
from tests.native.conftest import OPERATORS, SANITIZED, Operators
from tests.native.in_numpy import with_outliers

SCALES_OF_16 = ("Q2_K", "Q3_K", "Q6_K")  # inputs, which tiles would take in halves: left to vectors

EMULATOR = r"""
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Tile {
  int rows, bytes;
  uint8_t data[16][64];
};
thread_local Tile tiles[8];
thread_local bool configured;
std::atomic<int64_t> products{0}, open{0};
std::atomic<const char*> wrong{""};
std::atomic<int> error{0};  // of sums
struct sigaction before;

bool require(bool holds, const char* what) {
  if (!holds) wrong = what;
  return holds;
}

void configure(const uint8_t* from) {
  uint16_t bytes[16];
  std::memcpy(bytes, from + 16, 32);
  bool fits = from[0] == 1 && from[1] == 0;
  for (int i = 2; i < 16; ++i) fits &= from[i] == 0;
  for (int i = 0; i < 16; ++i)
    fits &= i < 8 ? from[48 + i] <= 16 && bytes[i] <= 64 && !from[48 + i] == !bytes[i]
                  : from[48 + i] == 0 && bytes[i] == 0;
  if (!require(fits, "a configuration")) return;
  if (!configured) ++open;
  configured = true;
  for (int i = 0; i < 8; ++i) tiles[i] = {from[48 + i], bytes[i], {}};
}

void release() {
  if (configured) --open;
  configured = false;
}

void move(Tile& tile, uint8_t* memory, int64_t stride, bool store) {
  if (!require(configured && tile.rows, "a tile that is moved")) return;
  if (!store) std::memset(tile.data, 0, sizeof tile.data);
  for (int row = 0; row < tile.rows; ++row)
    if (store)
      std::memcpy(memory + row * stride, tile.data[row], tile.bytes);
    else
      std::memcpy(tile.data[row], memory + row * stride, tile.bytes);
}

bool begins(const Tile& sums, const Tile& x, const Tile& words) {
  const bool fits = configured && sums.rows && sums.rows == x.rows && sums.bytes == words.bytes &&
                    x.bytes == 4 * words.rows && sums.bytes % 4 == 0 && &sums != &x &&
                    &sums != &words && &x != &words;
  products += fits;
  return require(fits, "shapes of a product");
}

void multiply(Tile& sums, const Tile& x, const Tile& words, bool signed_x, bool signed_words) {
  if (!begins(sums, x, words)) return;
  const auto value = [](uint8_t byte, bool is_signed) {
    return is_signed ? static_cast<int32_t>(static_cast<int8_t>(byte)) : byte;
  };
  for (int row = 0; row < sums.rows; ++row)
    for (int out = 0; out < sums.bytes / 4; ++out) {
      int32_t sum;
      std::memcpy(&sum, sums.data[row] + 4 * out, 4);
      for (int k = 0; k < x.bytes; ++k)
        sum += value(x.data[row][k], signed_x) *
               value(words.data[k / 4][4 * out + k % 4], signed_words);
      sum += error;
      std::memcpy(sums.data[row] + 4 * out, &sum, 4);
    }
}

// Pairs of bfloat16: those at even places and those at odd ones are summed up by themselves first.
void multiply_pairs(Tile& sums, const Tile& x, const Tile& words) {
  if (!begins(sums, x, words)) return;
  const auto value = [](const uint8_t* half) {
    uint32_t bits = static_cast<uint32_t>(half[0] | half[1] << 8) << 16;
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  };
  for (int row = 0; row < sums.rows; ++row)
    for (int out = 0; out < sums.bytes / 4; ++out) {
      float sum, part[2] = {};
      std::memcpy(&sum, sums.data[row] + 4 * out, 4);
      for (int k = 0; k < x.bytes / 2; ++k)
        part[k % 2] = std::fma(value(x.data[row] + 2 * k),
                               value(words.data[k / 2] + 4 * out + k % 2 * 2), part[k % 2]);
      sum += part[0] + part[1] + static_cast<float>(error);
      std::memcpy(sums.data[row] + 4 * out, &sum, 4);
    }
}

// Registers by their numbers in instructions.
constexpr int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                              REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                              REG_R12, REG_R13, REG_R14, REG_R15};

void emulate(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const uint8_t* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  // VEX of three bytes: c4; R, X and B inverted, map 2; W 0, vvvv inverted, L 0, pp.
  const int operation = code[3], kind = code[2] & 3, mod = code[4] >> 6;
  const int reg = code[4] >> 3 & 7, rm = code[4] & 7, third = ~code[2] >> 3 & 7;
  const bool known = operation == 0x49 || operation == 0x4b || operation == 0x5e ||
                     (operation == 0x5c && kind == 2);
  if (code[0] != 0xc4 || (code[1] & 31) != 2 || (code[2] & 0x84) || !known) {
    sigaction(SIGILL, &before, nullptr);  // not one of these: it is met again
    return;
  }
  int length = 5;
  uint8_t* memory = nullptr;
  int64_t stride = 0;
  if (mod != 3) {
    int base = rm;
    if (rm == 4) {
      const uint8_t sib = code[length++];
      base = sib & 7;
      const int index = (sib >> 3 & 7) | (~code[1] >> 6 & 1) << 3;
      if (index != 4) stride = registers[kRegisters[index]] << (sib >> 6);
    }
    require(mod != 0 || base != 5, "an address without a register");
    memory = reinterpret_cast<uint8_t*>(registers[kRegisters[base | (~code[1] >> 5 & 1) << 3]]);
    int32_t offset = mod == 1 ? static_cast<int8_t>(code[length]) : 0;
    if (mod == 2) std::memcpy(&offset, code + length, 4);
    length += mod == 1 ? 1 : mod == 2 ? 4 : 0;
    memory += offset;
  }
  if (operation == 0x5e)
    multiply(tiles[reg], tiles[rm], tiles[third], kind & 2, kind & 1);
  else if (operation == 0x5c)
    multiply_pairs(tiles[reg], tiles[rm], tiles[third]);
  else if (operation == 0x4b)
    move(tiles[reg], memory, stride, kind == 2);
  else if (kind == 0)
    mod != 3 ? configure(memory) : release();
  else if (require(configured && mod == 3 && kind == 3, "a tile that is cleared"))
    std::memset(tiles[reg].data, 0, sizeof tiles[reg].data);
  registers[REG_RIP] += length;
}

}  // namespace

extern "C" {
void emulator_start() {
  struct sigaction ours = {};
  ours.sa_sigaction = emulate;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &ours, &before);
}
void emulator_stop() { sigaction(SIGILL, &before, nullptr); }
void emulator_err(int by) { error = by; }
int64_t emulator_products() { return products; }
int64_t emulator_open() { return open; }
const char* emulator_wrong() { return wrong; }
}
"""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    if not OPERATORS.choose("avx512"):
        pytest.skip("without AVX-512, which every processor with AMX has")
    folder = tmp_path_factory.mktemp("amx")
    source, target = folder / "emulator.cc", folder / "emulator.so"
    source.write_text(EMULATOR)
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared"]
    if SANITIZED:  # what tiles load and store is looked at too
        flags.append("-fsanitize=address")
    subprocess.run([*fingerprint.compiler(), *flags, source, "-o", target], check=True)
    found = ctypes.CDLL(str(target))
    found.emulator_products.restype = found.emulator_open.restype = ctypes.c_int64
    found.emulator_wrong.restype = ctypes.c_char_p
    found.emulator_start()
    yield found
    found.emulator_stop()
    OPERATORS.choose("")


def state(library: Path, *, emulated: bool) -> str:
    look = ctypes.CDLL(str(library)).lite_runner_amx
    look.restype = ctypes.c_char_p
    found: bytes = look(int(emulated))
    return found.decode()


@pytest.fixture
def library(emulator: ctypes.CDLL, tmp_path: Path) -> Path:
    """A copy of the library, whose choice others do not see."""
    return Path(shutil.copy(native.LIBRARY, tmp_path / "operators.so"))


def test_tiles_are_used_where_their_products_are_right(
    emulator: ctypes.CDLL, library: Path
) -> None:
    operators = Operators(library)
    if not state(library, emulated=False):  # this processor has none
        assert not operators.choose("amx")
        emulator.emulator_err(1)
        assert state(library, emulated=True) == "its products are wrong"
        assert not operators.choose("amx")
        emulator.emulator_err(0)
    assert state(library, emulated=True) == "used"
    assert operators.choose("amx")
    assert (emulator.emulator_wrong(), emulator.emulator_open()) == (b"", 0)


def test_tiles_give_the_bits_of_vectors(emulator: ctypes.CDLL, library: Path) -> None:
    operators, rng = Operators(library), np.random.default_rng(0)
    own = state(library, emulated=False)  # of a processor that has tiles: nothing is emulated
    assert state(library, emulated=True) == "used"
    weights: dict[str, matrices.Weight] = {}
    for kind in test_blocks.KINDS:
        size = UNITS[Format[kind]][0]
        for inputs in (size, 512 if size == 256 else 288):
            weights[f"{kind} {inputs}"] = test_blocks.random_matrix(kind, 70, inputs, rng)
    several = [test_blocks.random_matrix(kind, 32, 512, rng) for kind in ("Q4_K", "Q6_K", "Q8_0")]
    weights["stacked"] = matrices.stacked(several)
    for kind, inputs, group in (
        *(("int8", 96, 0), ("int8", 40, 0), ("int8 in groups", 384, 128)),
        *(("int8, 16 bits", 96, 0), ("int8, 16 bits", 576, 0), ("int8, 16 bits", 40, 0)),
        *(("int4 in groups, 16 bits", 288, 32), ("int4 in groups, 16 bits", 320, 64)),
        *(("int4 from 8, 16 bits", 256, 0), ("int4 in groups, ordered, 16 bits", 384, 128)),
        *(("int4 in groups from zeros, 16 bits", 288, 32), ("int8 in groups", 320, 64)),
    ):
        matrix = test_linear.random_matrix(kind.removesuffix(", 16 bits"), 70, inputs, group, rng)
        weights[f"{kind} {inputs}"] = matrix.weight
    for name, weight in weights.items():
        block = matrices.matrix(weight, rounded_input="16 bits" not in name).block()
        out, inputs = (96, 512) if name == "stacked" else (70, int(name.split()[-1]))
        for rows, threads in ((31, 1), (32, 1), (33, 2), (53, 2)):
            x = with_outliers(rng.standard_normal((rows, inputs), np.float32), rng)
            operators.set_threads(threads)
            assert operators.choose("avx512")
            expected, before = operators.linear(block, out, x), emulator.emulator_products()
            assert operators.choose("amx")
            found, used = operators.linear(block, out, x), emulator.emulator_products() - before
            np.testing.assert_array_equal(found, expected, f"{name}, {rows} rows")
            by_tiles = rows >= 32 and inputs % 32 == 0 and name.split()[0] not in SCALES_OF_16
            assert own or (used > 0) == by_tiles, f"{name}, {rows} rows"
            assert (emulator.emulator_wrong(), emulator.emulator_open()) == (b"", 0), name


def test_largest_sums_of_4_bits(emulator: ctypes.CDLL, library: Path) -> None:
    """The most that 32 inputs sum up to is exact in the floats of tiles."""
    operators, rng = Operators(library), np.random.default_rng(0)
    assert state(library, emulated=True) == "used"
    x = np.ones((35, 288), np.float32)
    x[1:] = -1
    x[2:] *= rng.choice([-1, 1, 0.99], (33, 288))
    scales = (rng.random((70, 9)) + 0.01).astype(np.float16)
    for zero, nibble in ((16, 0), (0, 15), (8, 0), (16, None)):
        nibbles = rng.integers(0, 16, (70, 288)) if nibble is None else np.full((70, 288), nibble)
        weight = QuantizedTensor(4, 32, packed(nibbles.astype(np.uint8)), scales, None, zero=zero)
        block = matrices.matrix(weight).block()
        assert operators.choose("avx512")
        expected = operators.linear(block, 70, x)
        assert operators.choose("amx")
        np.testing.assert_array_equal(operators.linear(block, 70, x), expected, f"{zero}, {nibble}")
        assert (emulator.emulator_wrong(), emulator.emulator_open()) == (b"", 0), zero


def test_tiles_of_bfloat16(emulator: ctypes.CDLL, library: Path) -> None:
    """To the bit in their own order, which rows that fill no tile follow too."""
    operators, rng = Operators(library), np.random.default_rng(0)
    own = state(library, emulated=False)
    assert state(library, emulated=True) == "used" and operators.choose("amx")
    for inputs in (8, 64, 300, 777):
        weight = test_linear.random_matrix("bfloat16", 70, inputs, 0, rng).weight
        assert isinstance(weight, np.ndarray)
        block = matrices.matrix(weight, rounded_input=True).block()
        x = rng.standard_normal((53, inputs), np.float32)
        expected = test_linear.summed_in_bfloat16(x, widened(weight), tiles=True)
        for rows, threads in ((4, 1), (5, 1), (16, 1), (20, 2), (53, 2)):
            operators.set_threads(threads)
            before = emulator.emulator_products()
            found = operators.linear(block, 70, x[:rows])
            np.testing.assert_array_equal(found, expected[:rows], f"{inputs}, {rows} rows")
            used = emulator.emulator_products() > before
            assert own or used == (rows > 4 and inputs >= 32), f"{inputs}, {rows} rows"
            assert (emulator.emulator_wrong(), emulator.emulator_open()) == (b"", 0), inputs
