"""Tensors that checkpoints fuse, reorder or stack, to and from a tensor per parameter.

transformers fuses gate and up of all experts in memory, and may write them so; MindFormers stacks
each of the three matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, Rows, by_expert, parameters, stored_rows
from lite_runner.architectures.naming import FusedExperts, Role
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights import Index, LazyTensor, with_rows
from lite_runner.weights.formats.safetensors_file import NUMPY_TYPES

# Place of an expert's matrix in transformers' tensors [experts, rows, in]: gate before up.
_FUSED: dict[Role, tuple[str, int, int]] = {  # module, part, parts of the rows
    "expert_gate": ("gate_up_proj", 0, 2),
    "expert_up": ("gate_up_proj", 1, 2),
    "expert_down": ("down_proj", 0, 1),
}
_MODULE = "mlp"  # of a layer, in transformers 5, whatever the family's files call it


def by_name(model: Decoder, name_of: Callable[[Parameter], str]) -> dict[str, list[Parameter]]:
    """Name in a checkpoint -> its parameters: one, or those that the format fuses."""
    found: defaultdict[str, list[Parameter]] = defaultdict(list)
    for parameter in parameters(model):
        found[name_of(parameter)].append(parameter)
    return dict(found)


def split(tensor: LazyTensor, parameter: Parameter, model: Decoder) -> LazyTensor:
    """The rows of a parameter in the stored tensor [rows, ...]: a matrix [out, in], a bias, or B of
    an adapter."""
    rows = stored_rows(parameter, model)
    if rows is None:
        return tensor
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    return with_rows(tensor, (count, *tensor.shape[1:]), lambda array: array[rows])


def fuse(parts: Sequence[Parameter], held: Sequence[LazyTensor], model: Decoder) -> LazyTensor:
    """The stored tensor from those of its parameters: the inverse of `split`."""
    rows = [stored_rows(part, model) for part in parts]
    if rows[0] is None:
        return held[0]
    held = _of_one_type(held)
    shape = (sum(tensor.shape[0] for tensor in held), *held[0].shape[1:])
    return LazyTensor(shape, held[0].dtype, lambda: _fused([one.read() for one in held], rows))


def _of_one_type(held: Sequence[LazyTensor]) -> Sequence[LazyTensor]:
    """The tensors, as F32 where their types differ: one tensor is to hold them."""
    if len({one.dtype for one in held}) == 1:
        return held
    return [LazyTensor(one.shape, "F32", one.float32) for one in held]


def _fused(parts: Sequence[NDArray[Any]], rows: Sequence[Rows | None]) -> NDArray[Any]:
    fused = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for part, where in zip(parts, rows, strict=True):
        fused[slice(None) if where is None else where] = part
    return fused


def separated(
    found: Mapping[str, LazyTensor], model: Decoder, where: str
) -> Mapping[str, LazyTensor]:
    """The tensors of a file with a tensor for each expert's matrix, by Hugging Face's name where
    transformers fused them, by the canonical one where MindFormers stacked them.

    Raises ArtifactError for a fused tensor of another shape.
    """
    experts = by_expert(model)
    if not experts:
        return found
    tensors = dict(found)
    used = set()
    for (role, _), each in (*experts.items(), *by_expert(model, "bias").items()):
        assert role is not None
        for one in each:
            if one.fused is not None and one.stacked not in found:
                if one.fused.name in found:
                    found_as = one.hugging_face
                    tensors[found_as] = _of_fused(found, one, one.fused, len(each), where)
                    used.add(one.fused.name)
                continue
            module, part, parts = _FUSED[role]
            fused = _fused_name(one, module)
            if one.stacked in found:
                tensors[one.name] = _expert(found, one.stacked, one, (len(each), 0, 1), where)
                used.add(one.stacked)
            elif fused in found:
                tensors[one.hugging_face] = _expert(
                    found, fused, one, (len(each), part, parts), where
                )
                used.add(fused)
    for one in parameters(model):
        router = _in_memory(one.hugging_face)
        if one.role == "router" and router != one.hugging_face and router in found:
            tensors[one.hugging_face] = found[router]
            used.add(router)
    return {name: tensor for name, tensor in tensors.items() if name not in used}


def _of_fused(
    found: Mapping[str, LazyTensor], one: Parameter, fused: FusedExperts, count: int, where: str
) -> LazyTensor:
    """The matrix of an expert, or its bias, in the tensor of all."""
    tensor, rows = found[fused.name], fused.parts * one.shape[0]
    inner = (rows, *one.shape[1:])
    expected = (count, *(inner[::-1] if fused.transposed else inner))
    check_fused(fused.name, tensor.shape, expected, where)
    taken = _rows_of(one, fused)
    assert one.expert is not None
    only = slice(one.expert, one.expert + 1)

    def read() -> NDArray[Any]:
        matrix = tensor.piece((only, *(slice(0, size) for size in expected[1:])))[0]
        if fused.transposed:
            matrix = matrix.T
        return np.ascontiguousarray(matrix[taken])

    return LazyTensor(one.shape, tensor.dtype, read)


def fused_experts(tensors: Mapping[str, LazyTensor], model: Decoder) -> dict[str, LazyTensor]:
    """Experts in the tensors that Hugging Face has of all in a layer: undoes `separated`."""
    groups: defaultdict[str, list[tuple[Parameter, FusedExperts]]] = defaultdict(list)
    for one in parameters(model):
        if one.fused is not None:
            groups[one.fused.name].append((one, one.fused))
    return {name: _fused_tensor(group, tensors) for name, group in groups.items()}


def _fused_tensor(
    group: Sequence[tuple[Parameter, FusedExperts]], tensors: Mapping[str, LazyTensor]
) -> LazyTensor:
    one, fused = group[0]
    count = len(group) // fused.parts
    whole = (count, fused.parts * one.shape[0], *one.shape[1:])
    turned = fused.transposed and len(whole) == 3
    held = _of_one_type([tensors[each.name] for each, _ in group])

    def read() -> NDArray[Any]:
        result = np.empty(whole, NUMPY_TYPES[held[0].dtype])
        for (each, place), tensor in zip(group, held, strict=True):
            result[each.expert][_rows_of(each, place)] = tensor.read()
        return np.ascontiguousarray(result.swapaxes(1, 2)) if turned else result

    shape = (whole[0], whole[2], whole[1]) if turned else whole
    return LazyTensor(shape, held[0].dtype, read)


def _rows_of(one: Parameter, fused: FusedExperts) -> slice:
    first, step = (fused.part, fused.parts) if fused.by_turns else (fused.part * one.shape[0], 1)
    return slice(first, first + step * one.shape[0], step)


def check_fused(name: str, shape: tuple[int, ...], expected: tuple[int, ...], where: str) -> None:
    """Raise ArtifactError for a tensor of experts of another shape."""
    if shape != expected:
        raise ArtifactError(
            f"{where}: {name}: got {list(shape)}, expected {list(expected)}",
            "check that model= and load_checkpoint= belong together, or use model=auto",
        )


def _fused_name(one: Parameter, module: str) -> str:
    experts = _in_memory(one.hugging_face).partition(".experts.")[0]
    return f"{experts}.experts.{module}"


def _in_memory(name: str) -> str:
    """A name in a layer as transformers 5 has it in memory."""
    head, layer, rest = name.partition(".layers.")
    number, _, inner = rest.partition(".")
    return f"{head}{layer}{number}.{_MODULE}.{inner.partition('.')[2]}"


def _expert(
    found: Mapping[str, LazyTensor],
    name: str,
    one: Parameter,
    place: tuple[int, int, int],
    where: str,
) -> LazyTensor:
    """A part of the tensor `name`; `place`: experts there, part and parts of its rows."""
    (experts, part, parts), (rows, columns) = place, one.shape
    tensor, expected = found[name], (experts, parts * rows, columns)
    check_fused(name, tensor.shape, expected, where)
    assert one.expert is not None
    first, expert = part * rows, one.expert

    def piece(index: Index) -> NDArray[np.generic]:
        height, width = index
        start, stop, _ = height.indices(rows)
        inner = slice(first + start, first + stop)
        matrix: NDArray[np.generic] = tensor.piece((slice(expert, expert + 1), inner, width))[0]
        return matrix

    whole = (slice(0, rows), slice(0, columns))
    return LazyTensor(one.shape, tensor.dtype, partial(piece, whole), piece)


def stacked(tensors: Mapping[str, LazyTensor], model: Decoder) -> dict[str, LazyTensor]:
    """Canonical tensors as MindFormers has them: the experts of a layer in one tensor."""
    result: dict[str, LazyTensor] = {}
    experts = {each[0].name: each for each in by_expert(model).values()}
    inner = {one.name for each in experts.values() for one in each}
    for name, tensor in tensors.items():
        if name in experts:
            each = experts[name]
            result[each[0].stacked] = _stack([tensors[one.name] for one in each])
        elif name not in inner:
            result[name] = tensor
    return result


def _stack(each: Iterable[LazyTensor]) -> LazyTensor:
    held = _of_one_type(list(each))

    def read() -> NDArray[np.generic]:
        return np.stack([one.read() for one in held])

    return LazyTensor((len(held), *held[0].shape), held[0].dtype, read)
