"""Tiny ChatGLMs of random weights, in folders as their publishers have them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece

from lite_runner.architectures import chatglm, chatglm_6b
from lite_runner.architectures.spec import Decoder
from lite_runner.weights.formats import hf_from_model_config
from lite_runner.weights.formats.hugging_face import to_hugging_face
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.layouts import random_checkpoint
from tests.paths import FIXTURES

_SIZES: dict[str, Any] = {"vocab_size": 480, "hidden_size": 48, "num_layers": 1, "num_heads": 4}
_SIZES |= {"seq_length": 128, "tie_word_embeddings": False}


def write_chatglm3(folder: Path, seq_length: int = 128) -> Path:
    """A ChatGLM3: tokenizer.model, whose special tokens lie behind its pieces."""
    folder.mkdir()
    _pieces(folder / "tokenizer.model")
    model = chatglm.decoder(
        **_SIZES | {"seq_length": seq_length},
        n_kv_heads=2,
        head_dim=12,
        intermediate_size=80,
        norm_eps=1e-5,
        rope_ratio=1.0,
        qkv_bias=True,
        eos_token_id=(2,),
        pad_token_id=0,
    )
    return _write(folder, model, "THUDM/chatglm3-6b")


def write_chatglm_6b(folder: Path) -> Path:
    """A ChatGLM-6B: ice_text.model, which has the special tokens."""
    folder.mkdir()
    blanks = [f"<|blank_{count}|>" for count in range(2, 81)]
    control = ["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
    pieces = _pieces(
        folder / "ice_text.model",
        pad_id=3,
        user_defined_symbols=["<n>", "<|tab|>", *blanks],
        control_symbols=control,
    )
    mask, gmask, _, sop, eop = map(pieces.PieceToId, control)
    model = chatglm_6b.from_settings(
        _SIZES
        | {"inner_hidden_size": 192, "layernorm_epsilon": 1e-5, "pad_token_id": 3}
        | {"bos_token_id": sop, "eos_token_id": (eop,)}
        | {"mask_token_id": mask, "gmask_token_id": gmask}
    )
    return _write(folder, model, "THUDM/chatglm-6b")


def _pieces(path: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        input=str(FIXTURES / "text/lighthouse.txt"),
        model_writer=data,
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(data.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=data.getvalue())


def _write(folder: Path, model: Decoder, name: str) -> Path:
    tensors = to_hugging_face(random_checkpoint(model, seed=3), model)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    for file, content in (
        ("config.json", hf_from_model_config(model)),
        ("tokenizer_config.json", {"tokenizer_class": "ChatGLMTokenizer", "name_or_path": name}),
    ):
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder
