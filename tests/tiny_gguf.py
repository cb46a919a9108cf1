"""A GGUF of a few kilobytes that is whole: weights, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from lite_runner.text.spelling import byte_alphabet

VOCABULARY = [
    *byte_alphabet(),
    *("<s>", "</s>", "<pad>", "<|eot|>", "<|eom|>"),
    *("th", "the", "\u0120the", "\u0120a", "<unused>"),
]
MERGES = ["t h", "th e", "\u0120 the", "\u0120 a"]
TEMPLATE = "{% for m in messages %}{{ bos_token }}the {{ m.content }}{{ eos_token }}{% endfor %}"


def write_tiny_gguf(path: Path, split: int = 0) -> None:
    """A Llama of one layer and random weights; tokens are single bytes and a few merges. `split`:
    tensors of a file, of which there are then several; 0: one file."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3 if 256 <= id <= 260 else 1 for id in range(len(VOCABULARY))])
    writer.add_token_merges(MERGES)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    for id, name in enumerate(("bos", "eos", "padding", "eot", "eom"), 256):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(VOCABULARY), 32),
        "output_norm": (32,),
        **dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm"), (32,)),
        **dict.fromkeys(("blk.0.attn_q", "blk.0.attn_output"), (32, 32)),
        **dict.fromkeys(("blk.0.attn_k", "blk.0.attn_v"), (16, 32)),
        **dict.fromkeys(("blk.0.ffn_gate", "blk.0.ffn_up"), (64, 32)),
        "blk.0.ffn_down": (32, 64),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
