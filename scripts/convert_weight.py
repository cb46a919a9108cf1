"""Convert weights between Hugging Face and MindSpore, with the flags of MindFormers' scripts.

    python scripts/convert_weight.py --n_head=32 --hidden_size=4096 \\
        --torch_path=BELLE-7B-2M/pytorch_model.bin --mindspore_path=output_path
    python scripts/convert_weight.py --torch_ckpt_path llama-2-7b-hf/ \\
        --mindspore_ckpt_path llama2_7b.ckpt
    python scripts/convert_weight.py --model llama --input_path llama-2-7b-hf/ \\
        --output_path llama2_7b.ckpt --dtype fp16
    python scripts/convert_weight.py --model llama --reversed --input_path llama2_7b.ckpt \\
        --output_path llama-hf

The model's sizes are read from the config.json beside the weights; bloom and gpt2 can do without.
The source may be a folder, a file of it, or, as in MindFormers' own documents, a file in it
that is not there. What is written has config and tokenizer beside it, and is never a pickle. Wrong
flags end it with 2, and everything else with the exit codes of run_lite.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner import progress, str2bool
from lite_runner.app import guarded
from lite_runner.architectures import architecture_of, bloom, gpt2
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights import DType, LazyTensor
from lite_runner.weights.checkpoint import PICKLES, model_config_of, tensors_at
from lite_runner.weights.write import convert, files_folder

DTYPES: dict[str, DType] = {
    **dict.fromkeys(("fp32", "float32"), "F32"),
    **dict.fromkeys(("fp16", "float16"), "F16"),
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
}
_LLAMAS = ("llama", "llama2", "llama3", "qwen1_5", "qwen2", "qwen2_5", "yi")
FAMILIES = {  # what a model is called there: the network that it is of
    **dict.fromkeys(_LLAMAS, "LlamaForCausalLM"),
    **dict.fromkeys(("gpt", "gpt2"), "GPT2LMHeadModel"),
    "bloom": "BloomLMHeadModel",
}
COMBINED = "combine.ckpt"  # the file in the folder that bloom's script of release 1.0 writes


def parser() -> argparse.ArgumentParser:
    """The flags of MindFormers' convert_weight.py: those of a model, and of the one for all."""
    flags = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    add("--model", choices=sorted(FAMILIES), help="checked against the config.json")
    source = flags.add_mutually_exclusive_group(required=True)
    for name in ("--input_path", "--torch_ckpt_path", "--torch_ckpt_dir", "--torch_path"):
        source.add_argument(name, dest="source", type=Path, help="a folder, or a file in it")
    target = flags.add_mutually_exclusive_group(required=True)
    for name in ("--output_path", "--mindspore_ckpt_path", "--mindspore_path"):
        target.add_argument(name, dest="target", type=Path, help="a .ckpt or .safetensors file")
    add("--reversed", action="store_true", help="MindSpore to Hugging Face: a folder")
    add("--dtype", choices=sorted(DTYPES), help="none: as the source has it")
    add("--n_head", type=int, help="of bloom; checked against the config.json")
    add("--hidden_size", type=int, help="of bloom; checked against the config.json")
    add("--layers", type=int, help="of gpt2; checked against the config.json")
    add("--qkv_concat", type=str2bool, default=False, help="only False")
    add("--overwrite", type=str2bool, default=False, help="replace what is there")
    return flags


def source_of(path: Path) -> Path:
    """The source to read: a folder for its weights, and for a shard, or a missing file, in it."""
    is_shard = re.search(r"-\d{5}-of-\d{5}\.\w+$", path.name) is not None
    if is_shard or (not path.exists() and path.suffix and path.parent.is_dir()):
        return path.parent
    return path


def target_of(flags: argparse.Namespace) -> Path:
    """The file to write; MindSpore puts .ckpt behind a name without it."""
    path: Path = flags.target
    if path.suffix in (".ckpt", ".safetensors"):
        return path
    # Bloom's script of release 1.0, which alone has these flags without --model, makes a folder.
    if flags.n_head is not None and flags.model is None:
        return path / COMBINED
    return path.with_name(f"{path.name}.ckpt")


def model_of(path: Path, flags: argparse.Namespace) -> Decoder:
    """The model's sizes, as its files say. Raises ArtifactError, ConfigError for other flags."""
    model = model_config_of(path) or _measured(path, tensors_at(path), flags.n_head)
    asked = {
        "n_head": (flags.n_head, model.num_heads),
        "hidden_size": (flags.hidden_size, model.hidden_size),
        "layers": (flags.layers, model.num_layers),
    }
    for name, (wanted, held) in asked.items():
        if wanted not in (None, held):
            raise ConfigError(f"--{name}: got {wanted}, but {path} is of {held}")
    theirs = architecture_of(model).mindformers
    if flags.model and theirs and FAMILIES[flags.model] != theirs.network:
        raise ConfigError(f"--model: got {flags.model}, but {path} is of {model.architecture}")
    return model


def _measured(path: Path, tensors: Mapping[str, LazyTensor], heads: int | None) -> Decoder:
    """The sizes of a bloom or gpt2 that has no config.json: the shapes tell all but the heads."""
    shapes = {name.removeprefix("transformer."): one.shape for name, one in tensors.items()}
    is_bloom = "word_embeddings.weight" in shapes
    table = shapes.get("word_embeddings.weight" if is_bloom else "wte.weight")
    width = shapes.get("h.0.mlp.dense_h_to_4h.bias" if is_bloom else "h.0.mlp.c_fc.bias")
    if table is None or width is None or len(table) != 2 or (is_bloom and not heads):
        raise ArtifactError(
            f"{path}: no config.json beside the weights, which says the model's sizes",
            "put the model's config.json there (bloom: or --n_head and --hidden_size)",
        )
    blocks = (re.match(r"h\.(\d{1,4})\.", name) for name in shapes)
    layers = {int(match[1]) for match in blocks if match}
    vocab, hidden = table
    heads = heads or max(1, hidden // 64)  # every gpt2 has heads of 64
    if hidden % heads:
        raise ConfigError(f"--n_head: got {heads}, expected a divisor of {hidden}")
    decoder = bloom.decoder if is_bloom else gpt2.decoder
    return decoder(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=len(layers),
        num_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=width[0],
        seq_length=2048 if is_bloom else shapes["wpe.weight"][0],
        norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1 if is_bloom else vocab - 1,
        eos_token_id=(2,) if is_bloom else (vocab - 1,),
        pad_token_id=3 if is_bloom else vocab - 1,
    )


def run(flags: argparse.Namespace) -> None:
    """Do what the flags say. Raises RunnerError."""
    if flags.qkv_concat:
        raise ConfigError(
            "--qkv_concat=True: q, k and v are written apart",
            "leave it out, and qkv_concat: False in MindFormers' yaml",
        )
    source, target = source_of(flags.source), flags.target
    if not flags.reversed:
        target = target_of(flags)
        form = "ckpt" if target.suffix == ".ckpt" else "safetensors"
    elif target.suffix in (*PICKLES, ".ckpt", ".safetensors"):
        raise ConfigError(
            f"{target}: MindSpore to Hugging Face writes a folder with model.safetensors",
            f"give the name of a folder: {target.with_suffix('')}",
        )
    else:
        form = "huggingface"
    model = model_of(source, flags)
    convert(
        source,
        model,
        target,
        form,
        overwrite=flags.overwrite,
        dtype=DTYPES.get(flags.dtype),
        report=progress.note,
    )
    beside = "" if flags.reversed else f", config and tokenizer in {files_folder(target)}"
    progress.note(f"wrote {target}{beside}")


def main(argv: list[str] | None = None) -> int:
    """Run it; gives the exit code."""
    flags = parser().parse_args(argv)

    def action() -> int:
        run(flags)
        return 0

    return guarded(action)


if __name__ == "__main__":
    sys.exit(main())
