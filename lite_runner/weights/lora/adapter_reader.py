"""Opening adapters of PEFT and MindFormers; names and shapes are validated against the model.

A path is lora_adapter.json ({name: folder}), its folder, or the folder of one adapter; where one is
named, it may be a GGUF file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config import did_you_mean, nearest
from lite_runner.config.prompt import adapter_name
from lite_runner.errors import ArtifactError
from lite_runner.system.files import read_json_object, sha256_of
from lite_runner.weights import LazyTensor, same_values
from lite_runner.weights.checkpoint import LORA, PICKLES, rank_folders, weights_file
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.fused import split
from lite_runner.weights.formats.hugging_face import full_name
from lite_runner.weights.formats.safetensors_file import looks_like_safetensors, open_safetensors
from lite_runner.weights.formats.torch_file import looks_like_torch, refused
from lite_runner.weights.lora.adapter import HEAD, Adapter, LoraPair, TargetModule, by_module, sites
from lite_runner.weights.lora.adapter_config import NAMES, LoraSettings, read_settings
from lite_runner.weights.lora.adapter_gguf import SUFFIX as GGUF
from lite_runner.weights.lora.adapter_gguf import open_lora_gguf

PEFT_FILE, MINDFORMERS_FILE = "adapter_model.safetensors", "adapter_model.ckpt"
FILES = (*NAMES, PEFT_FILE, MINDFORMERS_FILE)  # files that may be read in an adapter's folder
PREFIX = "base_model.model."  # prefix of every name in PEFT's files
LISTING, CUT = "lora_adapter.json", "slora"
_PEFT = re.compile(r"(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB])|base_layer\.weight)")
_NAME = re.compile(r"\w[\w .+@-]*")  # also the name of a folder
_ERRORS_SHOWN = 5


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
    if folder.suffix == GGUF and folder.is_file():
        check_inside(root, folder)
        return open_lora_gguf(name, folder, model)
    if not folder.is_dir():
        raise ArtifactError(f"adapter {name}: {folder}: no such folder, nor a {GGUF} file")
    check_inside(root, *(folder / file for file in FILES))
    settings = read_settings(folder)
    file = weights_of(folder)
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
    is_peft = any(_PEFT.fullmatch(name) for name in found)
    modules = by_module(model, hugging_face=is_peft)
    stored = tensors_by_module(found, is_peft)
    errors = [f"{tensor}: not a tensor of plain LoRA" for tensor in stored.pop("", {})]
    # An adapter trained on the bare model lacks the first part of all names.
    short = {n: full_name(n, modules) for n in stored}
    if any(n not in modules and full in modules for n, full in short.items()):
        start = next(full.removesuffix(n) for n, full in short.items() if full != n)
        modules = {n.removeprefix(start): targeted for n, targeted in modules.items()}
    targets = settings.targets(modules, HEAD)
    pairs: dict[str, LoraPair] = {}
    copies: dict[str, LazyTensor] = {}
    for module, tensors in stored.items():
        if module not in modules:
            errors.append(f"{module}: the model has no such module")
        elif module not in targets:
            errors.append(f"{module}: is in the file, but {settings.where.name} does not target it")
        elif misfits := _misfits(module, tensors, modules[module], settings, model):
            errors += misfits
        else:
            a, b, scale = tensors["a"], tensors["b"], settings.scale(module)
            for site in modules[module]:
                own = b if site.fused is None else split(b, site.fused, model)
                pairs[site.weight] = LoraPair(a, own, scale)
            if "copy" in tensors:  # a tied head is the base's embedding
                weight = modules[module][0].weight
                tied = weight == f"{HEAD}.weight" and model.tie_word_embeddings
                copies[parameters(model)[0].name if tied else weight] = tensors["copy"]
    errors += [f"{module}: not in the file" for module in sorted(targets - stored.keys())]
    if errors:
        shown = "\n  - ".join(errors[:_ERRORS_SHOWN]) + (" ..." if errors[_ERRORS_SHOWN:] else "")
        raise ArtifactError(
            f"adapter {name}: {file} does not fit the model and {settings.where.name} "
            f"({len(errors)} errors)\n  - {shown}",
            "was it trained on this base? model= and load_checkpoint= must name that one",
        )
    order = [site.weight for site in sites(model)]
    return Adapter(name, folder, {n: pairs[n] for n in order if n in pairs}, copies)


def _misfits(
    module: str,
    tensors: Mapping[str, LazyTensor],
    targeted: Sequence[TargetModule],
    settings: LoraSettings,
    model: Decoder,
) -> list[str]:
    """Validation errors of the tensors of a module that targets these weights."""
    rank, site = settings.rank(module), targeted[0]
    width_out = sum(one.width_out for one in targeted)  # of q, k and v, where they are fused
    expected = {"a": (rank, site.width_in), "b": (width_out, rank)}
    if "copy" in tensors and (site.is_embedding or site.weight == f"{HEAD}.weight"):
        expected["copy"] = (model.vocab_size, model.hidden_size)
    found = [f"{module}: has no lora_{kind}" for kind in expected.keys() - tensors.keys()]
    found += [f"{module}: has a {kind}, too" for kind in tensors.keys() - expected.keys()]
    for kind, shape in expected.items():
        if kind in tensors and tensors[kind].shape != shape:
            got = list(tensors[kind].shape)
            says = f", r is {rank} in {settings.where.name}" if kind != "copy" else ""
            found.append(f"{module}: {kind} is {got}, expected {list(shape)}{says}")
    return found


def adapter_folders(
    path: Path, root: Path | None = None, *, key: str = "adapter_path"
) -> dict[str, Path]:
    """Name -> folder of the adapters that `path` of a `key` lists; see `open_adapters`."""
    if not path.exists():
        raise ArtifactError(
            f"{key}: {path}: no such file or folder",
            f"give {LISTING} ({{name: folder}}), or an adapter's folder",
        )
    if not is_listing(path):
        name = path.resolve().stem if path.suffix == GGUF else path.resolve().name
        if adapter_name(name) is None:
            raise ArtifactError(
                f"{key}: {path}: an adapter takes the name of its folder or file, and"
                f" the name {name} means the base model",
                f"rename it, or list it under another name in {LISTING} ({{name: folder}})",
            )
        return {name: path}
    if path.is_dir():
        path = path / LISTING
        if _is_inside(path.parent, root):
            check_inside(root, path)
    if path.suffix != ".json":
        raise ArtifactError(f"{key}: {path}: expected {LISTING} or a folder", f"try {path.parent}")
    listed = read_json_object(path)
    if not listed:
        raise ArtifactError(f"{path}: lists no adapter, expected {{name: folder}}")
    base, where = path.parent, str(path)
    return {name: folder_of(name, entry, base, root, where) for name, entry in listed.items()}


def folder_of(name: str, entry: object, base: Path, root: Path | None, where: str) -> Path:
    """The folder of an adapter: `entry`, relative to `base` or absolute, inside `root`.

    Raises ArtifactError, which begins with `where`, for a name or a path that cannot be one.
    """
    if not _NAME.fullmatch(name) or adapter_name(name) is None:
        raise ArtifactError(
            f"{where}: {name!r} cannot be the name of an adapter",
            "use letters, digits and . _ - + @; base, none and null mean the base model",
        )
    if not isinstance(entry, str) or not entry or "\0" in entry:
        raise ArtifactError(f"{where}: {name}: got {entry!r}, expected the path of a folder")
    folder = base / entry  # an absolute path is kept
    try:
        inside = _is_inside(folder, root)
        folder.is_dir()  # resolving a name that is too long does not fail
    except (OSError, RuntimeError) as error:  # name too long, or a link to itself
        raise ArtifactError(f"{where}: {name}: {entry}: {error}") from error
    if not inside:
        raise ArtifactError(
            f"{where}: {name}: {folder} lies outside adapter_root={root}",
            "move the adapter there, or name the folder that all of them are in: adapter_root=DIR",
        )
    return folder


def check_listed(names: Iterable[str], listed: Collection[str], where: Path) -> None:
    """Raise ArtifactError for the first of `names` that is not one of those `listed`."""
    for name in names:
        if name not in listed:
            raise ArtifactError(
                f"{where}: no adapter {name!r}{did_you_mean(nearest(name, listed))}",
                f"it has: {', '.join(list(listed)[:20])}",
            )


def is_listing(path: Path) -> bool:
    """True if `path` names several adapters: lora_adapter.json, or the folder it is in."""
    return path.suffix != GGUF and (not path.is_dir() or (path / LISTING).is_file())


def shards_of(path: Path, root: Path | None = None) -> Path | None:
    """The folder of rank_0, rank_1, ... with shards of adapters: `path`, unless its listing names
    adapters like that; else that in the folder of the first one listed, or in slora/ there, as
    MindFormers has it, unless that adapter is whole. None where they are whole. Raises
    ArtifactError."""
    if not is_listing(path):
        return path if rank_folders(path) else None
    first = next(iter(adapter_folders(path, root).values()))
    if any((first / name).is_file() for name in (PEFT_FILE, MINDFORMERS_FILE)):
        return None
    return next((one for one in (first / CUT, first) if rank_folders(one)), None)


def check_inside(root: Path | None, *files: Path) -> None:
    """Raise ArtifactError for the first of `files`, there or not, that a link leads out of `root`;
    None: anywhere."""
    for file in files:
        try:
            inside = _is_inside(file, root)
        except (OSError, RuntimeError) as error:
            raise ArtifactError(f"{file}: {error}") from error
        if not inside:
            raise ArtifactError(
                f"{file}: leads to {file.resolve()}, which lies outside adapter_root={root}",
                "copy the file in place of the link, or name a folder that has both: "
                "adapter_root=DIR",
            )


def _is_inside(path: Path, root: Path | None) -> bool:
    real = path.resolve()
    return root is None or real.is_relative_to(root.resolve())


def weights_of(folder: Path) -> Path:
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
    # A safetensors file begins with a length, whose first byte may look like a pickle's.
    if not looks_like_safetensors(file) and looks_like_torch(file):
        raise refused(file, f"an adapter's are expected in {PEFT_FILE}")
    return file


def tensors_by_module(
    found: Mapping[str, LazyTensor], is_peft: bool
) -> dict[str, dict[str, LazyTensor]]:
    """Module -> its tensors "a", "b" and "copy" of the base weight; "" -> the rest by name."""
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


def digest(adapter: Adapter) -> str:
    """SHA-256 of an adapter's config and weights, which identifies files derived from them."""
    if adapter.folder.suffix == GGUF:
        return sha256_of(adapter.folder)
    return sha256_of(read_settings(adapter.folder).where, weights_of(adapter.folder))
