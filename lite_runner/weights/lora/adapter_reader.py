"""Opening adapters of PEFT and MindFormers: names and shapes are validated against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats.fused import split
from lite_runner.weights.formats.hugging_face import full_name
from lite_runner.weights.lora.adapter import Adapter, LoraPair
from lite_runner.weights.lora.adapter_config import LoraSettings, read_settings
from lite_runner.weights.lora.adapter_file import (
    FILES,
    is_peft_file,
    open_weights,
    tensors_by_module,
)
from lite_runner.weights.lora.adapter_listing import (
    adapter_folders,
    check_inside,
    check_listed,
    folder_of,
)
from lite_runner.weights.lora.target_modules import HEAD, TargetModule, by_module, sites
from lite_runner.weights.tensor import LazyTensor

_FAULTS_SHOWN = 5


def open_adapters(
    path: Path, model: Decoder, names: Sequence[str] | None = None, *, root: Path | None = None
) -> dict[str, Adapter]:
    """The adapters of `path` by name; only those of `names`, where they are given.

    `path` is lora_adapter.json ({name: folder}), the folder that holds it, or one adapter's folder,
    whose name it takes. The folders, and the files that are read in them, must lie inside `root`,
    where it is given, links followed. Raises ArtifactError for whatever is missing, broken, not
    plain LoRA, or of another base.
    """
    folders = adapter_folders(path, root)
    wanted = list(folders) if names is None else list(dict.fromkeys(names))
    check_listed(wanted, folders, path)
    return {name: _open(name, folders[name], model, root) for name in wanted}


def open_adapter(name: str, folder: str, model: Decoder, root: Path) -> Adapter:
    """One adapter, of a `folder` inside `root`, to which it is relative. Raises ArtifactError as
    `open_adapters`."""
    return _open(name, folder_of(name, folder, root, root, "adapter"), model, root)


def _open(name: str, folder: Path, model: Decoder, root: Path | None) -> Adapter:
    if not folder.is_dir():
        raise ArtifactError(f"adapter {name}: {folder}: no such folder")
    check_inside(root, *(folder / file for file in FILES))
    settings = read_settings(folder)
    file, found = open_weights(folder)
    return fitted(name, folder, found, file, settings, model)


def fitted(
    name: str,
    folder: Path,
    found: Mapping[str, LazyTensor],
    file: Path,
    settings: LoraSettings,
    model: Decoder,
) -> Adapter:
    """The adapter whose tensors were `found` in a `file`, compared with its settings and the model.

    Raises ArtifactError where they do not fit.
    """
    is_peft = is_peft_file(found)
    modules = by_module(model, hugging_face=is_peft)
    stored = tensors_by_module(found, is_peft)
    faults = [f"{tensor}: not a tensor of plain LoRA" for tensor in stored.pop("", {})]
    # An adapter that was trained on the bare model lacks the first part of all names.
    short = {n: full_name(n, modules) for n in stored}
    if any(n not in modules and full in modules for n, full in short.items()):
        start = next(full.removesuffix(n) for n, full in short.items() if full != n)
        modules = {n.removeprefix(start): places for n, places in modules.items()}
    targets = settings.targets(modules, HEAD)
    pairs: dict[str, LoraPair] = {}
    copies: dict[str, LazyTensor] = {}
    for module, tensors in stored.items():
        if module not in modules:
            faults.append(f"{module}: the model has no such module")
        elif module not in targets:
            faults.append(f"{module}: is in the file, but {settings.where.name} does not target it")
        elif not (module_faults := _faults(module, tensors, modules[module], settings, model)):
            pairs |= _pairs(module, tensors, modules[module], settings, model)
            if "copy" in tensors:
                copies[_base_name(modules[module][0], model)] = tensors["copy"]
        else:
            faults += module_faults
    faults += [f"{module}: not in the file" for module in sorted(targets - stored.keys())]
    if faults:
        shown = "\n  - ".join(faults[:_FAULTS_SHOWN]) + (" ..." if faults[_FAULTS_SHOWN:] else "")
        raise ArtifactError(
            f"adapter {name}: {file} does not fit the model and {settings.where.name} "
            f"({len(faults)} faults)\n  - {shown}",
            "was it trained on this base? model= and load_checkpoint= must name that one",
        )
    order = [site.weight for site in sites(model)]
    return Adapter(name, folder, {n: pairs[n] for n in order if n in pairs}, copies)


def _faults(
    module: str,
    tensors: Mapping[str, LazyTensor],
    places: Sequence[TargetModule],
    settings: LoraSettings,
    model: Decoder,
) -> list[str]:
    rank, site = settings.rank(module), places[0]
    width_out = sum(place.width_out for place in places)  # of q, k and v, where they are fused
    expected = {"a": (rank, site.width_in), "b": (width_out, rank)}
    if "copy" in tensors and (site.is_embedding or site.weight == f"{HEAD}.weight"):
        expected["copy"] = (model.vocab_size, model.hidden_size)
    faults = [f"{module}: has no lora_{kind}" for kind in expected.keys() - tensors.keys()]
    faults += [f"{module}: has a {kind}, too" for kind in tensors.keys() - expected.keys()]
    for kind, shape in expected.items():
        if kind in tensors and tensors[kind].shape != shape:
            got = list(tensors[kind].shape)
            says = f", r is {rank} in {settings.where.name}" if kind != "copy" else ""
            faults.append(f"{module}: {kind} is {got}, expected {list(shape)}{says}")
    return faults


def _pairs(
    module: str,
    tensors: Mapping[str, LazyTensor],
    places: Sequence[TargetModule],
    settings: LoraSettings,
    model: Decoder,
) -> dict[str, LoraPair]:
    a, b, scale = tensors["a"], tensors["b"], settings.scale(module)
    return {
        site.weight: LoraPair(a, b if site.fused is None else split(b, site.fused, model), scale)
        for site in places
    }


def _base_name(site: TargetModule, model: Decoder) -> str:
    """The tensor that the base has for a place: a tied head is the embedding."""
    is_tied = site.weight == f"{HEAD}.weight" and model.tie_word_embeddings
    return parameters(model)[0].name if is_tied else site.weight
