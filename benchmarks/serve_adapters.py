"""Random LoRA adapters for benchmarks/serve.py, as PEFT writes them and as llama.cpp reads them."""

from __future__ import annotations

from pathlib import Path

import gguf

from lite_runner.bench.cell import RANK, random_adapters
from lite_runner.config.argv import parse
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.lora import adapter_writer
from lite_runner.weights.lora.adapter import Adapter

_NAMES = {
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}


def write_adapters(model: Path, folder: Path, count: int) -> dict[str, str]:
    """Adapters of all linear layers of a Llama; how a command names them: {adapters}, {ggufs}."""
    config, _ = resolve(parse([f"model={model}", "predict_data=ids"], heads()))
    decoder = locate(config.source).model
    made = {one.name: one for one in random_adapters(decoder, count, RANK)}
    adapter_writer.write_adapters(made, decoder, folder, "peft", listed=True)
    files = [folder / f"{name}.gguf" for name in made]
    for file, adapter in zip(files, made.values(), strict=True):
        _write_gguf(file, adapter)
    listing = folder / "lora_adapter.json"
    return {"adapters": str(listing), "ggufs": ",".join(map(str, files))}


def _write_gguf(path: Path, adapter: Adapter) -> None:
    """Rows of q and k are not permuted, as they had to be for the same answers: they are random."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(RANK))
    for weight, pair in adapter.pairs.items():
        _, _, layer, module = weight.removesuffix(".weight").split(".", 3)
        a, b = pair.values()
        writer.add_tensor(f"blk.{layer}.{_NAMES[module]}.weight.lora_a", a)
        writer.add_tensor(f"blk.{layer}.{_NAMES[module]}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
