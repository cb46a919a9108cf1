"""A repository of a hub: the files of it that a run needs, downloaded to the cache.

It is cached in blobs/, snapshots/ and refs/, as huggingface_hub has it, so that either finds what
the other has downloaded: ours is below cache_dir(), and what Hugging Face's own cache has is not
downloaded again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from lite_runner import progress
from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.system.files import atomic_write, cache_dir
from lite_runner.system.user_cache import is_intact
from lite_runner.weights.checkpoint import FILES
from lite_runner.weights.download import (
    Remote,
    download,
    one_process,
    unwritable,
    without_credentials,
)
from lite_runner.weights.formats import INDEX, TOKENIZER_FILES, TORCH_INDEX
from lite_runner.weights.formats.gguf_file import PART, parts_of
from lite_runner.weights.formats.hugging_face import read_index
from lite_runner.weights.hubs import DIGEST, HUBS, Hub, HubFile, hugging_face_cache

USUAL = "Q4_K_M"  # llama.cpp's choice in a repository with several quantizations
ADAPTER = "adapter_config.json"
# Of sentence-transformers: its settings, the steps to an embedding, and those of the default step.
MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
POOLING = "1_Pooling/config.json"
# Files beside the weights: tokenizer, and description of the quantization.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quant_model_description.json",
    "quantization_description.json",
    "quantization.json",
    *TOKENIZER_FILES,
    MODULES,
    PROMPTS,
    POOLING,
)
_SAYS_TOKENS = {"tokenizer.json", "tokenizer.model", "ice_text.model", "vocab.json"}
# Of each format: the single file, the index of shards and their names, and suffixes.
_FORMATS = (
    (
        "quant_model_weights.safetensors",
        "quant_model_weights.safetensors.index.json",
        re.compile(r"quant_model_weights.*\.safetensors"),
        (),
    ),
    ("model.safetensors", INDEX, re.compile(r"(quant-)?model.*\.safetensors"), (".safetensors",)),
    ("", "", None, (".ckpt",)),
    ("pytorch_model.bin", TORCH_INDEX, re.compile(r"pytorch_model.*\.bin"), (".bin", ".pth")),
)
_OTHERS = re.compile(r"(adapter_model|consolidated|training_args|optimizer|scheduler).*")
_NO_MODEL = re.compile(r"(?i)(.*/)?(mmproj|[^/]*imatrix).*")
_QUANTIZATION = re.compile(
    r"(?i)(?:.*[-._/])?((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|FP?16|FP?32))"
)


@dataclass(frozen=True)
class Repository:
    """The files that a run reads of a repository at a revision: a branch, a tag or a commit."""

    name: str
    revision: str = ""  # "": the hub's default branch
    file: str = ""  # a path in the repository; "": all weights
    quantization: str = ""  # of several GGUF files
    scheme: str = "hf"

    @property
    def hub(self) -> Hub:
        return HUBS[self.scheme]

    @property
    def uri(self) -> str:
        """The source as users write it, without the revision."""
        file = f"/{self.file}" if self.file else ""
        return f"{self.scheme}://{self.name}{file}{self.quantization and ':'}{self.quantization}"

    @property
    def _place(self) -> Path:
        return cache_dir() / self.hub.folder / self._folder_name

    @property
    def _folder_name(self) -> str:
        return f"models--{self.name.replace('/', '--')}"

    @property
    def _branch(self) -> str:
        return self.revision or self.hub.branch

    @property
    def _needs_folder(self) -> str | None:
        """The folder of the repository whose files are asked for, too."""
        return "" if self.quantization else self.file.rpartition("/")[0] or None

    def cached(self, *, weights: bool) -> Path | None:
        """The folder or file in the cache, if all that a run needs is there, undamaged."""
        found = self._here(weights=weights)
        return None if found is None or _damaged(*found) else self._entry(*found)

    def fetch(self, *, weights: bool) -> Path:
        """The folder of its files, or its GGUF file, downloaded unless they are there; without a
        network, the cached one. Raises as `download`, and ArtifactError."""
        try:
            listing = self.hub.listing(self.name, self._branch, self._needs_folder)
        except (OSError, ValueError) as error:
            found = self._here(weights=weights)
            damaged = [] if found is None else _damaged(*found)
            if found is None or damaged:
                raise self._unreachable(error, damaged) from error
            return self._entry(*found)
        names = self.needed(listing.files, weights=weights)
        folder = self._place / "snapshots" / listing.commit
        damaged = _damaged(folder, names)
        if names and not damaged and all((folder / name).is_file() for name in names):
            with suppress(EnvironmentFault):  # a read-only cache
                self._point_to(folder)
            return self._entry(folder, names)
        files = {
            name: self._remote(listing.files[name], f"{listing.commit}-{name}") for name in names
        }
        with one_process(self._place / ".lock", self.name):
            for path in _damaged(folder, names) if damaged else ():  # none, if another was first
                progress.note(f"{path} is damaged, and fetched again")
                try:
                    path.resolve().unlink()
                except OSError as error:
                    raise unwritable(path, error) from error
            for file in files.values():
                self._borrow(file)
            try:
                # Equal files share a blob.
                download(list({file.target: file for file in files.values()}.values()), self.name)
            except OSError as error:
                raise self._unreachable(error) from error
            self._link(folder, files)
        return self._entry(folder, names)

    def weights_to_fetch(self) -> int | None:
        """Bytes of its weights that are not here yet; None where the hub does not say, and of GGUF
        files, whose bytes do not tell how large the model is."""
        with suppress(Exception):  # `fetch` reports the error
            files = self.hub.listing(self.name, self._branch, self._needs_folder).files
            names = self.needed(files, weights=True)
            sizes = [files[name].size or 0 for name in names if name.endswith(".safetensors")]
            return sum(sizes) or None
        return None

    def needed(self, names: Collection[str], *, weights: bool) -> list[str]:
        """The paths of a repository that a run needs, the weights last. Raises
        ArtifactError where it has no weights, or it is not clear which."""
        if self.file:
            return self._file_and_beside(names, weights=weights)
        if self.quantization:
            return self._quantized(names, self.quantization)
        top = [name for name in names if "/" not in name]  # folders have copies in other formats
        beside = [name for name in _BESIDE if name in (*top, POOLING) and name in names]
        if ADAPTER in top and "config.json" not in top:
            return [ADAPTER, *(name for name in top if name.startswith("adapter_model."))]
        found = self._weights(top)
        if not found and any(name.endswith(".gguf") for name in names):
            alone = not weights and "config.json" in beside and _SAYS_TOKENS & set(beside)
            return beside if alone else self._quantized(names, "")
        if weights and not found:
            raise ArtifactError(
                f"{self.uri}: it has no weights that can be read (safetensors, .bin, .ckpt or"
                f" GGUF); it has {_some(names)}",
                f"name a file of it: {self.uri}/FILE",
            )
        beside += _own_files(found[0], names) if found else []
        return [*beside, *(found if weights else ())]

    def _weights(self, top: Sequence[str]) -> list[str]:
        for whole, index, shards, suffixes in _FORMATS:
            if index in top and shards is not None:
                others = [name for name in top if name != whole]
                usual = [name for name in others if shards.fullmatch(name)]
                # The index, which is not here yet, may call them otherwise.
                kind = PurePosixPath(whole).suffix
                return [index, *(usual or (name for name in others if name.endswith(kind)))]
            if whole in top:
                return [whole]
            found = [
                name for name in top if name.endswith(suffixes) and not _OTHERS.fullmatch(name)
            ]
            if len(found) > 1:
                raise ArtifactError(
                    f"{self.uri}: it has {len(found)} files of weights: {_some(found)}",
                    f"name one: {self.uri}/{found[0]}",
                )
            if found:
                return found
        return []

    def _file_and_beside(self, names: Collection[str], *, weights: bool) -> list[str]:
        if self.file not in names:
            kind = PurePosixPath(self.file).suffix
            others = [name for name in names if name.endswith(kind)]
            raise ArtifactError(
                f"{self.uri}: the repository {self.name} has no such file",
                f"of {kind} files it has {_some(others)}" if others else f"it has {_some(names)}",
            )
        if self.file.endswith(".gguf"):
            return self._parts(self.file, names)
        folder = self.file.rpartition("/")[0]
        paths = [f"{folder}/{name}" if folder else name for name in _BESIDE]
        beside = [path for path in paths if path in names] + _own_files(self.file, names)
        return beside + ([self.file] if weights else [])

    def _quantized(self, names: Collection[str], quantization: str) -> list[str]:
        """The parts of the GGUF of a quantization; "": of the only one, or the usual one."""
        # Parts of a checkpoint have the same name.
        checkpoints: dict[str, str] = {}
        for name in sorted(names):
            if name.endswith(".gguf") and not _NO_MODEL.fullmatch(name):
                part = PART.fullmatch(name)
                checkpoints.setdefault(part["name"] if part else name.removesuffix(".gguf"), name)
        if not quantization and len(checkpoints) == 1:
            return self._parts(next(iter(checkpoints.values())), names)
        fits = [file for stem, file in checkpoints.items() if _is_of(stem, quantization or USUAL)]
        if len(fits) == 1:
            if not quantization:
                progress.note(f"{self.uri}: {fits[0]}, of {len(checkpoints)} GGUF files")
            return self._parts(fits[0], names)
        known = {match[1] for stem in checkpoints if (match := _QUANTIZATION.fullmatch(stem))}
        what = f"{len(fits) or 'no'} GGUF files of {quantization or USUAL}"
        raise ArtifactError(
            f"{self.scheme}://{self.name}: it has {what}: {_some(fits or sorted(names))}",
            f"choose a quantization, {self.scheme}://{self.name}:{min(known)}"
            + (f" (of {', '.join(sorted(known))})" if len(known) > 1 else "")
            if known and not fits
            else f"name a file of it: {self.scheme}://{self.name}/FILE.gguf",
        )

    def _parts(self, name: str, names: Collection[str]) -> list[str]:
        """All parts of a GGUF, of which `name` is one. Raises ArtifactError where some are
        missing."""
        parts = [one.as_posix() for one in parts_of(Path(name))]
        if missing := [one for one in parts if one not in names]:
            raise ArtifactError(f"{self.uri}: {name}: the repository lacks {_some(missing)}")
        return parts

    def _here(self, *, weights: bool) -> tuple[Path, list[str]] | None:
        """A snapshot in our cache or Hugging Face's, and the paths in it that a run needs, if they
        are there."""
        places = [self._place]
        if self.scheme == "hf":
            places.append(hugging_face_cache() / self._folder_name)
        for place in places:
            commit = self._branch
            with suppress(OSError, ValueError):  # else the revision is a commit
                commit = (place / "refs" / commit).read_text(encoding="utf-8").strip()
            folder = place / "snapshots" / commit
            with suppress(OSError, ArtifactError):
                names = [
                    path.relative_to(folder).as_posix()
                    for path in sorted(folder.rglob("*"))
                    if path.is_file()
                ]
                # A tokenizer downloaded alone lies in the same folder.
                known = [*names, self.file] if self.file else names
                needed = self.needed(known, weights=weights)
                indexes = [name for name in needed if name.endswith(".index.json")]
                shards = {shard for name in indexes for shard in read_index(folder / name)}
                if needed and {*needed, *shards} <= {*names}:
                    return folder, needed
        return None

    def _entry(self, folder: Path, names: Sequence[str]) -> Path:
        """The path to read: the first part of a GGUF, the file that was named, or the folder."""
        if names and names[0].endswith(".gguf"):
            return folder.resolve() / names[0]
        if self.file:
            return folder.resolve() / self.file
        return folder.resolve()

    def _remote(self, file: HubFile, name: str) -> Remote:
        target = self._place / "blobs" / (file.digest or name.replace("/", "--"))
        return Remote(file.url, target, file.size, file.digest, self.hub.headers())

    def _borrow(self, file: Remote) -> None:
        """Link to a file that Hugging Face's cache has, in place of a download."""
        theirs = hugging_face_cache() / self._folder_name / "blobs" / file.digest
        if self.scheme != "hf" or not file.digest or file.target.exists() or not theirs.is_file():
            return
        if file.size in (None, theirs.stat().st_size) and is_intact(theirs, file.digest):
            try:
                file.target.parent.mkdir(parents=True, exist_ok=True)
                file.target.unlink(missing_ok=True)  # a dangling link
                file.target.symlink_to(theirs.resolve())
            except OSError as error:
                raise unwritable(file.target, error) from error

    def _link(self, folder: Path, files: Mapping[str, Remote]) -> None:
        """Make the folder of a commit, with links to the blobs of its files."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, file in files.items():
                link = folder / name
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.unlink(missing_ok=True)
                    link.symlink_to(os.path.relpath(file.target, link.parent))
        except OSError as error:
            raise unwritable(folder, error) from error
        self._point_to(folder)

    def _point_to(self, folder: Path) -> None:
        """Write the commit of the revision to refs/. Raises EnvironmentFault."""
        commit, reference = folder.name, self._place / "refs" / self._branch
        if self._branch == commit:
            return
        if not reference.is_file() or reference.read_text(encoding="utf-8") != commit:
            with atomic_write(reference) as written:
                written.write(commit.encode())

    def _unreachable(self, error: Exception, damaged: Sequence[Path] = ()) -> ArtifactError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ArtifactError(
            without_credentials(
                "".join(f"{path}: damaged; " for path in damaged)
                + f"{self.uri}: the repository {self.name} could not be fetched from"
                f" {self.hub.endpoint}: {reason}"
            ),
            f"check the network and the name, {self.hub.remedy},"
            " or give load_checkpoint= a local path (load_checkpoint=random for random weights)",
        )


def _own_files(file: str, names: Collection[str]) -> list[str]:
    """Config and tokenizer of a weights file alone, as run_mode=convert writes them beside it."""
    return [name for name in names if name.startswith(f"{file}{FILES}/")]


def _is_of(stem: str, quantization: str) -> bool:
    """True if a GGUF without its suffix is of a quantization, by its name or that of its folder."""
    folder, _, name = stem.lower().rpartition("/")
    wanted = quantization.lower()
    return folder == wanted or re.fullmatch(f"(.*[-._])?{re.escape(wanted)}", name) is not None


def _damaged(folder: Path, names: Sequence[str]) -> list[Path]:
    """The files of a snapshot whose digest is not the one that names their blob."""
    with suppress(OSError):
        paths = [folder / name for name in names]
        known = {path: path.readlink().name for path in paths if path.is_symlink()}
        return [
            path
            for path, name in known.items()
            if DIGEST.fullmatch(name) and path.exists() and not is_intact(path, name)
        ]
    return []


def _some(names: Collection[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (" ..." if listed[8:] else "") if listed else "no files"
