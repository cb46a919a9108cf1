"""Which adapters a path names: lora_adapter.json, or the folder of one adapter."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from lite_runner.config.prompt import adapter_name
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ArtifactError
from lite_runner.system.json_file import read_json_object
from lite_runner.weights.sharding.shard_manifest import rank_folders

LISTING = "lora_adapter.json"
_NAME = re.compile(r"\w[\w .+@-]*")  # also the name of a folder


def is_listing(path: Path) -> bool:
    """Whether `path` names several adapters: lora_adapter.json, or the folder it is in."""
    return not path.is_dir() or (path / LISTING).is_file()


def is_sharded(path: Path) -> bool:
    """Whether `path` is a folder of rank_0, rank_1, ... with shards of adapters, and not one whose
    listing names adapters like that."""
    return bool(rank_folders(path)) and not is_listing(path)


def check_listed(names: Iterable[str], listed: Collection[str], where: Path) -> None:
    """Raise ArtifactError for the first of `names` that is not one of those `listed`."""
    for name in names:
        if name not in listed:
            raise ArtifactError(
                f"{where}: no adapter {name!r}{did_you_mean(nearest(name, listed))}",
                f"it has: {', '.join(list(listed)[:20])}",
            )


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
        if _is_inside(path.parent, root):
            check_inside(root, path)
    if path.suffix != ".json":
        raise ArtifactError(
            f"adapter_path: {path}: expected {LISTING} or a folder", f"try {path.parent}"
        )
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
    folder = base / entry  # an absolute path stays as it is
    try:
        inside = _is_inside(folder, root)
        folder.is_dir()  # to resolve a name that is too long is no error
    except (OSError, RuntimeError) as error:  # a name too long, a link to itself
        raise ArtifactError(f"{where}: {name}: {entry}: {error}") from error
    if not inside:
        raise ArtifactError(
            f"{where}: {name}: {folder} lies outside adapter_root={root}",
            "move the adapter there, or name the folder that all of them are in: adapter_root=DIR",
        )
    return folder


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
