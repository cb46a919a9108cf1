"""The files that are damaged: fixtures of the tests, and what the package itself writes of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.numpy import load_file, save_file

from fuzz import engines, formats, texts
from fuzz.children import Case
from fuzz.readers import Read, plan, run, tokenizer
from lite_runner.app import main
from lite_runner.mindir.skim import has_custom_operators
from lite_runner.weights.sharding.strategy import read_strategy
from tests.paths import FIXTURES
from tests.tiny_gguf import write_tiny_gguf
from tests.tokenizer_files import write_ascii_tokenizer

MODEL = ("predict_data=hi", "load_checkpoint=.", "model=auto")


def cases(folder: Path) -> Iterator[Case]:
    """Every case, with its files made in `folder`, which is the current one."""
    yield from _checkpoints(folder)
    yield from _shards(folder)
    yield from _adapters(folder)
    yield from _exports(folder)
    yield from engines.cases(folder)
    yield from texts.tokenizers_of(folder)
    yield from texts.plain_texts(folder)


def _checkpoints(folder: Path) -> Iterator[Case]:
    for family in ("bloom", "gpt2", "llama_rope_yarn", "llama_rope_llama3", "mistral", "qwen3"):
        model = _model(family, folder / family)
        yield Case(f"config.json/{family}", model, "config.json", formats.json_text, run(*MODEL))
    llama = _model("llama", folder / "llama")
    read = run(*MODEL)
    yield Case("safetensors", llama, "model.safetensors", formats.safetensors, read)
    generation = '{"eos_token_id": [1, 2], "pad_token_id": 0, "bos_token_id": 1, "top_p": 0.9}'
    (llama / "generation_config.json").write_text(generation)
    yield Case("generation_config.json", llama, "generation_config.json", formats.json_text, read)

    _made("run_mode=quantize", "load_checkpoint=llama", "quant=a16w8", "quantize_output=w8")
    _made("run_mode=quantize", "load_checkpoint=mistral", "quant=a16w4", "quantize_output=w4")
    for name, kind in (("w8", "quant=a16w8"), ("w4", "quant=a16w4")):
        read = run(*MODEL, kind)
        where = folder / name
        _without(where / "quantization.json", "checksum")
        yield Case(f"quantization.json/{name}", where, "quantization.json", formats.json_text, read)
        file, read = "model.safetensors", _with_digest(read)
        yield Case(f"quantized/{name}", where, file, formats.safetensors, read)

    indexed = _model("llama", folder / "indexed")
    parts = {f"model-0000{i}-of-00002.safetensors": i for i in (1, 2)}
    tensors = load_file(indexed / "model.safetensors")
    (indexed / "model.safetensors").unlink()
    places = {name: list(parts)[i % 2] for i, name in enumerate(sorted(tensors))}
    for part in parts:
        save_file({n: tensors[n] for n, place in places.items() if place == part}, indexed / part)
    index = "model.safetensors.index.json"
    (indexed / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    yield Case("index.json", indexed, index, formats.json_text, run(*MODEL))

    ckpt = folder / "ckpt"
    ckpt.mkdir()
    _made(
        "run_mode=convert",
        "load_checkpoint=llama",
        "convert_format=ckpt",
        "convert_output=ckpt/m.ckpt",
    )
    yield Case("ckpt", ckpt, "m.ckpt", formats.protobuf, run(*MODEL))
    for family in ("bloom", "gpt2", "llama"):
        theirs = _copied(FIXTURES / f"mindformers/{family}/plain", folder / f"mf_{family}")
        write_ascii_tokenizer(theirs, 64)
        words = ("predict_data=hi", "load_checkpoint=.", f"--config={family}.yaml")
        yaml, weights = f"{family}.yaml", f"{family}.ckpt"
        yield Case(f"MindFormers yaml/{family}", theirs, yaml, formats.yaml_text, run(*words))
        yield Case(f"ckpt/{family}", theirs, weights, formats.protobuf, run(*words))

    torch = _model("bloom", folder / "torch")
    (torch / "model.safetensors").unlink()
    sizes = json.loads((torch / "config.json").read_bytes())
    sizes |= {"hidden_size": 16, "vocab_size": 32}
    (torch / "config.json").write_text(json.dumps(sizes))
    write_ascii_tokenizer(torch, 32)
    shutil.copy(FIXTURES / "torch/bloom/pytorch_model.bin", torch)
    yield Case("pytorch_model.bin", torch, "pytorch_model.bin", formats.torch_zip, run(*MODEL))

    gguf = folder / "gguf"
    gguf.mkdir()
    write_tiny_gguf(gguf / "m.gguf")
    yield Case("gguf", gguf, "m.gguf", formats.gguf, run(*MODEL))
    yield Case("gguf tokenizer", gguf, "m.gguf", formats.gguf, tokenizer("m.gguf"))


def _with_digest(read: Read) -> Read:
    """Reads a quantized checkpoint whose manifest has the digest of the weights as they are."""

    def read_as_written(folder: Path) -> object:
        path = folder / "quantization.json"
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"sha256": digest}))
        return read(folder)

    return read_as_written


def _shards(folder: Path) -> Iterator[Case]:
    words = ("run_mode=shard", "parallel=tp2", "load_checkpoint=llama", "model=auto")
    _made(*words, "shard_output=cut", "shard_format=safetensors")
    cut = folder / "cut"
    merge = ("run_mode=shard", "parallel=single", "load_checkpoint=.", "shard_output=out.ckpt")
    _without(cut / "rank_1/manifest.json", "checksum")
    read = plan(*merge, "model=auto")
    yield Case("shard manifest", cut, "rank_1/manifest.json", formats.json_text, read)
    piece = next(path.relative_to(cut) for path in cut.glob("rank_0/*.safetensors"))
    yield Case("shard", cut, str(piece), formats.safetensors, read)
    strategy = "strategy/ckpt_strategy_rank_0.ckpt"
    yield Case("strategy", cut, strategy, formats.protobuf, lambda at: read_strategy(at / strategy))
    bare = _copied(cut, folder / "bare")
    for path in bare.glob("rank_*/manifest.json"):
        path.unlink()
    read = plan(*merge, "src_strategy_path_or_dir=strategy")
    yield Case("strategy/merging", bare, strategy, formats.protobuf, read)


def _adapters(folder: Path) -> Iterator[Case]:
    for family, name in (("llama", "patterns"), ("gpt2", "all"), ("qwen2", "head")):
        both = _model(family, folder / f"lora_{family}")
        _copied(FIXTURES / f"adapters/{family}", both / "adapters")
        words = (*MODEL, "run_mode=slora", "adapter_path=adapters", f"adapter_id={name}")
        for file, mutation in (
            ("lora_adapter.json", formats.json_text),
            (f"{name}/adapter_config.json", formats.json_text),
            (f"{name}/adapter_model.safetensors", formats.safetensors),
        ):
            place = f"adapters/{file}"
            yield Case(f"PEFT {file}/{family}", both, place, mutation, run(*words))
    both = _model("llama", folder / "lora_mindformers")
    adapters = ("adapter_path=lora_llama/adapters/second_layer", "convert_format=mindformers")
    _made("run_mode=convert", "load_checkpoint=llama", *adapters, f"convert_output={both}/own")
    for file, mutation in (
        ("adapter_config.json", formats.json_text),
        ("adapter_model.ckpt", formats.protobuf),
    ):
        read = run(*MODEL, "run_mode=slora", "adapter_path=own", "adapter_id=own")
        yield Case(f"MindFormers {file}", both, f"own/{file}", mutation, read)


def _exports(folder: Path) -> Iterator[Case]:
    words = ("predict_data=hi", "backend=mslite", "infer.model_dir=.")
    for name in engines.LAYOUTS:
        exported = _copied(engines.exported(name), folder / f"exported_{name}")
        _without(exported / "manifest.json", "checksum")
        for file, mutation in (
            ("manifest.json", formats.json_text),
            ("tokenizer.json", formats.json_text),
            (next(exported.glob("*.yaml")).name, formats.yaml_text),
        ):
            yield Case(f"exported {file}/{name}", exported, file, mutation, plan(*words))
    for family in ("llama", "gpt2", "bloom"):
        theirs = folder / f"mindir_{family}"
        theirs.mkdir()
        write_ascii_tokenizer(theirs, 64)
        shutil.copy(FIXTURES / f"mindformers/{family}/past/{family}.yaml", theirs)
        for part in ("prefill", "inc"):
            packed = FIXTURES / f"mindformers/{family}/mindir/cache_{part}.mindir.gz"
            (theirs / f"m_{part}.mindir").write_bytes(gzip.decompress(packed.read_bytes()))

        def read(at: Path, family: str = family) -> None:
            has_custom_operators(at / "m_prefill.mindir")
            plan(*words, f"--config={family}.yaml")(at)

        yield Case(f"MindIR/{family}", theirs, "m_prefill.mindir", formats.protobuf, read)


def _model(case: str, folder: Path) -> Path:
    """A tiny model with a tokenizer, as on the hub."""
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / "reference" / case / file, folder)
    write_ascii_tokenizer(folder)
    return folder


def _copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def _without(manifest: Path, *fields: str) -> None:
    """Leave out of a manifest the checksums that would refuse every mutation at once."""
    raw = json.loads(manifest.read_bytes())
    manifest.write_text(json.dumps({name: raw[name] for name in raw if name not in fields}))


def _made(*words: str) -> None:
    if main([*words, "verbosity=0"]) != 0:
        raise SystemExit(f"no corpus: {' '.join(words)}")
