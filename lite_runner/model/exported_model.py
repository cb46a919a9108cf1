"""The exported model that a run names: a folder, the paths of a pair, or that of one graph.

With a manifest it is validated against that; without one its graphs are inspected, and must have
the inputs of a known layout. Names of files tell them apart, never names of folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from lite_runner import progress
from lite_runner.config.sections import MANIFEST, Infer, ModelSource
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system import environment

if TYPE_CHECKING:
    from lite_runner.mindir.manifest import GraphName, Manifest

FILE_NAME = "config.ini"  # GE options, in the file that MindFormers reads beside the graphs
# Models above 1 GB have _graph in their files' names; MindFormers' documents have it in all.
PREFILL_ENDS = ("prefill_graph.mindir", "prefill.mindir")
INCREMENT_ENDS = ("inc_graph.mindir", "inc.mindir")


@dataclass(frozen=True)
class ExportedModel:
    """A validated exported model. `ge_files`: the config.ini beside it, if any."""

    folder: Path
    manifest: Manifest  # read, or inferred from the graphs
    ge_files: tuple[Path, ...]

    @property
    def graphs(self) -> Mapping[GraphName, Path]:
        return self.manifest.paths(self.folder)

    @property
    def nbytes(self) -> int:
        """Size of the files of the graphs, or of the packed layers."""
        return sum(path.stat().st_size for path in self.graphs.values())


def exported_model(source: ModelSource) -> ExportedModel | None:
    """The exported model that a run names; None where it names none.

    Raises ArtifactError for a file that is missing, changed, half of a pair, ambiguous or no
    MindIR, and for another model than the run names.
    """
    if (infer := source.exported) is None:
        return None
    try:
        return _find(infer, source)
    except OSError as error:
        where = infer.model_dir or infer.prefill_model_path
        raise ArtifactError(f"{where}: cannot be read: {error.strerror or error}") from error


def _find(infer: Infer, source: ModelSource) -> ExportedModel:
    from lite_runner.mindir.manifest import read_manifest

    if infer.model_dir:
        folder = Path(infer.model_dir).expanduser()
        if not folder.is_dir():
            raise ArtifactError(f"{folder}: no such folder", "infer.model_dir= an exported model")
        if (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
        else:
            from lite_runner.config.model_dir import only_yaml

            only_yaml(folder)  # with several yamls the sizes would be ambiguous
            manifest = _inspect(graphs_in(folder), source)
    else:
        paths = graph_paths(infer.prefill_model_path, infer.increment_model_path)
        folder = common_folder(paths)
        manifest = _manifest_of(folder, paths) or _inspect(paths, source)
    if infer.model_type not in (None, manifest.model_type.lower()):
        raise ArtifactError(
            f"{folder}: the model is {manifest.model_type.lower()}, got "
            f"infer.model_type={infer.model_type}",
            "leave infer.model_type= out",
        )
    ge_file = folder / FILE_NAME
    return ExportedModel(folder, manifest, (ge_file,) if ge_file.is_file() else ())


def graphs_in(folder: Path) -> dict[GraphName, Path]:
    """The MindIR files of a folder: a pair, told apart by the ends of their names, or a single one.

    Raises ArtifactError for any other content.
    """
    found = sorted(path for path in folder.iterdir() if path.suffix == ".mindir")
    names = ", ".join(path.name for path in found)
    expected = f"expected one MindIR, or ...{PREFILL_ENDS[0]} and ...{INCREMENT_ENDS[0]}"
    if not found:
        if any(path.suffix == ".ms" for path in folder.iterdir()):
            raise ArtifactError(f"{folder}: a .ms, but no {MANIFEST}", _MS_HINT)
        raise ArtifactError(f"{folder}: no MindIR in it; {expected}")
    if len(found) > 2:
        raise ArtifactError(f"{folder}: got {len(found)} MindIR files ({names}); {expected}")
    prefill = [path for path in found if path.name.endswith(PREFILL_ENDS)]
    increment = [path for path in found if path.name.endswith(INCREMENT_ENDS)]
    if len(found) == 1 and not increment:  # a full graph may be named prefill
        return {"model": found[0]}
    if len(found) == 2 and not prefill and not increment:  # as in x_prefill_seq1024_bs1.mindir
        prefill = [path for path in found if "prefill" in path.name]
        increment = [path for path in found if path not in prefill] if prefill else []
    if len(prefill) == 1 and len(increment) == 1:
        return {"prefill": prefill[0], "increment": increment[0]}
    ends = ((PREFILL_ENDS[0], prefill), (INCREMENT_ENDS[0], increment))
    missing = [end for end, one in ends if not one]
    half = f"only one of a pair, there is no ...{missing[0]}; " if len(missing) == 1 else ""
    raise ArtifactError(f"{folder}: {half}got {names}; {expected}")


_MS_HINT = "a .ms does not describe its inputs: keep it with its manifest, or give the MindIR"


def graph_paths(prefill: str, increment: str) -> dict[GraphName, Path]:
    """The graphs at these paths; without `increment` a single one. Raises ArtifactError."""
    first = _existing_file(prefill, "infer.prefill_model_path")
    if not increment:
        return {"model": first}
    second = _existing_file(increment, "infer.increment_model_path")
    if first.samefile(second):
        raise ArtifactError(
            f"{first}: the prefill and the increment graph are the same file",
            "infer.increment_model_path= the other graph; a single graph needs the first path only",
        )
    return {"prefill": first, "increment": second}


def _existing_file(given: str, key: str) -> Path:
    """The file at a path, or at its other name: an export to x writes x.mindir, and x_graph.mindir
    if the model is above 1 GB."""
    path = Path(given).expanduser()
    if path.is_file():
        return path
    stem = path.name.removesuffix(".mindir").removesuffix("_graph")
    others = [path.with_name(f"{stem}{end}") for end in (".mindir", "_graph.mindir")]
    found = [other for other in others if other.is_file()]
    if len(found) == 1:
        progress.note(f"{path}: no such file; using {found[0].name}")
        return found[0]
    if found:
        raise ArtifactError(
            f"{path}: no such file, but both {found[0].name} and {found[1].name} exist",
            f"{key}= one of them",
        )
    what = "a folder; infer.model_dir= takes one" if path.is_dir() else "no such file"
    raise ArtifactError(f"{path}: {what}", f"{key}= the path of a MindIR")


def common_folder(paths: Mapping[GraphName, Path]) -> Path:
    """The folder with the manifest and config.ini of these graphs: their own, or the one above both
    of their folders, as run_mode=export writes them."""
    folders = {path.parent for path in paths.values()}
    above = {folder.parent for folder in folders}
    if len(folders) > 1 and len(above) == 1 and (above_all := above.pop() / MANIFEST).is_file():
        return above_all.parent
    return next(iter(paths.values())).parent


def _manifest_of(folder: Path, paths: Mapping[GraphName, Path]) -> Manifest | None:
    from lite_runner.mindir.manifest import read_manifest

    if not (folder / MANIFEST).is_file():
        return None
    graphs = read_manifest(folder, check_files=False).paths(folder)
    named = {name: path.resolve() for name, path in graphs.items()}
    given = {name: path.resolve() for name, path in paths.items()}
    if given == named:
        return read_manifest(folder)
    if set(given.values()) == set(named.values()):
        raise ArtifactError(
            f"swapped: {paths['prefill']} is the increment graph according to its {MANIFEST}",
            "give the prefill graph first",
        )
    if set(given.values()) < set(named.values()):
        raise ArtifactError(
            f"{next(iter(paths.values()))}: only one of a pair according to its {MANIFEST}",
            "give both: infer.prefill_model_path= and infer.increment_model_path=",
        )
    return None


def _inspect(paths: Mapping[GraphName, Path], source: ModelSource) -> Manifest:
    """A manifest inferred from the graphs, which must be of the configured model."""
    for path in paths.values():
        if path.suffix == ".ms":
            raise ArtifactError(f"{path}: no {MANIFEST} names it", _MS_HINT)
    model = source.model
    first = next(iter(paths.values()))
    if model is None:
        raise ArtifactError(
            f"{first}: no {MANIFEST} says which model it is",
            "name it: model=bloom_560m, or --config a yaml with its sizes",
        )
    environment.import_mindspore()
    from lite_runner.mindir.inspect import foreign_manifest

    target = environment.resolve_device(source.device_target, planned=source.dry_run)
    return foreign_manifest(
        paths, model, source.name, target=cast(Literal["CPU", "Ascend"], target)
    )
