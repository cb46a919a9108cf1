"""A training's checkpoint as MindFormers saves and resumes it: all parameters by its names, AdamW's
moments beside them (adam_m.NAME and adam_v.NAME; exp_avg of its fused AdamW), and the step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import LORA_NAME
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.training.adapter import TrainedLora, in_memory, lora_of
from lite_runner.training.kernels import Array
from lite_runner.training.options import LoraOptions
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import LORA, is_not_weight, rank_folders
from lite_runner.weights.formats.ckpt_file import looks_like_ckpt, open_ckpt, write_ckpt
from lite_runner.weights.formats.mindformers import to_mindformers, with_canonical_names
from lite_runner.weights.formats.safetensors_file import (
    StoredTensor,
    looks_like_safetensors,
    open_safetensors,
)
from lite_runner.weights.lora.adapter_config import lora_settings
from lite_runner.weights.lora.adapter_reader import fitted
from lite_runner.weights.lora.adapter_writer import adapter_content

FOLDER = "checkpoint"  # of rank_0, as in CheckpointMointor
_MOMENTS = re.compile(r"(adam_m|adam_v|exp_avg|exp_avg_sq)\.(.+)")
_FIRST = ("adam_m", "exp_avg")
_COUNTERS = ("global_step", "step_num")  # the first is 0 for optimizers that do not count


@dataclass(frozen=True)
class SavedTraining:
    """A training to resume. Moments are by the names of the trained tensors, and read when they are
    used."""

    path: Path
    step: int
    base: Mapping[str, LazyTensor]  # the model's tensors
    lora: TrainedLora | None  # None: the model itself was trained
    first: Mapping[str, LazyTensor]
    second: Mapping[str, LazyTensor]


def checkpoint_file(path: Path) -> Path:
    """The file that MindFormers would resume of a folder with rank_0, whose newest it is; any other
    path as it is. Raises ArtifactError for the checkpoints of several ranks."""
    ranks = rank_folders(path)
    if not ranks:
        return path
    files = [one for one in ranks[0][1].iterdir() if one.suffix in (".ckpt", ".safetensors")]
    if len(ranks) > 1 or not files:
        raise ArtifactError(
            f"{path}: {len(files)} checkpoints of {len(ranks)} ranks; a training is resumed here"
            " from the checkpoint of one",
            "finetune.resume=false goes on with the weights alone",
        )
    return max(files, key=lambda file: (file.stat().st_mtime_ns, file.name))


def open_training(path: Path, model: Decoder, options: LoraOptions) -> SavedTraining | None:
    """The training that a file holds; None: it has no state of AdamW. Raises ArtifactError where it
    does not fit the model."""
    if not path.is_file():
        return None
    counters: dict[str, StoredTensor] = {}
    if looks_like_safetensors(path):
        found = open_safetensors(path, lambda name: False, counters)
    elif looks_like_ckpt(path):
        found = open_ckpt(path, counters)
    else:
        return None
    moments: tuple[dict[str, LazyTensor], dict[str, LazyTensor]] = {}, {}
    for name, tensor in found.items():
        if match := _MOMENTS.fullmatch(name):
            moments[match[1] not in _FIRST][match[2]] = tensor
    if not moments[0] or moments[0].keys() != moments[1].keys():
        return None
    weights = {name: one for name, one in found.items() if not is_not_weight(name)}
    adapter = {name: one for name, one in weights.items() if LORA.fullmatch(name)}
    rest = {name: one for name, one in weights.items() if name not in adapter}
    base = with_canonical_names(rest, model, str(path))
    step = max(_number(counters.get(name), path) for name in _COUNTERS)
    if not adapter:
        first, second = (with_canonical_names(one, model, str(path)) for one in moments)
        return SavedTraining(path, step, base, None, first, second)
    modules = sorted({match[1] for name in adapter if (match := LORA.fullmatch(name))})
    alpha = options.alpha * (math.sqrt(options.r) if options.rslora else 1)
    settings = lora_settings(path, options.r, alpha, modules)

    def opened(tensors: Mapping[str, LazyTensor]) -> TrainedLora:
        return lora_of(fitted("lora", path, tensors, path, settings, model), model)

    first, second = (
        {name: in_memory(array) for name, array in opened(one).arrays.items()} for one in moments
    )
    return SavedTraining(path, step, base, opened(adapter), first, second)


def _number(stored: StoredTensor | None, path: Path) -> int:
    if stored is None:
        return 0
    kind = {"I32": np.int32, "I64": np.int64}.get(stored.dtype)
    values = [] if kind is None else np.frombuffer(stored.data, kind).tolist()
    if len(values) != 1 or values[0] < 0:
        raise ArtifactError(
            f"{path}: its step is {stored.dtype} {values[:3]}, expected one integer",
            "finetune.resume=false goes on with the weights alone",
        )
    return int(values[0])


def write_training(
    path: Path,
    model: Decoder,
    base: Mapping[str, LazyTensor],
    lora: TrainedLora | None,
    moments: Sequence[Mapping[str, Array]],
    *,
    step: int,
    epoch: int,
) -> None:
    """Write what MindFormers' `resume_training: True` goes on from: the model's tensors, an adapter
    beside them, and the moments of what is trained. Raises EnvironmentFault."""

    def named(arrays: Mapping[str, Array]) -> dict[str, LazyTensor]:
        if lora is None:
            return to_mindformers({name: in_memory(one) for name, one in arrays.items()}, model)
        adapter = TrainedLora(arrays, lora.deltas).adapter()
        return adapter_content(adapter, model, (LORA_NAME,))[0]

    tensors = to_mindformers(base, model)
    if lora is not None:
        tensors |= named(lora.arrays)
    for kind, arrays in zip(("adam_m", "adam_v"), moments, strict=True):
        tensors |= {f"{kind}.{name}": tensor for name, tensor in named(arrays).items()}
    counters = {"global_step": step, "step_num": step, "epoch_num": epoch}
    write_ckpt(path, tensors, counters)
