"""Exporting a model: graphs, tokenizer and manifest in a folder, which is then an artifact.

An artifact is a folder with a manifest. It gets its name only when its target engine has computed
what the online backend computes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lite_runner import progress
from lite_runner.architectures import custom_network
from lite_runner.backends.exported import Device, EngineOptions, check_reads
from lite_runner.backends.ge_options import ge_to_write
from lite_runner.config.ge import FILE_NAME, render
from lite_runner.config.model_dir import yamls_in
from lite_runner.config.model_yaml import is_ours, model_yaml
from lite_runner.config.options import ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import DType
from lite_runner.errors import ConfigError
from lite_runner.export.verify import verify
from lite_runner.mindir.manifest import (
    MANIFEST,
    Graph,
    GraphName,
    Layout,
    Manifest,
    Operators,
    read_manifest,
)
from lite_runner.model.model_files import ModelFiles
from lite_runner.sizing.need import BYTES_OF, Memory, check_memory, export_need, memory_need
from lite_runner.system import environment
from lite_runner.system.versions import versions
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.files import (
    make_folder,
    put_in_place,
    require_space,
    sha256_of,
    sync_folder,
)
from lite_runner.weights.lora.adapter import digest
from lite_runner.weights.quantization import rounding
from lite_runner.weights.quantization.quantize import describe
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead


@dataclass(frozen=True)
class ExportSpec:
    """What an artifact has to be."""

    layout: Layout
    model_type: Literal["mindir", "mindir_lite"]
    weight_fp16: bool
    dtype: DType  # of the graph; weight_fp16 is only how a .ms keeps its weights
    target: Device
    sampled: bool  # it ends in the likeliest token
    slots: int
    length: int  # positions of a slot
    operators: Operators | None = None  # of quantized weights
    rounded: DType = "float32"  # matrices are rounded to it, to be computed with in `dtype`
    key: bytes | None = field(default=None, repr=False)
    ranks: int = 1  # that share the model, each with graphs of its own
    vocab_parallel: bool = True  # of several ranks: the embedding and the head too

    @property
    def precision(self) -> DType:
        return "float16" if self.weight_fp16 else self.dtype


@dataclass(frozen=True)
class Place:
    """Where an artifact goes: a folder of its own, or two paths in one that may hold more."""

    folder: Path
    stems: Mapping[GraphName, str] | None = None  # paths of the pair in it, without .mindir
    overwrite: bool = False

    @classmethod
    def of_pair(cls, prefill: Path, increment: Path, overwrite: bool) -> Place:
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

    def has_own_yaml(self) -> bool:
        """Whether graphs go beside a yaml of the user's; of two nobody would know which holds."""
        if self.stems is None or not self.folder.is_dir():
            return False
        return any(not is_ours(path) for path in yamls_in(self.folder))

    def take(self, written: Path) -> None:
        """Give the finished artifact `written`, on the same disk, its name."""
        if self.stems is None:
            # Where another process was first, its artifact has been proved like this one.
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


def export_artifact(
    place: Place,
    config: ExportedOptions,
    files: ModelFiles,
    tokenizer: Tokenizer,
    want: ExportSpec,
    engine: EngineOptions,
    ranks: Ranks | None = None,
) -> Manifest:
    """Write the artifact, prove it in `engine`, and only then give it its name.

    Of several `ranks`, which have met and each call this, each writes and proves its graphs, and
    the first does the rest.

    Raises ConfigError where something stands there already, ArtifactError where the engine
    computes something else, EnvironmentFault where memory or disk do not suffice, or the engine
    reads no MindIR of this MindSpore.
    """
    ranks = ranks or Ranks()
    if want.rounded != "float32":
        progress.note(rounding.describe(want.rounded, quantized=want.operators is not None))
    files = dataclasses.replace(files, rounded=want.rounded)
    parent = place.folder.parent
    if ranks.rank == 0:
        place.check()
        make_folder(parent)
        _check_room(parent, files, want)
    environment.import_mindspore()
    check_reads(engine.name, want.layout)
    with _temporary(place, ranks) as folder:
        with progress.step(f"export {config.model_name} ({want.layout})"):
            if want.operators is not None:
                graphs, operators = _write_fused(folder, config, files, want, want.operators)
                want = dataclasses.replace(want, operators=operators)
            else:
                graphs = _write_graphs(folder, config, files, want, place.stems, ranks)
        if ranks.rank == 0:
            for file, text in tokenizer.files().items():
                (folder / file).write_text(text, encoding="utf-8")
            _manifest_of(folder, config, files, tokenizer, want, graphs).write(folder)
        _told(ranks, "written")
        manifest = read_manifest(folder, check_files=False)
        verify(folder, manifest, files, engine, ranks, vocab_parallel=want.vocab_parallel)
        _told(ranks, "proved")
        if ranks.rank == 0:
            if ranks.size > 1 and want.target == "Ascend" and engine.device != "Ascend":
                _name_ascend(folder, manifest)
                _manifest_of(folder, config, files, tokenizer, want, graphs).write(folder)
            _write_settings(folder, config, manifest, place)
            place.take(folder)
        _told(ranks, "done")
    return manifest


@contextmanager
def _temporary(place: Place, ranks: Ranks) -> Iterator[Path]:
    """The same empty folder for all ranks, beside the place, with its name."""
    parent = place.folder.parent
    if ranks.rank > 0:
        yield Path(said_by_first(ranks, ""))
        return
    with tempfile.TemporaryDirectory(prefix=f".{place.folder.name}.", dir=parent) as name:
        folder = Path(name).absolute() / place.folder.name
        folder.mkdir()
        _told(ranks, str(folder))
        yield folder


def _manifest_of(
    folder: Path,
    config: ExportedOptions,
    files: ModelFiles,
    tokenizer: Tokenizer,
    want: ExportSpec,
    graphs: Mapping[GraphName, Graph],
) -> Manifest:
    """What stands in the folder, with all its files."""
    there = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in there if name != MANIFEST)
    return Manifest(
        layout=want.layout,
        model_name=config.model_name,
        model=files.model,
        source=files.source,
        target=want.target,
        model_type="MINDIR_LITE" if want.model_type == "mindir_lite" else "MINDIR",
        precision=want.precision,
        batch_size=want.slots,
        seq_length=files.model.seq_length if want.layout == "resizable" else want.length,
        graphs=graphs,
        files={file: sha256_of(folder / file) for file in names},
        tokenizer=tuple(tokenizer.files()),
        versions=versions(),
        encrypted=want.key is not None,
        sampled=want.sampled,
        adapter=files.adapter.name if files.adapter else "",
        adapter_sha256=digest(files.adapter) if files.adapter else "",
        operators=want.operators,
    )


def _told(ranks: Ranks, text: str) -> list[str]:
    """What each rank says, on every rank; returns when all are here."""
    if ranks.size == 1:
        return [text]
    from lite_runner.backends import collectives

    return [said.decode() for said in collectives.gather(text.encode())]


def said_by_first(ranks: Ranks, text: str) -> str:
    """What the first rank says; returns when all are here."""
    return _told(ranks, text)[0]


def _write_settings(
    folder: Path, config: ExportedOptions, manifest: Manifest, place: Place
) -> None:
    """The yaml and config.ini that MindFormers' tools want beside graphs; the user may change
    them, so the manifest does not count them among its files. A yaml of the user's is the one."""
    # Of a registered family the yaml has no words.
    if custom_network(manifest.model) is None and not place.has_own_yaml():
        text = model_yaml(manifest.model, config, manifest.seq_length, manifest.model_type.lower())
        (folder / f"{config.model_name}.yaml").write_text(text, encoding="utf-8")
    ge = ge_to_write(config, manifest.target)
    if ge is not None and ge.sections:
        (folder / FILE_NAME).write_text(render(ge.sections), encoding="utf-8")


def weights_and_cache(files: ModelFiles, want: ExportSpec) -> Memory:
    """What the network of an export has of them; a cache is in the graph where it is not fed."""
    return memory_need(
        files.model, "float32", want.slots, want.length, quantization=files.quantization
    )


def _check_room(folder: Path, files: ModelFiles, want: ExportSpec) -> None:
    """Memory for the network and the graph that is made of it, disk for every graph."""
    need = weights_and_cache(files, want)
    check_memory(export_need(need))
    graphs = 2 if want.layout == "static_pair" or want.model_type == "mindir_lite" else 1
    require_space(folder, graphs * need.weights * BYTES_OF[want.dtype] // BYTES_OF["float32"])


def _write_graphs(
    folder: Path,
    config: ExportedOptions,
    files: ModelFiles,
    want: ExportSpec,
    stems: Mapping[GraphName, str] | None,
    ranks: Ranks,
) -> dict[GraphName, Graph]:
    weights = ReadAhead(files.cut(ranks, vocab_parallel=want.vocab_parallel))
    graphs: dict[GraphName, Graph]
    try:
        if want.layout == "dynamic":
            from lite_runner.mindir.write_dynamic import export_dynamic

            graphs = export_dynamic(
                files.model,
                weights,
                folder,
                config.model_name,
                slots=want.slots,
                seq_length=want.length,
                dtype=want.dtype,
                enc_key=want.key,
            )
        elif want.layout == "static_pair":
            from lite_runner.backends.collectives import tensor_parallel
            from lite_runner.mindir.write_static_pair import (
                RANK_STEMS,
                export_static_pair,
                stem_of_rank,
                stems_of,
            )

            if ranks.size > 1:
                stems = {
                    name: stem_of_rank(stem, ranks.rank)
                    for name, stem in (stems or RANK_STEMS).items()
                }
            graphs = export_static_pair(
                files.model,
                weights,
                folder,
                stems_of(config.model_name) if stems is None else stems,
                batch_size=want.slots,
                seq_length=want.length,
                dtype=want.dtype,
                enc_key=want.key,
                sampled=want.sampled,
                parallel=tensor_parallel(ranks, vocab_parallel=want.vocab_parallel),
            )
        else:
            from lite_runner.mindir.write_resizable import export_resizable

            graphs = export_resizable(
                files.model,
                weights,
                folder,
                config.model_name,
                batch_size=1,
                seq_length=files.model.seq_length,
            )
    finally:
        weights.close()
    if want.model_type == "mindir_lite":
        return _converted(folder, graphs, want.weight_fp16)
    if stems is not None:
        graphs = _under_their_names(folder, graphs, stems)
    return _of_all(graphs, ranks)


def _name_ascend(folder: Path, manifest: Manifest) -> None:
    """Proved with the collectives of this machine, the graphs call those of Ascend from now on."""
    from lite_runner.mindir.writer import ASCEND_GROUP, name_group

    for graph in manifest.graphs.values():
        for file in graph.files:
            name_group(folder / file, ASCEND_GROUP)


def _of_all(graphs: dict[GraphName, Graph], ranks: Ranks) -> dict[GraphName, Graph]:
    """The graphs of the first rank, with the files of all."""
    names = json.dumps({name: graph.file for name, graph in graphs.items()})
    files = [json.loads(said) for said in _told(ranks, names)]
    return {
        name: dataclasses.replace(
            graph, file=files[0][name], others=tuple(one[name] for one in files[1:])
        )
        for name, graph in graphs.items()
    }


def _write_fused(
    folder: Path,
    config: ExportedOptions,
    files: ModelFiles,
    want: ExportSpec,
    operators: Operators,
) -> tuple[dict[GraphName, Graph], Operators]:
    from lite_runner.backends.batch_metadata import BatchMetadata
    from lite_runner.mindir.write_native import export_native

    words = BatchMetadata(files.model, want.length, operators.capacity)
    tensors = files.tensors()
    progress.note(describe(tensors, files.quantization))
    weights = QuantizedWeights(tensors, files.model)
    try:
        return export_native(
            files.model,
            weights,
            folder,
            config.model_name,
            slots=want.slots,
            seq_length=want.length,
            operators=operators,
            inputs=words.specs(want.slots),
        )
    finally:
        weights.close()


def _under_their_names(
    folder: Path, graphs: dict[GraphName, Graph], stems: Mapping[GraphName, str]
) -> dict[GraphName, Graph]:
    """x_graph.mindir as x.mindir, as it was asked for; beside variables the longer name stays,
    by which MindFormers' tools know them."""
    named: dict[GraphName, Graph] = {}
    for name, graph in graphs.items():
        file = graph.file
        if not (folder / f"{stems[name]}_variables").exists():
            file = f"{stems[name]}.mindir"
            (folder / graph.file).rename(folder / file)
        named[name] = dataclasses.replace(graph, file=file)
    return named


def _converted(
    folder: Path, graphs: dict[GraphName, Graph], weight_fp16: bool
) -> dict[GraphName, Graph]:
    """The same graphs as .ms, in place of the MindIR files."""
    from lite_runner.backends.engines.converter import convert_to_ms

    converted: dict[GraphName, Graph] = {}
    for name, graph in graphs.items():
        source = folder / graph.file
        target = source.with_suffix(".ms")
        convert_to_ms(source, target, weight_fp16=weight_fp16)
        converted[name] = Graph(target.name, graph.inputs, graph.outputs)
    for path in list(folder.iterdir()):
        if path.suffix not in (".ms", ".msw"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return converted
