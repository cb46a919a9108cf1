"""Makes the models of `make bench-experts`: a mixture of experts, and a dense one beside it.

    .venv/bin/python benchmarks/experts.py FOLDER [--hidden 1024 --experts 64 --chosen 8 ...]

FOLDER gets sparse.gguf, a qwen3moe, and dense.gguf, a qwen3 whose feed-forward layers are as wide
as the experts of a token together: as many numbers are read for a token. Random weights in Q8_0;
the vocabulary is as large as that of the prompts of benchmarks/bench.py. Of the table's rows the
first two are ours, sparse and dense, the others llama.cpp's in the same order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from random_gguf import Type, add_tokenizer, random_blocks

VOCABULARY = 49152
HEAD_DIM = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16, help="a quarter of them are key heads")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")
    parser.add_argument("--width", type=int, default=384, help="of an expert")
    sizes = parser.parse_args()
    sizes.folder.mkdir(parents=True, exist_ok=True)
    for sparse in (True, False):
        path = sizes.folder / ("sparse.gguf" if sparse else "dense.gguf")
        active, total = write(path, sizes, sparse=sparse)
        print(f"{path}: {active / 1e6:,.0f} of {total / 1e6:,.0f} M parameters a token")


def write(path: Path, sizes: argparse.Namespace, *, sparse: bool) -> tuple[int, int]:
    """One of the models; returns how many parameters a token uses, and all of them."""
    writer = gguf.GGUFWriter(path, "qwen3moe" if sparse else "qwen3")
    hidden, width = sizes.hidden, sizes.chosen * sizes.width
    describe(writer, sizes, width)
    if sparse:
        writer.add_expert_count(sizes.experts)
        writer.add_expert_used_count(sizes.chosen)
        writer.add_expert_feed_forward_length(sizes.width)
    generator = np.random.default_rng(0)
    counts = [0, 0]

    def add(name: str, *shape: int, used: float = 1.0) -> None:
        blocks = random_blocks(generator, shape, Type.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=Type.Q8_0)
        count = int(np.prod(shape))
        counts[0] += int(count * used)
        counts[1] += count

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    add("token_embd", VOCABULARY, hidden)  # and the head
    ones("output_norm", hidden)
    heads, kv = sizes.heads * HEAD_DIM, sizes.heads // 4 * HEAD_DIM
    for layer in range(sizes.layers):
        block = f"blk.{layer}."
        for name, rows in (("attn_q", heads), ("attn_k", kv), ("attn_v", kv)):
            add(block + name, rows, hidden)
        add(f"{block}attn_output", hidden, heads)
        for name, size in (("attn_norm", hidden), ("ffn_norm", hidden)):
            ones(block + name, size)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(block + name, HEAD_DIM)
        if sparse:
            router = generator.standard_normal((sizes.experts, hidden), np.float32) / hidden**0.5
            writer.add_tensor(f"{block}ffn_gate_inp.weight", router)
            used = sizes.chosen / sizes.experts
            for name in ("gate", "up"):
                add(f"{block}ffn_{name}_exps", sizes.experts, sizes.width, hidden, used=used)
            add(f"{block}ffn_down_exps", sizes.experts, hidden, sizes.width, used=used)
        else:
            for name in ("gate", "up"):
                add(f"{block}ffn_{name}", width, hidden)
            add(f"{block}ffn_down", hidden, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return counts[0], counts[1]


def describe(writer: gguf.GGUFWriter, sizes: argparse.Namespace, width: int) -> None:
    writer.add_block_count(sizes.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(width)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.heads // 4)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    add_tokenizer(writer, VOCABULARY)


if __name__ == "__main__":
    main()
