"""Writing the graphs of an export, each layout by its own writer, under the names asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lite_runner.config.ranks import Ranks
from lite_runner.export.exchange import gather
from lite_runner.export.job import ExportJob
from lite_runner.export.native_graph import write_native_graph, write_packed_layers
from lite_runner.mindir.manifest import Graph, GraphName, Manifest
from lite_runner.weights.read_ahead import ReadAhead


def write_graphs(
    folder: Path, job: ExportJob, stems: Mapping[GraphName, str] | None
) -> tuple[dict[GraphName, Graph], ExportJob]:
    """Write the graphs; also gives the job with the operators as they were written. Of several
    ranks each writes its own graphs, and gets the names of all."""
    if job.spec.layout == "packed":
        return write_packed_layers(folder, job)
    if (operators := job.spec.operators) is not None:
        graphs, operators = write_native_graph(folder, job, operators)
        return graphs, replace(job, spec=replace(job.spec, operators=operators))
    return _float_graphs(folder, job, stems), job


def name_ascend(folder: Path, manifest: Manifest) -> None:
    """Verified with the collectives of this machine, the graphs call Ascend's from now on."""
    from lite_runner.mindir.writer import ASCEND_GROUP, name_group

    for graph in manifest.graphs.values():
        for file in graph.files:
            name_group(folder / file, ASCEND_GROUP)


def _float_graphs(
    folder: Path, job: ExportJob, stems: Mapping[GraphName, str] | None
) -> dict[GraphName, Graph]:
    """Graphs that compute with floats, converted where a .ms is asked for."""
    spec = job.spec
    weights = ReadAhead(job.files.resharded(job.ranks, vocab_parallel=spec.vocab_parallel))
    try:
        if spec.layout == "dynamic":
            graphs = _dynamic(folder, job, weights)
        elif spec.layout == "static_pair":
            graphs, stems = _static_pair(folder, job, weights, stems)
        else:
            graphs = _resizable(folder, job, weights)
    finally:
        weights.close()
    if spec.model_type == "mindir_lite":
        return _converted(folder, graphs, spec.weight_fp16)
    if stems is not None:
        graphs = _renamed(folder, graphs, stems)
    return _of_all_ranks(graphs, job.ranks)


def _dynamic(folder: Path, job: ExportJob, weights: ReadAhead) -> dict[GraphName, Graph]:
    from lite_runner.mindir.write_dynamic import export_dynamic

    return export_dynamic(
        job.files.model,
        weights,
        folder,
        job.config.model_name,
        slots=job.spec.slots,
        seq_length=job.spec.length,
        dtype=job.spec.dtype,
        enc_key=job.spec.key,
    )


def _resizable(folder: Path, job: ExportJob, weights: ReadAhead) -> dict[GraphName, Graph]:
    from lite_runner.mindir.write_resizable import export_resizable

    model = job.files.model
    return export_resizable(
        model, weights, folder, job.config.model_name, batch_size=1, seq_length=model.seq_length
    )


def _static_pair(
    folder: Path, job: ExportJob, weights: ReadAhead, stems: Mapping[GraphName, str] | None
) -> tuple[dict[GraphName, Graph], Mapping[GraphName, str] | None]:
    """The pair, and the `stems` with those of this rank where there are several."""
    from lite_runner.backends.collectives import tensor_parallel
    from lite_runner.mindir.write_static_pair import (
        RANK_STEMS,
        export_static_pair,
        stem_of_rank,
        stems_of,
    )

    spec, ranks = job.spec, job.ranks
    if ranks.size > 1:
        stems = {
            name: stem_of_rank(stem, ranks.rank) for name, stem in (stems or RANK_STEMS).items()
        }
    graphs = export_static_pair(
        job.files.model,
        weights,
        folder,
        stems_of(job.config.model_name) if stems is None else stems,
        batch_size=spec.slots,
        seq_length=spec.length,
        dtype=spec.dtype,
        enc_key=spec.key,
        sampled=spec.sampled,
        parallel=tensor_parallel(ranks, vocab_parallel=spec.vocab_parallel),
    )
    return graphs, stems


def _renamed(
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
        named[name] = replace(graph, file=file)
    return named


def _of_all_ranks(graphs: dict[GraphName, Graph], ranks: Ranks) -> dict[GraphName, Graph]:
    """The graphs of the first rank, with the files of all."""
    names = json.dumps({name: graph.file for name, graph in graphs.items()})
    files = [json.loads(one) for one in gather(ranks, names)]
    return {
        name: replace(graph, file=files[0][name], others=tuple(one[name] for one in files[1:]))
        for name, graph in graphs.items()
    }


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
