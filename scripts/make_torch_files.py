"""Makes tests/fixtures/torch: files as the real torch.save writes them (2.13 was used).

.venv-bench/bin/python scripts/make_torch_files.py
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent.parent / "tests/fixtures/torch"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = OrderedDict(
        plain=base,
        half=base.half(),
        bfloat16=base.bfloat16(),
        transposed=base.t(),
        part=base[1:3, 2:5],
        parameter=torch.nn.Parameter(base + 1),
        tied=base,
        scalar=torch.tensor(2.5),
        empty=torch.empty(0, 3),
    )
    tensors["attn.bias"] = torch.ones(2, 2, dtype=torch.bool)  # a buffer
    torch.save(tensors, FOLDER / "zip.bin")
    torch.save(tensors, FOLDER / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save(tensors, FOLDER / "protocol_4.bin", pickle_protocol=4)
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    torch.save(layer.state_dict(), FOLDER / "state_dict.bin")  # with attributes of its own
    torch.save(layer, FOLDER / "module.bin")  # the object itself
    sparse = torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2))
    torch.save({"sparse": sparse}, FOLDER / "sparse.bin")
    torch.save({"expanded": base.expand(3, 4, 6)}, FOLDER / "expanded.bin")
    torch.save({"double": base.double()}, FOLDER / "double.bin")
    torch.save({"step": 3, "model": tensors}, FOLDER / "training.bin")
    # A bloom of two layers and 4 heads, as AutoModelForCausalLM.save_pretrained named its tensors.
    shapes = {"word_embeddings.weight": (32, 16)}
    norms = ["word_embeddings_layernorm", "ln_f"]
    for layer in ("h.0.", "h.1."):
        norms += [f"{layer}input_layernorm", f"{layer}post_attention_layernorm"]
        for name, width in (
            ("self_attention.query_key_value", (48, 16)),
            ("self_attention.dense", (16, 16)),
            ("mlp.dense_h_to_4h", (64, 16)),
            ("mlp.dense_4h_to_h", (16, 64)),
        ):
            shapes |= {f"{layer}{name}.weight": width, f"{layer}{name}.bias": width[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (16,), f"{name}.bias": (16,)}
    bloom = {f"transformer.{name}": torch.randn(shape).half() for name, shape in shapes.items()}
    bloom["lm_head.weight"] = bloom["transformer.word_embeddings.weight"]
    (FOLDER / "bloom").mkdir(exist_ok=True)
    torch.save(OrderedDict(bloom), FOLDER / "bloom/pytorch_model.bin")


if __name__ == "__main__":
    main()
