"""Makes files like published ones for `make bench-gguf`: their sizes and types, random numbers.

    .venv/bin/python benchmarks/published.py FOLDER [--sizes qwen2.5_0.5b llama_7b]

The types are those that llama.cpp's Q4_K_M gives each tensor: Q6_K to half of the values and
downward projections and to the head, Q4_K to the others; where a matrix has no whole blocks of 256
inputs Q8_0 and Q5_0 instead.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from random_gguf import Type, add_tokenizer, random_blocks


@dataclass(frozen=True)
class Sizes:
    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    biases: bool  # of q, k and v


PUBLISHED = {
    "qwen2.5_0.5b": Sizes("qwen2", 24, 896, 4864, 14, 2, 64, 151936, tied=True, biases=True),
    "llama_7b": Sizes("llama", 32, 4096, 11008, 32, 32, 128, 32000, tied=False, biases=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.sizes:
        path = arguments.folder / f"{name}-Q4_K_M.gguf"
        if not path.exists():
            write(path, PUBLISHED[name])
        print(f"{path}: {path.stat().st_size / 1e6:,.0f} MB")


def write(path: Path, sizes: Sizes) -> None:
    unfinished = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(unfinished, sizes.architecture)
    describe(writer, sizes)
    generator = np.random.default_rng(0)

    def add(name: str, outputs: int, inputs: int, kind: Type) -> None:
        if inputs % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = {Type.Q6_K: Type.Q8_0, Type.Q4_K: Type.Q5_0}[kind]
        blocks = random_blocks(generator, (outputs, inputs), kind)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)

    def floats(name: str, value: float, size: int) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    hidden, width = sizes.hidden, sizes.intermediate
    add("token_embd", sizes.vocabulary, hidden, Type.Q6_K if sizes.tied else Type.Q4_K)
    if not sizes.tied:
        add("output", sizes.vocabulary, hidden, Type.Q6_K)
    floats("output_norm.weight", 1, hidden)
    heads, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for layer in range(sizes.layers):
        block = f"blk.{layer}."
        eighth = sizes.layers // 8
        outer = layer < eighth or layer >= 7 * eighth
        better = Type.Q6_K if outer or (layer - eighth) % 3 == 2 else Type.Q4_K
        for name, rows, kind in (("q", heads, Type.Q4_K), ("k", kv, Type.Q4_K), ("v", kv, better)):
            add(f"{block}attn_{name}", rows, hidden, kind)
            if sizes.biases:
                floats(f"{block}attn_{name}.bias", 0.01, rows)
        add(f"{block}attn_output", hidden, heads, Type.Q4_K)
        add(f"{block}ffn_gate", width, hidden, Type.Q4_K)
        add(f"{block}ffn_up", width, hidden, Type.Q4_K)
        add(f"{block}ffn_down", hidden, width, better)
        floats(f"{block}attn_norm.weight", 1, hidden)
        floats(f"{block}ffn_norm.weight", 1, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)


def describe(writer: gguf.GGUFWriter, sizes: Sizes) -> None:
    writer.add_block_count(sizes.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.intermediate)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    add_tokenizer(writer, sizes.vocabulary)


if __name__ == "__main__":
    main()
