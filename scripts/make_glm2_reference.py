"""Makes tests/fixtures/reference/chatglm_biases with the real MindFormers 1.0.2, and
tests/fixtures/mindformers/glm2/ptuning2 and .../pangualpha.

.venv-mindformers/bin/python scripts/make_glm2_reference.py: a ChatGLM2 with biases everywhere,
LayerNorm and no norm before the head, in the form of Hugging Face, whose names differ by a prefix;
and one with learned keys (p-tuning v2) as a checkpoint of MindFormers.
"""

from __future__ import annotations

import json
from pathlib import Path

import real_mindformers  # noqa: F401  (before mindformers)

import mindspore as ms  # isort: skip
import numpy as np
from mindformers.models.glm2 import (
    ChatGLM2Config,
    ChatGLM2ForConditionalGeneration,
    ChatGLM2WithPtuning2,
)
from mindformers.models.pangualpha import PanguAlphaConfig, PanguAlphaHeadModel
from mindformers.pet.pet_config import Ptuning2Config

from make_mindformers import fill  # isort: skip

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
TARGET = FIXTURES / "reference" / "chatglm_biases"
LEARNED = FIXTURES / "mindformers" / "glm2" / "ptuning2"
CONFIG = {
    "padded_vocab_size": 96,
    "hidden_size": 36,
    "ffn_hidden_size": 52,
    "num_layers": 2,
    "kv_channels": 12,
    "num_attention_heads": 3,
    "multi_query_attention": True,
    "multi_query_group_num": 1,
    "seq_length": 24,
    "layernorm_epsilon": 1e-3,
    "rope_ratio": 2,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "rmsnorm": False,
    "post_layer_norm": False,
    "apply_residual_connection_post_layernorm": False,
}
# Of tests/test_real_mindformers_glm.py.
TUNED = {
    **{"padded_vocab_size": 130, "hidden_size": 48, "ffn_hidden_size": 80, "num_layers": 2},
    **{"kv_channels": 12, "num_attention_heads": 4, "multi_query_attention": True},
    **{"multi_query_group_num": 2, "seq_length": 48, "layernorm_epsilon": 1e-5, "rope_ratio": 1},
    **{"add_bias_linear": False, "add_qkv_bias": True, "rmsnorm": True, "post_layer_norm": True},
    **{"apply_residual_connection_post_layernorm": False, "pre_seq_len": 5},
}
LENGTHS, STEPS = (9, 1, 5), 6
PANGU = FIXTURES / "mindformers" / "pangualpha"
# Of tests/test_real_mindformers_glm.py, too.
PANGU_CONFIG = {
    **{"vocab_size": 64, "hidden_size": 16, "ffn_hidden_size": 64, "num_layers": 3, "num_heads": 2},
    **{"seq_length": 16, "pad_token_id": 0, "eos_token_id": 2},
}


def main() -> None:
    """Write the folders."""
    tensors, expected = computed(ChatGLM2ForConditionalGeneration, CONFIG)
    described = {**CONFIG, "architectures": ["ChatGLMModel"], "model_type": "chatglm"}
    described.update(eos_token_id=2, pad_token_id=0, original_rope=True, tie_word_embeddings=False)
    TARGET.mkdir(exist_ok=True)
    text = json.dumps(described, indent=2, sort_keys=True) + "\n"
    (TARGET / "config.json").write_text(text, encoding="utf-8")
    write_safetensors({theirs(name): values for name, values in tensors.items()})
    np.savez_compressed(TARGET / "expected.npz", **expected)
    ms.set_context(mode=ms.PYNATIVE_MODE)  # its graph fails to compile
    pet = Ptuning2Config(pre_seq_len=5, prefix_projection=True, projection_dim=6)
    tensors, expected = computed(ChatGLM2WithPtuning2, {**TUNED, "pet_config": pet})
    LEARNED.mkdir(exist_ok=True)
    kept = [{"name": name, "data": ms.Tensor(values)} for name, values in tensors.items()]
    ms.save_checkpoint(kept, str(LEARNED / "glm2.ckpt"))
    np.savez_compressed(LEARNED / "expected.npz", **expected)
    make_pangualpha()


def make_pangualpha() -> None:
    """A PanGu-alpha of random weights, and its logits behind each token of a text."""
    types = dict.fromkeys(("param_init_type", "compute_dtype", "softmax_compute_type"), "float32")
    network = PanguAlphaHeadModel(PanguAlphaConfig(batch_size=1, **PANGU_CONFIG, **types))
    network.set_train(False)
    fill(network, "pangualpha")
    tokens = np.random.default_rng(3).integers(3, 64, (1, 16)).astype(np.int32)
    logits = network(ms.Tensor(tokens))[0].asnumpy()[0]
    PANGU.mkdir(exist_ok=True)
    ms.save_checkpoint(network, str(PANGU / "pangualpha.ckpt"))
    np.savez_compressed(PANGU / "expected.npz", tokens=tokens[0], logits=logits)


def computed(kind, settings) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random weights of a network, and its logits."""
    types = ("param_init_type", "compute_dtype", "layernorm_compute_type", "embedding_type")
    config = ChatGLM2Config(**settings, **dict.fromkeys((*types, "mask_type"), "float32"))
    network = kind(config)
    network.set_train(False)
    if kind is ChatGLM2WithPtuning2:  # which rounds its keys to float16, whatever the others are
        network.prefix_encoder.cast = lambda values, dtype: values
    rng = np.random.default_rng(7)
    tensors = {}
    for parameter in network.get_parameters():
        name = parameter.name
        if name.endswith("_prefix"):  # 0, 1, ...
            tensors[name] = parameter.asnumpy()
            continue
        values = rng.normal(0, 0.3, parameter.shape).astype(np.float32)
        values += 1 if name.endswith(".gamma") else 0
        parameter.set_data(ms.Tensor(values))
        tensors[name] = values
    prompts = rng.integers(3, 96, (len(LENGTHS), max(LENGTHS))).astype(np.int32)
    continuations = rng.integers(3, 96, (len(LENGTHS), STEPS)).astype(np.int32)
    logits = []
    for row, length in enumerate(LENGTHS):
        prompt, forced = prompts[row], continuations[row]
        prompt[length:] = 0
        tokens = np.full((1, config.seq_length), config.pad_token_id, np.int32)
        tokens[0, : length + STEPS] = [*prompt[:length], *forced]
        found = network(ms.Tensor(tokens))[0]
        logits.append(found.asnumpy().reshape(config.seq_length, -1)[length - 1 : length + STEPS])
    return tensors, {
        "prompts": prompts,
        "lengths": np.array(LENGTHS, np.int32),
        "continuations": continuations,
        "logits": np.stack(logits).astype(np.float32),
    }


def theirs(name: str) -> str:
    """Hugging Face's name of a parameter."""
    for ending, other in (
        ("embedding_table", "word_embeddings.weight"),
        (".gamma", ".weight"),
        (".beta", ".bias"),
    ):
        if name.endswith(ending):
            return name[: -len(ending)] + other
    return name


def write_safetensors(tensors: dict[str, np.ndarray]) -> None:
    """model.safetensors."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, values in tensors.items():
        places = [at, at + values.nbytes]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": places}
        at = places[1]
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    data = b"".join(values.tobytes() for values in tensors.values())
    (TARGET / "model.safetensors").write_bytes(len(told).to_bytes(8, "little") + told + data)


if __name__ == "__main__":
    main()
