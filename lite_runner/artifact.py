"""Exporting a model: graphs, tokenizer and manifest in a folder, which is then an artifact.

An artifact is a folder with a manifest. It gets its name only when its target engine has computed
what the online backend computes.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lite_runner import environment, progress
from lite_runner.backends.exported import Device, EngineOptions
from lite_runner.config.ge import FILE_NAME, ge_config, render
from lite_runner.config.model import REGISTERED
from lite_runner.config.model_yaml import model_yaml
from lite_runner.config.plan import BYTES_OF, Memory, check_memory, free_memory, memory_need
from lite_runner.config.schema import DType, RunConfig
from lite_runner.errors import ConfigError
from lite_runner.export.manifest import (
    MANIFEST,
    Graph,
    GraphName,
    Layout,
    Manifest,
    Operators,
    read_manifest,
)
from lite_runner.model_files import ModelFiles
from lite_runner.report import versions
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.verification import verify
from lite_runner.weights.adapter import digest
from lite_runner.weights.files import (
    make_folder,
    put_in_place,
    require_space,
    sha256_of,
    sync_folder,
)
from lite_runner.weights.quantization import describe
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead


@dataclass(frozen=True)
class Wanted:
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
    key: bytes | None = field(default=None, repr=False)

    @property
    def precision(self) -> DType:
        return "float16" if self.weight_fp16 else self.dtype


@dataclass(frozen=True)
class Place:
    """Where an artifact goes: a folder of its own, or two paths in one that may hold more."""

    folder: Path
    stems: Mapping[GraphName, str] | None = None  # names of the pair, without .mindir
    overwrite: bool = False

    @classmethod
    def of_pair(cls, prefill: Path, increment: Path, overwrite: bool) -> Place:
        """The folder that both paths are in; .mindir may be left out, as in MindFormers' yaml."""
        stems: dict[GraphName, str] = {  # another dot is the name's own, as in bloom_7.1b
            "prefill": prefill.name.removesuffix(".mindir"),
            "increment": increment.name.removesuffix(".mindir"),
        }
        return cls(prefill.parent, stems, overwrite)

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

    def take(self, written: Path) -> None:
        """Give the finished artifact `written`, on the same disk, its name."""
        if self.stems is None:
            # Where another process was first, its artifact has been proved like this one.
            if self.overwrite or not self.folder.exists():
                put_in_place(written, self.folder)
        else:
            self.folder.mkdir(exist_ok=True)
            (self.folder / MANIFEST).unlink(missing_ok=True)  # it comes last: none is half there
            for path in sorted(written.iterdir(), key=lambda path: path.name == MANIFEST):
                target = self.folder / path.name
                if target.is_dir():
                    shutil.rmtree(target)
                path.replace(target)
            sync_folder(self.folder)
        sync_folder(self.folder.parent)


def export_artifact(
    place: Place,
    config: RunConfig,
    files: ModelFiles,
    tokenizer: Tokenizer,
    want: Wanted,
    engine: EngineOptions,
) -> Manifest:
    """Write the artifact, prove it in `engine`, and only then give it its name.

    Raises ConfigError where something stands there already, ArtifactError where the engine
    computes something else, EnvironmentFault where memory or disk do not suffice.
    """
    place.check()
    parent = place.folder.parent
    make_folder(parent)
    _check_room(parent, files, want)
    environment.import_mindspore()
    with tempfile.TemporaryDirectory(prefix=f".{place.folder.name}.", dir=parent) as name:
        folder = Path(name) / place.folder.name
        folder.mkdir()
        with progress.step(f"export {config.model_name} ({want.layout})"):
            graphs = _write_graphs(folder, config, files, want, place.stems)
            for file, text in tokenizer.files().items():
                (folder / file).write_text(text, encoding="utf-8")
        names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        manifest = Manifest(
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
        manifest.write(folder)
        verify(folder, read_manifest(folder, check_files=False), files, engine)
        _write_settings(folder, config, manifest)
        place.take(folder)
    return manifest


def _write_settings(folder: Path, config: RunConfig, manifest: Manifest) -> None:
    """The yaml and config.ini that MindFormers' tools want beside graphs; the user may change
    them, so the manifest does not count them among its files."""
    if manifest.model.family not in REGISTERED:  # which the yaml has no words for
        text = model_yaml(manifest.model, config, manifest.seq_length, manifest.model_type.lower())
        (folder / f"{config.model_name}.yaml").write_text(text, encoding="utf-8")
    ge = ge_config(config)
    if ge is not None and ge.sections:
        (folder / FILE_NAME).write_text(render(ge.sections), encoding="utf-8")


def _check_room(folder: Path, files: ModelFiles, want: Wanted) -> None:
    """Memory for the network and the graph that is made of it, disk for every graph."""
    need = memory_need(
        files.model, "float32", want.slots, want.length, quantization=files.quantization
    )
    check_memory(Memory(2 * need.weights, need.cache), free_memory())
    graphs = 2 if want.layout == "static_pair" or want.model_type == "mindir_lite" else 1
    require_space(folder, graphs * need.weights * BYTES_OF[want.dtype] // BYTES_OF["float32"])


def _write_graphs(
    folder: Path,
    config: RunConfig,
    files: ModelFiles,
    want: Wanted,
    stems: Mapping[GraphName, str] | None,
) -> dict[GraphName, Graph]:
    if want.operators is not None:
        return _write_fused(folder, config, files, want, want.operators)
    weights = ReadAhead(files.tensors())
    graphs: dict[GraphName, Graph]
    try:
        if want.layout == "dynamic":
            from lite_runner.export.dynamic import export_dynamic

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
            from lite_runner.export.static_pair import export_static_pair, stems_of

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
            )
        else:
            from lite_runner.export.resizable import export_resizable

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
    return graphs if stems is None else _under_their_names(folder, graphs, stems)


def _write_fused(
    folder: Path, config: RunConfig, files: ModelFiles, want: Wanted, operators: Operators
) -> dict[GraphName, Graph]:
    from lite_runner.backends.step_words import StepWords
    from lite_runner.export.fused import export_fused

    words = StepWords(files.model, want.length, operators.capacity)
    tensors = files.tensors()
    progress.note(describe(tensors, files.quantization))
    weights = QuantizedWeights(tensors, files.model)
    try:
        return export_fused(
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
