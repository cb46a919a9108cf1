"""Output paths of an export: a folder named by its settings, or the paths of its graphs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lite_runner.backends.lite.export.job import ExportJob, default_length
from lite_runner.config.model_dir import is_ours, yamls_in
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.mindir.manifest import MANIFEST, GraphName
from lite_runner.records import dataclass
from lite_runner.system.files import make_folder, put_in_place, sync_folder, temporary_folder
from lite_runner.weights.lora.adapter_reader import digest
from lite_runner.weights.write import check_replaced


@dataclass(frozen=True)
class OutputPaths:
    """The target of an artifact: a folder of its own, or paths in one that may hold more."""

    folder: Path
    stems: Mapping[GraphName, str] | None = None  # paths of graphs in it, without .mindir
    overwrite: bool = False

    @classmethod
    def of_graphs(cls, paths: Mapping[GraphName, Path], overwrite: bool) -> OutputPaths:
        """The folder that all paths are in, or all their folders; .mindir may be left out, as in
        MindFormers' yaml."""
        folder = next(iter(paths.values())).parent
        if {path.parent for path in paths.values()} != {folder}:
            folder = folder.parent
        stems = {  # another dot is the name's own, as in bloom_7.1b
            name: path.relative_to(folder).as_posix().removesuffix(".mindir")
            for name, path in paths.items()
        }
        return cls(folder, stems, overwrite)

    def check(self) -> None:
        """Raises ConfigError if the path exists already, or is a folder of something else."""
        taken = [self.folder]
        if self.stems is not None:
            names = [MANIFEST, "tokenizer.json", "tokenizer_config.json"]
            for stem in self.stems.values():
                names += [f"{stem}.mindir", f"{stem}_graph.mindir", f"{stem}_variables"]
            taken = [self.folder / name for name in names]
        for path in taken:
            if path.exists() and not self.overwrite:
                raise ConfigError(
                    f"{path}: exists already", "choose another name, or overwrite=true"
                )
        if self.stems is None:
            ours = (self.folder / MANIFEST).is_file()
            check_replaced(self.folder, "an exported model", ours=ours)

    def make_parent(self) -> None:
        """Make the folder that `folder` is to be in. Raises EnvironmentFault."""
        make_folder(self.folder.parent)

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """An empty folder to fill, with the artifact's name and on its disk; `take` it then."""
        try:
            with temporary_folder(self.folder.name, self.folder.parent) as temporary:
                folder = temporary.absolute() / self.folder.name
                folder.mkdir()
                yield folder
        except OSError as error:
            raise EnvironmentFault(
                f"{self.folder}: cannot be written: {error.strerror or error}",
                "check the permissions of the folder and the free space",
            ) from error

    def has_own_yaml(self) -> bool:
        """True if graphs go beside a yaml of the user's, which a second one would contradict."""
        if self.stems is None or not self.folder.is_dir():
            return False
        return any(not is_ours(path) for path in yamls_in(self.folder))

    def take(self, written: Path) -> None:
        """Give the finished artifact `written`, on the same disk, its name."""
        if self.stems is None:
            # If another process was first, its artifact has been verified too.
            if self.overwrite or not self.folder.exists():
                put_in_place(written, self.folder)
        else:
            self.folder.mkdir(exist_ok=True)
            (self.folder / MANIFEST).unlink(missing_ok=True)  # it comes last: none is half there
            for path in filter(is_ours, yamls_in(self.folder)):
                path.unlink()
            for folder in {Path(stem).parent for stem in self.stems.values()} - {Path()}:
                (self.folder / folder).mkdir(exist_ok=True)
                _move(written / folder, self.folder / folder)
                (written / folder).rmdir()
            _move(written, self.folder)
        sync_folder(self.folder.parent)


def _move(source: Path, target: Path) -> None:
    """Put all of a folder in place of what another has by these names, the manifest last."""
    for path in sorted(source.iterdir(), key=lambda path: path.name == MANIFEST):
        if (target / path.name).is_dir():
            shutil.rmtree(target / path.name)
        path.replace(target / path.name)
    sync_folder(target)


def output_paths(job: ExportJob, folder: str, *, overwrite: bool) -> OutputPaths:
    """The output paths of a config: those of its graphs, `folder`, or, where that
    is "", in a folder of output_dir."""
    settings, infer = job.settings, job.settings.infer
    if infer.prefill_model_path:
        first = Path(infer.prefill_model_path).expanduser()
        if settings.full_graph:
            return OutputPaths.of_graphs({"model": first}, overwrite)
        second = Path(infer.increment_model_path).expanduser()
        return OutputPaths.of_graphs({"prefill": first, "increment": second}, overwrite)
    if not folder:
        parts = [settings.source.name, job.spec.layout, *_particulars(job)]
        folder = f"{settings.output_dir}/{'_'.join(parts)}"
    target = Path(folder).expanduser()
    if target.name in ("", ".."):  # as export_output=., where a temporary folder has no name
        target = target.resolve()
    return OutputPaths(target, overwrite=overwrite)


def _particulars(job: ExportJob) -> Iterator[str]:
    """Settings other than the defaults on this device: each is part of the
    folder's name, so that exports that differ do not meet in one folder."""
    files, spec = job.files, job.spec
    if spec.target != job.engine.device:
        yield spec.target.lower()
    if spec.model_type == "mindir_lite":
        yield "lite"
    weights = spec.precision if spec.rounded == "float32" else spec.rounded
    if weights != ("float16" if spec.target == "Ascend" else "float32"):
        yield weights
    if spec.sampled:
        yield "sampled"
    if spec.key is not None:
        yield "encrypted"
    if spec.ranks > 1:
        yield f"tp{spec.ranks}"
    if not spec.fits_any:
        if spec.slots > 1:
            yield f"b{spec.slots}"
        if spec.length != default_length(files.model):
            yield f"s{spec.length}"
    if files.adapter is not None:
        # The name is the user's folder or from a file; two adapters may have the same.
        name = re.sub(r"[^\w.-]", "-", files.adapter.name)[:40]
        yield f"{name}-{digest(files.adapter)[:8]}"
