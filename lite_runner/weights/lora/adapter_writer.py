"""Writing adapters in PEFT's and MindFormers' formats, bit-identical."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import AdapterFormat, Release
from lite_runner.errors import ArtifactError
from lite_runner.system.files import make_folder
from lite_runner.weights import LazyTensor, same_values
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.formats.fused import fuse
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.lora.adapter import Adapter, LoraPair, TargetModule, by_module
from lite_runner.weights.lora.adapter_config import NAMES
from lite_runner.weights.lora.adapter_gguf import SUFFIX, write_lora_gguf
from lite_runner.weights.lora.adapter_reader import LISTING, MINDFORMERS_FILE, PEFT_FILE, PREFIX
from lite_runner.weights.write import check_folder, check_free, replaced_folder, write_files

# Files left by another conversion, which would be read in place of those written. config.json, of
# a model or an adapter, is not: that which is written beside it is read first.
_OURS = {PEFT_FILE, MINDFORMERS_FILE, LISTING, NAMES[0]}


def write_adapters(
    adapters: Mapping[str, Adapter],
    model: Decoder,
    target: Path,
    format: AdapterFormat,
    *,
    overwrite: bool = False,
    listed: bool,
    release: Release = Release(),  # noqa: B008  (frozen)
) -> None:
    """Write adapters of `model`: where `listed`, to folders in `target` beside a lora_adapter.json
    that names them, else the only one to `target` itself; GGUF has files in place of folders. In
    MindFormers' format the parameters have the names of its `release`, or each of the two that
    there are.

    Raises ConfigError for a folder that is not empty (without `overwrite`), ArtifactError where the
    format cannot hold an adapter, EnvironmentFault where nothing can be written.
    """
    if format == "gguf":
        _write_gguf(adapters, model, target, overwrite=overwrite, listed=listed)
        return
    folders = {name: target / name if listed else target for name in adapters}
    check_folder(target, overwrite)
    names = release.adapter_names if format == "mindformers" else ()
    contents = {name: adapter_content(adapter, model, names) for name, adapter in adapters.items()}
    for name, (tensors, settings) in contents.items():
        with replaced_folder(folders[name], _OURS) as folder:
            if format == "peft":
                write_safetensors(folder / PEFT_FILE, tensors, {"format": "pt"})
            else:
                write_ckpt(folder / MINDFORMERS_FILE, tensors)
            write_files(folder, {NAMES[0]: _json(settings)})
    if listed:
        make_folder(target)
        write_files(target, {LISTING: _json({name: name for name in adapters})})


def _write_gguf(
    adapters: Mapping[str, Adapter], model: Decoder, target: Path, *, overwrite: bool, listed: bool
) -> None:
    if not listed:
        check_free(target, overwrite)
        (adapter,) = adapters.values()
        write_lora_gguf(adapter, model, target)
        return
    check_folder(target, overwrite)
    make_folder(target)
    for name, adapter in adapters.items():
        write_lora_gguf(adapter, model, target / f"{name}{SUFFIX}")
    write_files(target, {LISTING: _json({name: f"{name}{SUFFIX}" for name in adapters})})


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def adapter_content(
    adapter: Adapter, model: Decoder, mindformers: Sequence[str]
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """The tensors and the config of one adapter, in MindFormers' format with the names that it
    gives them; without any in PEFT's."""
    modules = by_module(model, hugging_face=not mindformers)
    held = {
        module: _joined(module, places, adapter, model)
        for module, places in modules.items()
        if any(site.weight in adapter.pairs for site in places)
    }
    tensors: dict[str, LazyTensor] = {}
    for module, pair in held.items():
        starts = [f"{module}.{name}" for name in mindformers]
        names = [(f"{start}a", f"{start}b") for start in starts]
        for name_a, name_b in names or [_peft_names(module, modules[module][0])]:
            tensors |= {name_a: pair.a, name_b: pair.b}
    return tensors, _settings(adapter, held, list(modules), model, peft=not mindformers)


def _peft_names(module: str, site: TargetModule) -> tuple[str, str]:
    if site.is_embedding:
        start = f"{PREFIX}{module}.lora_embedding_"
        return f"{start}A", f"{start}B"
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def _joined(module: str, places: list[TargetModule], adapter: Adapter, model: Decoder) -> LoraPair:
    """The pair of a module; a fused q, k and v must share one A."""
    pairs = [adapter.pairs[site.weight] for site in places if site.weight in adapter.pairs]
    first = pairs[0]
    kinds = {(pair.a.dtype, pair.b.dtype, pair.scale) for pair in pairs}
    shared = len(kinds) == 1 and all(same_values(pair.a, first.a) for pair in pairs[1:])
    if len(pairs) < len(places) or not shared:
        raise ArtifactError(
            f"adapter {adapter.name}: the format keeps q, k and v in one module, {module}, with "
            "one A for all; this adapter has "
            + ("not all of them" if len(pairs) < len(places) else "another A or scale for each"),
            "keep it in MindFormers' format, or merge it: merge=true",
        )
    parts = [site.fused for site in places if site.fused is not None]
    b = fuse(parts, [pair.b for pair in pairs], model) if parts else first.b
    return LoraPair(first.a, b, first.scale)


def _settings(
    adapter: Adapter,
    held: Mapping[str, LoraPair],
    modules: list[str],
    model: Decoder,
    *,
    peft: bool,
) -> dict[str, Any]:
    """The config of an adapter, in PEFT's format or in MindFormers'."""
    numbers = {module: (pair.rank, _alpha(pair)) for module, pair in held.items()}
    ((rank, alpha), _count), *others = Counter(numbers.values()).most_common()
    if others and not peft:
        raise ArtifactError(
            f"adapter {adapter.name}: has {1 + len(others)} pairs of rank and alpha, such as "
            f"{rank} and {alpha:g}, {others[0][0][0]} and {others[0][0][1]:g}; MindFormers' format "
            "has one for all modules",
            "keep it in PEFT's format, which is read as it is",
        )
    basic = {
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": 0.0,
        "target_modules": _targets(held, modules),
    }
    if not peft:
        return basic
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": architecture_of(model).conv1d,
        "inference_mode": True,
        "use_rslora": False,
        **basic,
        "rank_pattern": {re.escape(m): r for m, (r, _) in numbers.items() if r != rank},
        "alpha_pattern": {re.escape(m): _plain(a) for m, (_, a) in numbers.items() if a != alpha},
    }


def _alpha(pair: LoraPair) -> float:
    """The alpha whose alpha / r is the pair's scale."""
    alpha = pair.scale * pair.rank
    # Rounding may be one step off; a neighbour is exact.
    near = (alpha, float(np.nextafter(alpha, 0)), float(np.nextafter(alpha, 2 * alpha)))
    return next((value for value in near if value / pair.rank == pair.scale), alpha)


def _plain(alpha: float) -> int | float:
    return int(alpha) if alpha.is_integer() else alpha


def _targets(held: Mapping[str, LoraPair], modules: list[str]) -> list[str]:
    """The last parts of the modules' names, or whole names where those would match others."""
    last = {name.rpartition(".")[2] for name in held}
    matched = {name for name in modules if name.rpartition(".")[2] in last}
    return sorted(last if matched == held.keys() else held)
