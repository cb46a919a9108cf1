"""One process of llama.cpp, or of its fork ik_llama.cpp; prints one line of JSON.

The first run of a type has llama.cpp itself requantize the GGUF, and checks the float32 one against
the gguf package; `--type file` computes with the file as it is. Token ids in and out, through
llama.cpp's batches: the whole prompts of all rows are one call, then each step is one; logits of
the last tokens alone, greedy by NumPy.

Its defaults, for nothing tried was clearly faster on two threads: a half precision cache, fused
attention, parts of 512 tokens, a cache for each row (one for all rows costs a quarter of the
decode speed of 32). `--fork` computes with ik_llama.cpp, which repacks the weights as it loads.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
from measure import Measurement, engine_parser, requantized, restart, seconds_since_start
from numpy.typing import NDArray

TYPES = {
    "F32": "ALL_F32",
    "F16": "MOSTLY_F16",
    "BF16": "MOSTLY_BF16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_0": "MOSTLY_Q4_0",
    "Q4_K_M": "MOSTLY_Q4_K_M",
}
AS_IT_IS = "file"

Ids = NDArray[np.int64]


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Passes on errors; llama.cpp tells every tensor otherwise."""
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode("utf-8", "replace"))


def requantize(source: Path, target: Path, kind: str) -> None:
    """Write the weights of `source` as `kind`; the target gets its name when it is whole."""
    llama_cpp = functions(fork=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(target.name + ".part")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{TYPES[kind]}")
    settings.allow_requantize = True  # the source is quantized already
    names = (str(path).encode() for path in (source, unfinished))
    if llama_cpp.llama_model_quantize(*names, ctypes.byref(settings)):
        sys.exit(f"{source}: llama.cpp cannot make it {kind}")
    if kind == "F32":
        check_same_values(source, unfinished)
    unfinished.replace(target)


def check_same_values(source: Path, float32: Path) -> None:
    """Check that `float32` holds the bits of `source` as the gguf package reads them."""
    from gguf import GGUFReader, dequantize  # here, because the measured process has no use for it

    got = {tensor.name: tensor for tensor in GGUFReader(float32).tensors}
    wanted = GGUFReader(source).tensors
    if got.keys() != {tensor.name for tensor in wanted}:
        sys.exit(f"{float32}: other tensors than in {source}")
    for tensor in wanted:
        values = got[tensor.name].data  # of float32 alone, so the comparison tells other types too
        if not np.array_equal(values, dequantize(tensor.data, tensor.tensor_type)):
            sys.exit(f"{float32}: {tensor.name} has other values than in {source}")


def functions(*, fork: bool) -> ModuleType:
    """The C functions of llama.cpp or of its fork, which has an older interface."""
    if not fork:
        import llama_cpp

        llama_cpp.llama_log_set(log, ctypes.c_void_p())
        return llama_cpp
    from ik_llama_cpp import _ctypes_api as forked

    logits = forked._lib.llama_get_logits  # which its package leaves out
    logits.argtypes, logits.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
    forked.llama_get_logits = logits
    forked._lib.llama_log_set(log, ctypes.c_void_p())
    return forked


class Model:
    """Greedy decoding of rows of equal length."""

    def __init__(self, c: ModuleType, path: Path, rows: int, context: int, threads: int) -> None:
        self.c = c
        c.llama_backend_init()
        settings = c.llama_model_default_params()
        if hasattr(settings, "repack_tensors"):
            settings.repack_tensors, settings.use_mmap = True, False
        self.model = c.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            sys.exit(f"{path}: llama.cpp cannot load it")
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        options = c.llama_context_default_params()
        options.n_ctx = rows * context
        options.n_batch = rows * context
        options.n_seq_max = rows
        options.n_threads = options.n_threads_batch = threads
        self.context = c.llama_init_from_model(self.model, options)
        if not self.context:
            sys.exit(f"{path}: llama.cpp makes no context of {rows} x {context} tokens")
        self.batch = c.llama_batch_init(rows * context, 0, 1)

    def forward(self, tokens: Ids, position: int) -> NDArray[np.float32]:
        """Logits [rows, vocab] after tokens [rows, length], which go to `position` and on."""
        rows, length = tokens.shape
        count = self.batch.n_tokens = rows * length
        array = np.ctypeslib.as_array
        array(self.batch.token, (count,))[:] = tokens.ravel()
        array(self.batch.pos, (count,))[:] = np.tile(np.arange(position, position + length), rows)
        array(self.batch.n_seq_id, (count,))[:] = 1
        array(self.batch.logits, (count,))[:] = np.tile(np.arange(length) == length - 1, rows)
        for place in range(count):
            self.batch.seq_id[place][0] = place // length
        if self.c.llama_decode(self.context, self.batch):
            sys.exit("llama_decode failed")
        return array(self.c.llama_get_logits(self.context), (rows, self.vocab))

    def greedy(self, prompts: Ids, new_tokens: int) -> Iterator[Ids]:
        """The next token of every row, new_tokens times; no end token stops a row."""
        if hasattr(self.c, "llama_kv_cache_clear"):
            self.c.llama_kv_cache_clear(self.context)
        else:
            self.c.llama_memory_clear(self.c.llama_get_memory(self.context), False)
        tokens = self.forward(prompts, 0).argmax(-1)
        yield tokens
        for position in range(prompts.shape[1], prompts.shape[1] + new_tokens - 1):
            tokens = self.forward(tokens[:, None], position).argmax(-1)
            yield tokens


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--type", choices=[*TYPES, AS_IT_IS], default="F32")
    parser.add_argument("--made", type=Path, required=True, help="folder to keep GGUF files in")
    parser.add_argument("--fork", action="store_true", help="compute with ik_llama.cpp")
    arguments = parser.parse_args()

    c = functions(fork=arguments.fork)
    path = requantized(arguments.gguf, arguments.made, arguments.type)
    if arguments.type == AS_IT_IS:
        path = arguments.gguf
    elif not path.exists():
        requantize(arguments.gguf, path, arguments.type)
        restart()

    prompts = np.array(arguments.prompts)
    batch, length = prompts.shape
    started = time.perf_counter()
    model = Model(c, path, batch, length + arguments.new_tokens, arguments.threads)
    load_s = time.perf_counter() - started
    next(model.greedy(prompts, 1))
    first_token_s = seconds_since_start()

    Measurement.of(
        f"{'ik_' * arguments.fork}llama.cpp {arguments.type}",
        arguments.prompts,
        model.greedy(prompts, arguments.new_tokens),
        first_token_s=first_token_s,
        load_s=load_s,
        files=[path],
    ).print()


if __name__ == "__main__":
    main()
