"""Random numbers in GGUF's types, and a tokenizer, for the models that benchmarks make."""

from __future__ import annotations

import gguf
import numpy as np

from lite_runner.text.spelling import byte_alphabet

Type = gguf.GGMLQuantizationType

# Of a type's integers, as they stand here: the standard deviation of integer times its scale's.
SPREAD = {Type.Q8_0: 73.9, Type.Q5_0: 9.2, Type.Q4_K: 258, Type.Q6_K: 73.9 * 18.5}
SCALE_AT = {Type.Q6_K: 208}  # bytes before the float16 of a block; 0 otherwise
MINIMUM_OVER_SCALE = 7.5  # of Q4_K: what it takes off is as large as the mean of what it adds


def random_blocks(generator: np.random.Generator, shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """The bytes of a matrix [.., out, in] whose numbers have a deviation of about 1 / sqrt(in)."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    data = generator.integers(0, 256, (*shape[:-1], shape[-1] // size, width), np.uint8)
    scale = 1 / (SPREAD[kind] * shape[-1] ** 0.5)
    start = SCALE_AT.get(kind, 0)
    data[..., start : start + 2] = np.float16([scale]).view(np.uint8)
    if kind == Type.Q4_K:
        data[..., 2:4] = np.float16([scale * MINIMUM_OVER_SCALE]).view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Bytes, an end token, and merges of two earlier tokens until there are so many."""
    tokens, merges = list(byte_alphabet()), []
    for first in range(vocabulary):  # 256 bytes, their pairs, then pairs and bytes
        for second in tokens[:256]:
            if len(tokens) == vocabulary - 1:
                break
            merges.append(f"{tokens[first]} {second}")
            tokens.append(tokens[first] + second)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, "<|end|>"])
    writer.add_token_types([1] * (vocabulary - 1) + [3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocabulary - 1)
