"""Where an export is written: a folder of its own, or the two paths of a pair of graphs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lite_runner.config.model_dir import yamls_in
from lite_runner.config.model_yaml import is_ours
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import MANIFEST, GraphName
from lite_runner.records import dataclass
from lite_runner.system.files import make_folder, put_in_place, sync_folder, temporary_folder


@dataclass(frozen=True)
class OutputPaths:
    """Where an artifact goes: a folder of its own, or two paths in one that may hold more."""

    folder: Path
    stems: Mapping[GraphName, str] | None = None  # paths of the pair in it, without .mindir
    overwrite: bool = False

    @classmethod
    def of_pair(cls, prefill: Path, increment: Path, overwrite: bool) -> OutputPaths:
        """The folder that both paths are in, or both their folders; .mindir may be left out, as in
        MindFormers' yaml."""
        folder = prefill.parent if prefill.parent == increment.parent else prefill.parent.parent
        stems: dict[GraphName, str] = {  # another dot is the name's own, as in bloom_7.1b
            "prefill": prefill.relative_to(folder).as_posix().removesuffix(".mindir"),
            "increment": increment.relative_to(folder).as_posix().removesuffix(".mindir"),
        }
        return cls(folder, stems, overwrite)

    def check(self) -> None:
        """Raises ConfigError where something stands there already."""
        taken = [self.folder]
        if self.stems is not None:
            names = [MANIFEST]
            for stem in self.stems.values():
                names += [f"{stem}.mindir", f"{stem}_graph.mindir", f"{stem}_variables"]
            taken = [self.folder / name for name in names]
        for path in taken:
            if path.exists() and not self.overwrite:
                raise ConfigError(
                    f"{path}: exists already", "choose another name, or overwrite=true"
                )

    def make_parent(self) -> None:
        """Make the folder that `folder` is to be in. Raises EnvironmentFault."""
        make_folder(self.folder.parent)

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """An empty folder to fill, with the artifact's name and on its disk; `take` it then."""
        with temporary_folder(self.folder.name, self.folder.parent) as temporary:
            folder = temporary.absolute() / self.folder.name
            folder.mkdir()
            yield folder

    def has_own_yaml(self) -> bool:
        """Whether graphs go beside a yaml of the user's; of two nobody would know which holds."""
        if self.stems is None or not self.folder.is_dir():
            return False
        return any(not is_ours(path) for path in yamls_in(self.folder))

    def take(self, written: Path) -> None:
        """Give the finished artifact `written`, on the same disk, its name."""
        if self.stems is None:
            # Where another process was first, its artifact has been verified like this one.
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
