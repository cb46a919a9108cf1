"""Open a checkpoint of any format, which is detected from its content."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.system.files import read_json_object
from lite_runner.weights import first_bytes
from lite_runner.weights.formats import INDEX, TORCH_INDEX, model_config_from_hf
from lite_runner.weights.formats.gguf_checkpoint import config_of_gguf, from_gguf
from lite_runner.weights.formats.gguf_file import (
    GGUFFile,
    is_split,
    looks_like_gguf,
    open_gguf,
    parts_of,
)
from lite_runner.weights.formats.safetensors_file import (
    StoredTensor,
    looks_like_safetensors,
    open_safetensors,
    stored_tensors,
)

# The readers of tensors are imported by the functions that open them: a run from packed layers
# opens none.
if TYPE_CHECKING:
    from lite_runner.weights import LazyTensor

LFS_POINTER = b"version https://git-lfs."
_SLIM_INDEX = "quant_model_weight*.safetensors.index.json"  # of msModelSlim
PICKLES = (".bin", ".pt", ".pth", ".pkl")
FILES = ".files"  # suffix of the folder with config and tokenizer of a weights file
LORA = re.compile(r"(.+)\.(?:mindpet_delta_)?lora_([abAB])")  # MindFormers' names
# Of p-tuning v2 and prefix tuning: a table, a network of two layers, and indices 0, 1, ...; a
# layer is named after its first owner, which differs between releases.
LEARNED_KEYS = re.compile(
    r"(?:.+\.)?mindpet_delta_(?:ptuning2|prefixtuning)_"
    r"(embedding\.embedding_table|(?:trans\.[02]|dense_in|dense_out)\.(?:weight|bias)|prefix)"
)
# Tensors that MindSpore saves beside the weights: optimizer and training state, the KV cache of a
# network built with use_past, and the causal masks of gpt2 that MindFormers' conversion keeps.
_TRAINING_STATE = re.compile(
    r"(adam_[mv]|moments?\d?|(max_)?exp_avg(_sq)?|accu_grads)\..+"
    r"|global_step|epoch_num|step_num|loss_scale|learning_rate|scale_sense|beta[12]_power|state_step"
    r"|(current|last_overflow)_iterator_step"
    r"|(.+\.)?(key|value)_(past|cache)"
    r"|backbone\.blocks\.\d+\.attention\.(masked_)?beta"
)


def open_checkpoint(path: Path, config: Decoder) -> dict[str, LazyTensor]:
    """Every tensor of the model by its canonical name, not yet read.

    `path` is a file or a folder: Hugging Face safetensors or pytorch_model.bin (one file or shards
    with an index), MindSpore safetensors or .ckpt with MindFormers' names, GGUF, or what
    run_mode=quantize wrote: quantized matrices read as F32, and have their integers too. Raises
    ArtifactError where it is none of them, is damaged, or does not hold exactly the tensors of
    `config`.
    """
    from lite_runner.architectures.next_token import no_layer
    from lite_runner.weights.formats.hugging_face import from_hugging_face, open_index
    from lite_runner.weights.formats.mindformers import with_canonical_names
    from lite_runner.weights.quantization.quantized_checkpoint import (
        open_quantized,
        read_quantization,
    )

    file = weights_file(path)
    if file.name.endswith(".index.json"):
        return from_hugging_face(open_index(file), config, str(file))
    if looks_like_gguf(file):
        return from_gguf(open_gguf(file), config)
    quantized = read_quantization(file)
    if quantized is not None:
        if config.joins is not None:
            raise no_layer(str(file))
        return open_quantized(file, quantized, config)
    left_out: list[str] = []
    found = _tensors_in(file, left_out)
    if left_out:
        names = f"{', '.join(left_out[:3])}{' ...' if left_out[3:] else ''}"
        progress.note(f"{file}: {len(left_out)} tensors are not weights and are left out: {names}")
    if learned := next((name for name in found if LEARNED_KEYS.fullmatch(name)), None):
        raise ArtifactError(
            f"{file}: holds learned keys and values beside the model's weights, such as {learned}",
            "predict, chat, serve and eval take them by model.model_config.pet_config of a yaml,"
            " with pet_type ptuning2 or prefixtuning",
        )
    lora = next((name for name in found if LORA.fullmatch(name)), None)
    if lora is not None:
        raise ArtifactError(
            f"{file}: holds LoRA weights beside the model's, such as {lora}, and nothing says how "
            "they are scaled",
            "model.model_config.pet_config in a yaml: pet_type: lora, lora_rank, lora_alpha and "
            "target_modules",
        )
    return with_canonical_names(found, config, str(file))


def open_with(
    names: re.Pattern[str], path: Path, config: Decoder
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """The model's tensors, as of `open_checkpoint`, and those of MindFormers' LORA or LEARNED_KEYS
    by their names in the file, empty where it has none."""
    from lite_runner.weights.formats.mindformers import with_canonical_names
    from lite_runner.weights.quantization.quantized_checkpoint import read_quantization

    file = weights_file(path)
    # MindFormers does not write these formats.
    others = file.name.endswith(".index.json") or looks_like_gguf(file) or read_quantization(file)
    found = {} if others else _tensors_in(file)
    apart = {name: tensor for name, tensor in found.items() if names.fullmatch(name)}
    if not apart:
        return open_checkpoint(path, config), {}
    rest = {name: tensor for name, tensor in found.items() if name not in apart}
    return with_canonical_names(rest, config, str(file)), apart


def check_file(path: Path) -> bool:
    """True if another tool has quantized the matrices of the checkpoint at `path`; only headers are
    read, and no model is needed. Raises ArtifactError where it is missing or malformed."""
    file = weights_file(path)
    if looks_like_gguf(file):  # whose blocks are read as they are
        open_gguf(file)
        return False
    from lite_runner.weights.quantization.quantized_checkpoint import read_quantization

    if read_quantization(file) is not None:
        stored_tensors(file)
        return False
    return any(tensor.block_type for tensor in tensors_at(file).values())


def gguf_at(path: Path) -> GGUFFile | None:
    """The GGUF at `path`; None for another format. Raises ArtifactError.

    While the caller holds it, its header is not parsed again for its config, tensors or tokenizer.
    """
    file = weights_file(path)
    return open_gguf(file) if looks_like_gguf(file) else None


def tensors_at(path: Path) -> dict[str, LazyTensor]:
    """The weights of a file or folder by their stored names, whatever the model; not of a GGUF or a
    quantized checkpoint. Raises ArtifactError."""
    from lite_runner.weights.formats.hugging_face import open_index

    file = weights_file(path)
    return open_index(file) if file.name.endswith(".index.json") else _tensors_in(file)


def _tensors_in(file: Path, left_out: list[str] | None = None) -> dict[str, LazyTensor]:
    """The weights of one file by their stored names; names of other tensors, but for buffers, are
    added to `left_out`."""
    from lite_runner.weights.formats.ckpt_file import looks_like_ckpt, open_ckpt
    from lite_runner.weights.formats.hugging_face import is_buffer
    from lite_runner.weights.formats.packed_layouts import layout_of_names
    from lite_runner.weights.formats.packed_matrices import unpack

    def ignore(name: str) -> bool:
        if not is_not_weight(name):
            return False
        if left_out is not None and not is_buffer(name):
            left_out.append(name)
        return True

    if looks_like_safetensors(file):
        others: dict[str, StoredTensor] = {}
        return unpack(open_safetensors(file, ignore, others), others, file)
    from lite_runner.weights.formats.torch_file import looks_like_torch, open_torch

    if file.suffix in PICKLES or looks_like_torch(file):
        return open_torch(file, ignore)
    # A damaged file keeps its suffix: the reader of that format has the best error.
    if file.suffix == ".safetensors":
        return open_safetensors(file)
    if file.suffix == ".ckpt" or looks_like_ckpt(file):
        integers: dict[str, StoredTensor] = {}
        floats = open_ckpt(file, integers)
        kept = {name: tensor for name, tensor in floats.items() if not ignore(name)}
        # Training counters and the like have no layout.
        return unpack(kept, integers, file) if layout_of_names(integers) else kept
    raise ArtifactError(
        f"{file}: not a checkpoint: it starts with {first_bytes(file, 8)!r}, expected safetensors, "
        "MindSpore .ckpt, GGUF or PyTorch's",
        "give load_checkpoint= the weights file, or the folder that holds it",
    )


def config_folder(path: Path) -> Path:
    """The folder with config and tokenizer of the checkpoint at `path`, a file or folder.

    FILE.files beside the weights, as run_mode=convert writes it, so that checkpoints of several
    models may share a folder; else the folder of the weights.
    """
    try:
        file = weights_file(path)
    except ArtifactError:  # a folder of shards, or of a tokenizer alone, or weights not fetched
        if path.is_dir():
            return path
        file = path
    own = file.with_name(file.name + FILES)
    return own if own.is_dir() else file.parent


def weights_file(path: Path) -> Path:
    """The file to read for `path`: itself, or the weights or index in a folder; of a split GGUF
    the first part."""
    if not path.exists():
        raise ArtifactError(f"{path}: no such file or folder")
    file = _weights_in(path) if path.is_dir() else path
    if (first := parts_of(file)[0]).is_file():
        file = first
    if first_bytes(file, len(LFS_POINTER)) == LFS_POINTER:
        raise ArtifactError(
            f"{file}: a pointer of Git LFS, not the file itself", "fetch it: git lfs pull"
        )
    if file.suffix == ".gguf" and not (looks_like_gguf(file) or looks_like_safetensors(file)):
        raise ArtifactError(
            f"{file}: not a GGUF file: it starts with {first_bytes(file, 8)!r}, not b'GGUF'",
            "fetch the file again, and check that it is not an error page or of another format",
        )
    return file


def _weights_in(path: Path) -> Path:
    ranks = rank_folders(path)
    if ranks:
        raise ArtifactError(
            f"{path}: a checkpoint sharded for {len(ranks)} ranks (rank_0 ...), expected a whole"
            " one",
            "merge it first: run_mode=shard parallel=single",
        )
    # Pickles are the last choice.
    for names, suffixes in (
        (("model.safetensors", INDEX, _SLIM_INDEX), (".safetensors", ".ckpt", ".gguf")),
        (("pytorch_model.bin", TORCH_INDEX), PICKLES),
    ):
        for file in (one for name in names for one in sorted(path.glob(name))):
            if file.is_file():
                return file
        found = sorted(item for item in path.iterdir() if item.suffix in suffixes)
        if len(found) == 1 or is_split(found):
            return found[0]
        if found:
            raise ArtifactError(
                f"{path}: {len(found)} checkpoints ({', '.join(item.name for item in found[:5])}), "
                f"expected one, or shards with {names[1]}",
                "give load_checkpoint= the file to read",
            )
    raise ArtifactError(
        f"{path}: the folder holds no checkpoint, expected model.safetensors, {INDEX}, "
        "pytorch_model.bin, or one .safetensors, .ckpt or .gguf file",
        "give load_checkpoint= the folder or the file that holds the weights",
    )


def rank_folders(folder: Path) -> list[tuple[int, Path]]:
    """(N, folder rank_N) of a sharded checkpoint, by N; empty if it is not sharded."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), item)
        for item in folder.iterdir()
        if (match := re.fullmatch(r"rank_(\d{1,6})", item.name)) and item.is_dir()
    ]
    return sorted(found)


def is_not_weight(name: str) -> bool:
    """True if a tensor of this name is a buffer, a cache, or training state."""
    from lite_runner.weights.formats.hugging_face import is_buffer

    return is_buffer(name) or _TRAINING_STATE.fullmatch(name) is not None


def model_config_of(path: Path) -> Decoder | None:
    """The model that a checkpoint describes; None where nothing in or beside it does.

    Read from GGUF metadata or the manifests of shards, else from the config.json of
    `config_folder`; special tokens of a generation_config.json win, as in transformers.
    """
    if ranks := rank_folders(path):
        from lite_runner.weights.sharding.shard_manifest import shards_model

        return shards_model(folder for _, folder in ranks) or model_config_in(path)
    file = weights_file(path)
    if looks_like_gguf(file):
        return config_of_gguf(open_gguf(file))
    return model_config_in(config_folder(file))


def model_config_in(folder: Path) -> Decoder | None:
    source = folder / "config.json"
    if not source.is_file():
        return None
    # Python's json writes a bare Infinity, which the published files of some families have.
    described = read_json_object(source, constants=True)
    config = model_config_from_hf(described, str(source))
    if described.get("auto_map"):
        progress.note(f"{folder}: the Python code that auto_map names there is not run")
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return config
    tokens = Fields(read_json_object(generation), str(generation)).tokens(config.vocab_size)
    given = {key: value for key, value in tokens.items() if value not in (None, ())}
    return replace(config, **given)
