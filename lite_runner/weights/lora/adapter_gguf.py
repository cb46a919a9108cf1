"""LoRA adapters as GGUF files, as llama.cpp has them.

NAME.lora_a [r, in] and NAME.lora_b [out, r] are of the tensor NAME of a model's GGUF file, whose
order of rows B has; of the embedding A is [in, r]. The scale is adapter.lora.alpha / r.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import GGUF, Parameter, architecture_of, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.system.files import new_file
from lite_runner.weights import same_values, transposed
from lite_runner.weights.formats.gguf_checkpoint import file_order, in_canonical_order
from lite_runner.weights.formats.gguf_file import GGUFFile, GGUFTensor, open_gguf
from lite_runner.weights.lora.adapter import Adapter, LoraPair

SUFFIX = ".gguf"
ALPHA = "adapter.lora.alpha"
_ERRORS_SHOWN = 5
_EMBEDDING = "token_embd.weight"
Floats: TypeAlias = NDArray[np.float32]
Product: TypeAlias = tuple[Floats, Floats, float]  # A [r, in], B [out, r] and their scale


def open_lora_gguf(name: str, path: Path, model: Decoder) -> Adapter:
    """The adapter of a file. Raises ArtifactError for one that is not LoRA, or of another model."""
    file = open_gguf(path)
    _check_kind(file, model)
    alpha = file.metadata.get(ALPHA, 0.0)
    if not isinstance(alpha, float) or not 0 <= alpha < float("inf"):
        raise ArtifactError(f"{path}: {ALPHA} is {alpha!r}, expected a number")
    places = _by_name(model)
    pairs: dict[str, LoraPair] = {}
    errors = []
    halves = {one.rpartition(".lora_")[0] or one for one in file.tensors}
    for base in sorted(halves):
        a, b = file.tensors.get(f"{base}.lora_a"), file.tensors.get(f"{base}.lora_b")
        if base in file.tensors:
            errors.append(f"{base}: not a tensor of plain LoRA")
        elif a is None or b is None:
            errors.append(f"{base}: has no lora_{'b' if b is None else 'a'}")
        elif base not in places:
            errors.append(f"{base}: the model has no such matrix that adapters may target")
        elif misfit := _misfit(base, a, b, places[base]):
            errors.append(misfit)
        else:
            pairs |= _pairs(a, b, alpha, places[base], model)
    if errors or not pairs:
        shown = "\n  - ".join(errors[:_ERRORS_SHOWN]) + (" ..." if errors[_ERRORS_SHOWN:] else "")
        raise ArtifactError(
            f"adapter {name}: {path} does not fit the model ({len(errors)} errors)\n  - "
            + (shown or "it has no tensors"),
            "was it trained on this base? model= and load_checkpoint= must name that one",
        )
    order = [one.name for one in parameters(model) if one.name in pairs]
    return Adapter(name, path, {weight: pairs[weight] for weight in order})


def write_lora_gguf(adapter: Adapter, model: Decoder, path: Path) -> None:
    """Write an adapter as `path`, in float32. Raises ArtifactError for a model or a module that
    llama.cpp has no such tensor of, EnvironmentFault."""
    import gguf

    products = _products(adapter, model)
    alphas = Counter(scale * len(a) for a, _, scale in products.values())
    ((alpha, _), *_others) = alphas.most_common(1)
    with new_file(path) as fresh:
        writer = gguf.GGUFWriter(fresh, _architecture(model))
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32(ALPHA, alpha)
        for name, (a, b, scale) in products.items():
            factor = scale * len(a) / alpha
            b = b if factor == 1 else b * np.float32(factor)
            a = a.T if name == _EMBEDDING else a
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a))
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _gguf(model: Decoder) -> GGUF:
    architecture = architecture_of(model)
    if architecture.gguf is None:
        raise ArtifactError(f"{architecture.name}: llama.cpp has no such family, nor LoRA of it")
    return architecture.gguf


def _architecture(model: Decoder) -> str:
    return _gguf(model).name or architecture_of(model).name


def _check_kind(file: GGUFFile, model: Decoder) -> None:
    """Raise ArtifactError for a file that is not an adapter."""
    expected = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": _architecture(model),
    }
    for key, value in expected.items():
        if (found := file.metadata.get(key)) != value:
            raise ArtifactError(
                f"{file.path}: {key} is {found!r}, expected {value!r}",
                "adapter_path= takes LoRA of this model; model= takes a model",
            )
    if file.metadata.get("adapter.alora.invocation_tokens") is not None:
        raise ArtifactError(f"{file.path}: LoRA that begins in the middle of a text (aLoRA)")


def _by_name(model: Decoder) -> dict[str, list[Parameter]]:
    """The targetable matrices by their tensors in a file, which may fuse some."""
    found, gguf = defaultdict(list), _gguf(model)
    for one in parameters(model):
        is_matrix = one.is_linear or one.role in ("embedding", "head")
        # Reordered inputs or interleaved rows cannot be expressed in A and B alone.
        moved = gguf.columns(one, model) is not None or gguf.fused_rows(one, model) is not None
        if is_matrix and not moved and one.kind == "weight" and one.expert is None:
            found[one.gguf].append(one)
    return {name: sorted(parts, key=lambda one: one.part or 0) for name, parts in found.items()}


def _sizes(parameter: Parameter) -> tuple[int, int]:
    """Outputs and inputs; those of an embedding are tokens."""
    first, second = parameter.shape
    turned = parameter.transposed or parameter.role == "embedding"
    return (second, first) if turned else (first, second)


def _misfit(base: str, a: GGUFTensor, b: GGUFTensor, parts: Sequence[Parameter]) -> str:
    """The validation error of the tensors; "": none."""
    outputs, inputs = sum(_sizes(one)[0] for one in parts), _sizes(parts[0])[1]
    rank = b.shape[-1]
    found = f"{base}: lora_a is {list(a.shape)} and lora_b {list(b.shape)}, expected"
    if not rank:
        return f"{found} a rank of 1 or more"
    expected_a = (inputs, rank) if base == _EMBEDDING else (rank, inputs)
    if a.shape == expected_a and b.shape == (outputs, rank):
        return ""
    return f"{found} {list(expected_a)} and {[outputs, rank]}"


def _pairs(
    a: GGUFTensor, b: GGUFTensor, alpha: float, parts: Sequence[Parameter], model: Decoder
) -> dict[str, LoraPair]:
    """The update of each matrix of a tensor."""
    scale = alpha / b.shape[1] if alpha else 1.0  # as llama.cpp
    found, start = {}, 0
    for one in parts:
        end = start + _sizes(one)[0]
        own = in_canonical_order(b.lazy(start, end), one, model, _gguf(model))
        given = transposed(a.lazy()) if one.role == "embedding" else a.lazy()
        found[one.name] = LoraPair(given, own, scale)
        start = end
    return found


def _products(adapter: Adapter, model: Decoder) -> dict[str, Product]:
    """The tensors of the file by name. Raises ArtifactError."""
    _architecture(model)
    places = _by_name(model)
    of_file = {one.name: name for name, parts in places.items() for one in parts}
    for weight in adapter.pairs:
        if not of_file.get(weight):
            raise ArtifactError(
                f"adapter {adapter.name}: {weight}: llama.cpp has no such tensor for adapters",
                "merge it: merge=true",
            )
    return {
        name: _product([(one, adapter.pairs.get(one.name)) for one in parts], model)
        for name, parts in places.items()
        if any(one.name in adapter.pairs for one in parts)
    }


def _product(parts: Sequence[tuple[Parameter, LoraPair | None]], model: Decoder) -> Product:
    """A and B of a tensor; A of its parts is shared, or concatenated where they have several."""
    pairs = [pair for _, pair in parts if pair is not None]
    first, widths = pairs[0], [_sizes(one)[0] for one, _ in parts]
    alone = all(one.scale == first.scale and same_values(one.a, first.a) for one in pairs)
    ranks = [first.rank] if alone else [pair.rank for pair in pairs]
    total, start, rows = sum(ranks), 0, []
    for (one, pair), width in zip(parts, widths, strict=True):
        b = np.zeros((width, total), np.float32)
        if pair is not None:
            factor = 1.0 if alone else pair.scale * total
            own = np.ascontiguousarray(pair.b.float32())
            b[:, start : start + pair.rank] = file_order(one, model)(own) * np.float32(factor)
            start += 0 if alone else pair.rank
        rows.append(b)
    a = first.a.float32() if alone else np.concatenate([pair.a.float32() for pair in pairs])
    return a, np.concatenate(rows), first.scale if alone else 1 / total
