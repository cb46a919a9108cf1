"""Compares the logits of GGUF files of tiny random models here with those of llama.cpp:

    .venv-bench/bin/python scripts/compare_llama_cpp.py [CASE...]

The models are those of reference_cases.py with the changes of CASES: what no GGUF file has a word
for, or llama.cpp no code, is as in the published models. Prints a line for each: the file's
architecture, and the largest difference of logits, relative to the largest, between llama.cpp and
ours, and between ours and transformers'. They are those after a prompt of 33 tokens and after each
of seven more. The exit code is 1 where a difference is larger than rounding. Needs: torch,
transformers, gguf, llama-cpp-python.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from make_reference import difference, random_weights, use_chatglm_names
from numpy.typing import NDArray
from reference_cases import cases
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights.formats.gguf_checkpoint import config_of_gguf, from_gguf
from lite_runner.weights.formats.gguf_file import open_gguf
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.model_gguf import ARCHITECTURES as OLDER
from tests.model_gguf import write_model_gguf
from tests.newer_gguf import WITHOUT_TRANSFORMERS, write_newer_gguf, write_random_folder

TOKENS, PROMPT = 40, 33
WINDOWS = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 6}
ROUNDING = 5e-5
TABLE = 1e-3  # of GELU, which llama.cpp looks up in a table of float16

PLAIN_BIASES = {"attention_bias": False, "mlp_bias": False}
WHOLE = {"sliding_window": None}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 16}
# As many heads in all as the model is wide, or heads of that size.
WIDE, WIDE_12 = {"hidden_size": 64}, {"hidden_size": 48}
LITE = {"num_hidden_layers": 27, "q_lora_rank": None}  # llama.cpp knows V2-Lite by its layers
SAME_KEYS = {"linear_value_head_dim": 8}  # as wide as values
EVERY_FOURTH = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_hidden_layers": 4,
}
EVERY_FOURTH |= SAME_KEYS
# The case of reference_cases.py, with a word behind it where there are two, and what is changed.
CASES: dict[str, dict[str, Any]] = {
    "bloom": {},
    "gpt2_inner": {},
    "mpt": {"attn_config": {}},
    "llama": {},
    "llama_tied_mha": {},
    "mistral": WHOLE,
    "mistral_long": WHOLE,
    "mixtral": WHOLE,
    "qwen2": {},
    "qwen2 vl": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3 vl": {},
    "qwen3_moe": {},
    "qwen3_next": SAME_KEYS,
    "qwen3_5_text": EVERY_FOURTH,
    "qwen3_5_moe_text": EVERY_FOURTH,
    "smollm3": {},
    "olmo2": WIDE,
    "olmo3": {},
    "olmoe": {"num_key_value_heads": 4},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {},
    "granitemoehybrid_dense": {
        "num_experts_per_tok": 0,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "glm": WIDE,
    "glm4": {},
    "chatglm": WIDE,
    "glm4_moe": {},
    "gemma": {},
    "gemma2": {"sliding_window": 64},
    "gemma3": {
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
    "gemma4_moe": {"attention_bias": False, "final_logit_softcapping": 30.0},
    "gemma4_sides": {},
    "phi": {},
    "phi3": WHOLE,
    "phi3_long": {},
    "starcoder2": WHOLE,
    "gpt_neox": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v2": {"q_lora_rank": 16, "n_group": 1, "topk_group": 1},
    "deepseek_v2 lite": LITE | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3 lite": LITE | {"rope_parameters": ROPE},
    "ernie4_5": {"use_bias": False},
    "exaone4": WIDE_12
    | {"num_hidden_layers": 64, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16},
    "exaone4_whole": WIDE_12,
    "falcon": {},
    "falcon_new": {},
    "gpt_oss": WIDE
    | {"head_dim": 16, "intermediate_size": 32, "swiglu_limit": 7.0}
    # Its ramp ends at a whole dimension, to which llama.cpp rounds it.
    | {"rope_parameters": YARN | {"rope_theta": 42.05, "truncate": False}},
    "hunyuan": {"attention_bias": False},
    "hunyuan_moe": {},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192},
    "nemotron": PLAIN_BIASES | WIDE_12,
    "nemotron_h": {"use_bias": False, "mlp_bias": False},
    "nemotron_h_moe": {},
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "stablelm": {},
    "stablelm_normed": {},
}


# Text models of those that read images.
VISION = {"qwen2 vl": {"qwen2": "qwen2vl"}, "qwen3 vl": {"qwen3": "qwen3vl"}}


def usual_vocabulary(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    """llama.cpp takes no file without a tokenizer."""
    ADD_TOKENS(writer, tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    if writer.arch.endswith("vl"):
        writer.add_rope_dimension_sections([2, 1, 1, 0])


ADD_TOKENS = gguf.GGUFWriter.add_token_list
gguf.GGUFWriter.add_token_list = usual_vocabulary  # type: ignore[method-assign]


def made(name: str, folder: Path, tokens: NDArray[np.int32]) -> NDArray[np.float32] | None:
    """Write a Hugging Face folder of a case; returns transformers' logits, None: it has no code."""
    if name in WITHOUT_TRANSFORMERS:
        write_random_folder(folder, name)
        return None
    case = next(one for one in cases() if one.name == name.split()[0])
    config = type(case.config)(**case.config.to_dict() | CASES[name])
    model = random_weights(dataclasses.replace(case, config=config)).eval()
    model.save_pretrained(folder)
    found: NDArray[np.float32] = (
        model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    )
    if case.chatglm:
        use_chatglm_names(folder, config)
    return found


def ours(path: Path, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits behind each token from the last one of the prompt on."""
    file = open_gguf(path)
    model = config_of_gguf(file)
    weights = QuantizedWeights(from_gguf(file, model), model)
    backend = NativeBackend(model, pack(model, weights), NativeOptions(1, TOKENS))
    places = [slice(0, PROMPT), *(slice(at, at + 1) for at in range(PROMPT, TOKENS))]
    found = np.stack([backend.forward([Row(0, tokens[at], at.start)])[0] for at in places])
    backend.close()
    return found


ASK = f"""
import sys, llama_cpp, numpy as np
model = llama_cpp.Llama(
    sys.argv[1], n_ctx=64, logits_all=True, n_threads=1, type_k=0, type_v=0  # float32
)
model.eval(np.load(sys.argv[2]).tolist())
np.save(sys.argv[2], model.scores[{PROMPT - 1}:{TOKENS}])
"""


def theirs(path: Path, tokens: NDArray[np.int32]) -> NDArray[np.float32] | str:
    """llama.cpp's logits, or why it has none; it may end its process."""
    array = path.with_suffix(".npy")
    np.save(array, tokens)
    command = [sys.executable, "-c", ASK, str(path), str(array)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        found: NDArray[np.float32] = np.load(array)
        return found
    lines = [
        one for one in done.stderr.splitlines() if "error loading model:" in one or "ASSERT" in one
    ]
    return (lines or done.stderr.splitlines())[-1].rpartition("error loading model: ")[2]


def main() -> int:
    """Print the table of all cases, or of those that are named."""
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf.gguf_writer.logger.setLevel("ERROR")  # of keys that are written twice
    names, failed = sys.argv[1:] or [*CASES, *WITHOUT_TRANSFORMERS], 0
    print("| case | `general.architecture` | llama.cpp and ours | ours and transformers |")
    print("|---|---|---|---|")
    for name in names:
        tokens = np.random.default_rng(0).integers(3, 64, TOKENS).astype(np.int32)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            known, path = made(name, folder, tokens), folder / "model.gguf"
            raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if raw["model_type"] in OLDER:
                with patch.dict(OLDER, VISION.get(name, {})):
                    write_model_gguf(path, folder, metadata=WINDOWS if name == "gemma3" else None)
            else:
                write_newer_gguf(path, folder)
            found, asked = ours(path, tokens), theirs(path, tokens)
            file = open_gguf(path)
            architecture = file.metadata["general.architecture"]
            allowed = TABLE if "gelu" in config_of_gguf(file).feed_forward.function else ROUNDING
        gaps = [asked if isinstance(asked, str) else difference(asked, found)]
        gaps += [] if known is None else [difference(found, known[PROMPT - 1 :])]
        failed += any(isinstance(gap, str) or gap > allowed for gap in gaps)
        shown = [gap if isinstance(gap, str) else f"{gap:.0e}" for gap in gaps]
        print(f"| {name} | {architecture} | {' | '.join([*shown, '-'][:2])} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
