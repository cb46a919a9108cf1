"""LoRA adapters of a model: read from PEFT's folders and from MindFormers', checked, not loaded.

An adapter adds scale * B (A x) to what a weight W makes of x. Names and shapes are checked when it
is opened; values stay on disk until they are asked for.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.prompt import adapter_name
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ArtifactError
from lite_runner.system.files import sha256_of
from lite_runner.system.json_file import read_json_object
from lite_runner.weights.checkpoint import LORA, PICKLES, weights_file
from lite_runner.weights.derive import derived, same_values
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.hugging_face import full_name, part_of_rows
from lite_runner.weights.formats.safetensors_file import looks_like_safetensors, open_safetensors
from lite_runner.weights.formats.torch_file import looks_like_torch, refused
from lite_runner.weights.lora.adapter_config import NAMES, LoraSettings, read_settings
from lite_runner.weights.lora.target_modules import HEAD, TargetModule, by_module
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.tensor import LazyTensor, widened

LISTING = "lora_adapter.json"
PEFT_FILE, MINDFORMERS_FILE = "adapter_model.safetensors", "adapter_model.ckpt"
PREFIX = "base_model.model."  # of every name in PEFT's files
_NAME = re.compile(r"\w[\w .+@-]*")  # also the name of a folder
_PEFT = re.compile(r"(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB])|base_layer\.weight)")
_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class LoraPair:
    """What an adapter adds to one weight: scale * b @ a, as [out, in] whatever the weight's own
    layout. An embedding takes tokens in and gives hidden states out."""

    a: LazyTensor  # [r, in]
    b: LazyTensor  # [out, r]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def values(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A [r, in] and scale * B [out, r], of which nothing stays in memory but these."""
        a, b = self.a.read(), self.b.read()
        found = widened(a).copy(), widened(b) * np.float32(self.scale)
        for stored in (a, b):
            drop_pages(stored)
        return found


@dataclass(frozen=True)
class Adapter:
    """One adapter; `pairs` by the canonical name of the base weight, in the model's order.

    A tied head has the name of one of its own, lm_head.weight; an adapter of the embedding leaves
    it alone, and so the other way round, as in PEFT.
    """

    name: str
    folder: Path
    pairs: Mapping[str, LoraPair]
    copies: Mapping[str, LazyTensor] = field(default_factory=dict)  # of base weights, by name

    @property
    def bfloat16(self) -> bool:
        """Whether A and scale * B are held as bfloat16 without a loss."""
        return all(
            pair.a.dtype == pair.b.dtype == "BF16" and abs(math.frexp(pair.scale)[0]) == 0.5
            for pair in self.pairs.values()
        )

    def padded(
        self, name: str, rank: int, inputs: int, outputs: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A [rank, inputs] and scale * B [outputs, rank] of a weight, filled up with zeros; only
        zeros where the adapter leaves it alone."""
        a = np.zeros((rank, inputs), np.float32)
        b = np.zeros((outputs, rank), np.float32)
        if (pair := self.pairs.get(name)) is not None:
            a[: pair.rank], b[: pair.b.shape[0], : pair.rank] = pair.values()
        return a, b


def open_adapters(
    path: Path, model: Decoder, names: Sequence[str] | None = None, *, root: Path | None = None
) -> dict[str, Adapter]:
    """The adapters of `path` by name; only those of `names`, where they are given.

    `path` is lora_adapter.json ({name: folder}), the folder that holds it, or one adapter's folder,
    whose name it takes. The folders must lie inside `root`, where it is given. Raises
    ArtifactError for whatever is missing, broken, not plain LoRA, or of another base.
    """
    folders = adapter_folders(path, root)
    wanted = list(folders) if names is None else list(dict.fromkeys(names))
    for name in wanted:
        if name not in folders:
            raise ArtifactError(
                f"{path}: no adapter {name!r}{did_you_mean(nearest(name, folders))}",
                f"it has: {', '.join(list(folders)[:20])}",
            )
    return {name: _open(name, folders[name], model) for name in wanted}


def is_listing(path: Path) -> bool:
    """Whether `path` names several adapters: lora_adapter.json, or the folder it is in."""
    return not path.is_dir() or (path / LISTING).is_file()


def adapter_folders(path: Path, root: Path | None = None) -> dict[str, Path]:
    """Name -> folder of the adapters that `path` lists; see `open_adapters`."""
    if not path.exists():
        raise ArtifactError(
            f"adapter_path: {path}: no such file or folder",
            f"give {LISTING} ({{name: folder}}), or an adapter's folder",
        )
    if not is_listing(path):
        return {path.resolve().name: path}
    if path.is_dir():
        path = path / LISTING
    if path.suffix != ".json":
        raise ArtifactError(
            f"adapter_path: {path}: expected {LISTING} or a folder", f"try {path.parent}"
        )
    listed = read_json_object(path)
    if not listed:
        raise ArtifactError(f"{path}: lists no adapter, expected {{name: folder}}")
    return {name: _folder(path, name, entry, root) for name, entry in listed.items()}


def _folder(listing: Path, name: str, entry: object, root: Path | None) -> Path:
    if not _NAME.fullmatch(name) or adapter_name(name) is None:
        raise ArtifactError(
            f"{listing}: {name!r} cannot be the name of an adapter",
            "use letters, digits and . _ - + @; base, none and null mean the base model",
        )
    if not isinstance(entry, str) or not entry or "\0" in entry:
        raise ArtifactError(f"{listing}: {name}: got {entry!r}, expected the path of a folder")
    folder = listing.parent / entry  # an absolute path stays as it is
    try:
        real = folder.resolve()
        inside = root is None or real.is_relative_to(root.resolve())
    except (OSError, RuntimeError) as error:  # a name too long, a link to itself
        raise ArtifactError(f"{listing}: {name}: {entry}: {error}") from error
    if not inside:
        raise ArtifactError(
            f"{listing}: {name}: {folder} lies outside adapter_root={root}",
            "move the adapter there, or name the folder that all of them are in: adapter_root=DIR",
        )
    return folder


def _open(name: str, folder: Path, model: Decoder) -> Adapter:
    if not folder.is_dir():
        raise ArtifactError(f"adapter {name}: {folder}: no such folder")
    settings = read_settings(folder)
    file = _weights(folder)
    found = open_safetensors(file) if looks_like_safetensors(file) else open_ckpt(file)
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
    is_peft = any(_PEFT.fullmatch(tensor) for tensor in found)
    modules = by_module(model, hugging_face=is_peft)
    stored = _by_module(found, is_peft)
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
    order = [site.weight for places in modules.values() for site in places]
    return Adapter(name, folder, {n: pairs[n] for n in order if n in pairs}, copies)


def _weights(folder: Path) -> Path:
    """The file of an adapter's weights; never a pickle."""
    files = [folder / name for name in (PEFT_FILE, MINDFORMERS_FILE)]
    there = [file for file in files if file.is_file()]
    if len(there) > 1:
        raise ArtifactError(
            f"{folder}: holds both {PEFT_FILE} and {MINDFORMERS_FILE}, expected one of them",
            "move one away",
        )
    if not there:
        for item in sorted(folder.iterdir()):
            if item.suffix in PICKLES:
                raise refused(item, f"an adapter's are expected in {PEFT_FILE}")
        raise ArtifactError(
            f"{folder}: no weights, expected {PEFT_FILE} or {MINDFORMERS_FILE} beside {NAMES[0]}"
        )
    file = weights_file(there[0])
    # The first byte of a safetensors file is one of a length, and may be a pickle's.
    if not looks_like_safetensors(file) and looks_like_torch(file):
        raise refused(file, f"an adapter's are expected in {PEFT_FILE}")
    return file


def _by_module(found: Mapping[str, LazyTensor], is_peft: bool) -> dict[str, dict[str, LazyTensor]]:
    """Module -> its tensors "a", "b" and "copy"; under "" what is nothing of them, by its name."""
    stored: defaultdict[str, dict[str, LazyTensor]] = defaultdict(dict)
    for name, tensor in found.items():
        match = (_PEFT if is_peft else LORA).fullmatch(name)
        if match is None:
            stored[""][name] = tensor
            continue
        prefix = PREFIX if is_peft else "transformer."  # of MindFormers' BLOOM with a head
        kind = (match[2] or (is_peft and match[3]) or "copy").lower()
        module = stored[match[1].removeprefix(prefix)]
        # One adapter may have the names of several of MindFormers' releases.
        if kind in module and not same_values(module[kind], tensor):
            stored[""][name] = tensor
        module[kind] = tensor
    return dict(stored)


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
    if len(places) == 1:
        return {places[0].weight: LoraPair(a, b, scale)}

    def split(array: NDArray[np.generic], part: int) -> NDArray[np.generic]:
        return part_of_rows(array, part, model)

    return {
        site.weight: LoraPair(
            a, derived(b, (site.width_out, a.shape[0]), partial(split, part=site.part or 0)), scale
        )
        for site in places
    }


def _base_name(site: TargetModule, model: Decoder) -> str:
    """The tensor that the base has for a place: a tied head is the embedding."""
    is_tied = site.weight == f"{HEAD}.weight" and model.tie_word_embeddings
    return parameters(model)[0].name if is_tied else site.weight


def digest(adapter: Adapter) -> str:
    """sha256 of an adapter's config and weights: what is made of them is known by it."""
    return sha256_of(read_settings(adapter.folder).where, _weights(adapter.folder))


def check_effective(adapter: Adapter) -> None:
    """Raise ArtifactError for an adapter that changes nothing; reads values until one does."""
    for pair in adapter.pairs.values():
        if all(values.any() for values in pair.values()):
            return
    raise ArtifactError(
        f"adapter {adapter.name}: {adapter.folder}: changes nothing, the products of all "
        f"{len(adapter.pairs)} pairs of A and B are zero",
        "an adapter begins so; this one was saved before it was trained",
    )


def check_copies(adapter: Adapter, base: Mapping[str, LazyTensor]) -> None:
    """Raise ArtifactError where the adapter was saved with another embedding or head than `base`
    has: peft would put them in its place."""
    for name, copy in adapter.copies.items():
        if not same_values(copy, base[name]):
            raise ArtifactError(
                f"adapter {adapter.name}: {adapter.folder}: holds a whole {name} that is not the "
                "base's; only plain LoRA is supported",
                "load the base that the adapter was trained on",
            )
