"""Makes tests/fixtures/reference/chatglm_6b from what MindFormers 1.0.2 computed.

Takes the folder with glm.ckpt, cases.json and ref.npz: see tests/fixtures/README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from lite_runner.architectures.chatglm_6b import from_settings
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.formats import hf_from_model_config
from lite_runner.weights.formats.hugging_face import to_hugging_face
from lite_runner.weights.formats.safetensors_file import write_safetensors

TARGET = Path(__file__).parent.parent / "tests" / "fixtures" / "reference" / "chatglm_6b"
# Each is a case's number, and how many of its tokens are the prompt; four more are forced.
PROMPTS = ((3, 6), (6, 4), (6, 6))
STEPS = 4


def main() -> None:
    """Write the folder."""
    source = Path(sys.argv[1])
    case = json.loads((source / "cases.json").read_text(encoding="utf-8"))["glm"]
    logits = np.load(source / "ref.npz")
    given = case["config"] | {"tie_word_embeddings": False, "layernorm_epsilon": 1e-5}
    model = from_settings(given | {"eos_token_id": (given["eos_token_id"],)})
    TARGET.mkdir(exist_ok=True)
    described = json.dumps(hf_from_model_config(model), indent=2) + "\n"
    (TARGET / "config.json").write_text(described, encoding="utf-8")
    tensors = to_hugging_face(open_checkpoint(source / "glm.ckpt", model), model)
    write_safetensors(TARGET / "model.safetensors", tensors, {"format": "pt"})
    greedy = {"prompts": case["prompts"], "tokens": list(case["greedy"].values())}
    (TARGET / "greedy.json").write_text(json.dumps(greedy) + "\n", encoding="utf-8")
    prompts = np.zeros((len(PROMPTS), max(length for _, length in PROMPTS)), np.int32)
    for row, (index, length) in zip(prompts, PROMPTS, strict=True):
        row[:length] = case["prompts"][index][:length]
    np.savez_compressed(
        TARGET / "expected.npz",
        prompts=prompts,
        lengths=np.array([length for _, length in PROMPTS], np.int32),
        continuations=np.array(
            [case["prompts"][index][length : length + STEPS] for index, length in PROMPTS], np.int32
        ),
        logits=np.stack(
            [
                logits[f"glm/{index}/logits"][length - 1 : length + STEPS]
                for index, length in PROMPTS
            ]
        ),
    )


if __name__ == "__main__":
    main()
