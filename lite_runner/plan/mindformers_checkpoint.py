"""A checkpoint as a release of MindFormers reads it."""

from __future__ import annotations

from pathlib import Path

from lite_runner.architectures import parameters
from lite_runner.backends.mindformers.release import MindFormersRelease
from lite_runner.config.release import Release
from lite_runner.model.files import ModelFiles
from lite_runner.weights.derive import cast
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.mindformers import to_mindformers
from lite_runner.weights.tensor import LazyTensor
from lite_runner.weights.write import HEAD, write_ckpt

_CACHE = ("key_past", "value_past")


def write_checkpoint(files: ModelFiles, release: MindFormersRelease, folder: Path) -> Path:
    """A checkpoint of the model with the names of the release: that of the run itself where it is
    one, else one that is written to `folder`. Raises RunnerError."""
    tensors = _named(files, release)
    if files.path is not None and files.path.suffix == ".ckpt" and files.path.is_file():
        stored = open_ckpt(files.path)
        # One that MindFormers saved has its cache in it, of another batch and length.
        as_it_is = files.adapter is None and not any(
            one.dtype == "BF16" or name.endswith(_CACHE) for name, one in stored.items()
        )
        if as_it_is and tensors.keys() <= stored.keys():
            return files.path.absolute()  # the worker works elsewhere
    wide = {
        name: cast(name, tensor, "F32") if tensor.dtype == "BF16" else tensor
        for name, tensor in tensors.items()
    }
    target = folder / "mindformers.ckpt"
    write_ckpt(target, wide)
    return target


def _named(files: ModelFiles, release: MindFormersRelease) -> dict[str, LazyTensor]:
    """Every tensor by the name that the release has for it. Raises ArtifactError."""
    model = files.model
    tensors = dict(files.whole())
    if Release.of(release.name).needs_head(model):
        tensors[HEAD] = tensors[parameters(model)[0].name]
    named = to_mindformers(tensors, model)
    return {release.tensor_name(model, name): tensor for name, tensor in named.items()}
