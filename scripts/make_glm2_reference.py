"""Makes tests/fixtures/reference/chatglm_biases with the real MindFormers 1.0.2.

.venv-mindformers/bin/python scripts/make_glm2_reference.py: a ChatGLM2 with biases everywhere,
LayerNorm and no norm before the head, in the form of Hugging Face, whose names differ by a prefix.
"""

from __future__ import annotations

import json
from pathlib import Path

import real_mindformers  # noqa: F401  (before mindformers)

import mindspore as ms  # isort: skip
import numpy as np
from mindformers.models.glm2 import ChatGLM2Config, ChatGLM2ForConditionalGeneration

TARGET = Path(__file__).parent.parent / "tests" / "fixtures" / "reference" / "chatglm_biases"
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
LENGTHS, STEPS = (9, 1, 5), 6


def main() -> None:
    """Write the folder."""
    types = ("param_init_type", "compute_dtype", "layernorm_compute_type", "embedding_type")
    config = ChatGLM2Config(**CONFIG, **dict.fromkeys((*types, "mask_type"), "float32"))
    network = ChatGLM2ForConditionalGeneration(config)
    network.set_train(False)
    rng = np.random.default_rng(7)
    tensors = {}
    for name, parameter in network.parameters_and_names():
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
    TARGET.mkdir(exist_ok=True)
    described = {**CONFIG, "architectures": ["ChatGLMModel"], "model_type": "chatglm"}
    described.update(eos_token_id=2, pad_token_id=0, original_rope=True, tie_word_embeddings=False)
    text = json.dumps(described, indent=2, sort_keys=True) + "\n"
    (TARGET / "config.json").write_text(text, encoding="utf-8")
    write_safetensors({theirs(name): values for name, values in tensors.items()})
    np.savez_compressed(
        TARGET / "expected.npz",
        prompts=prompts,
        lengths=np.array(LENGTHS, np.int32),
        continuations=continuations,
        logits=np.stack(logits).astype(np.float32),
    )


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
