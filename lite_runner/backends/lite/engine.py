"""The engine that runs an exported model: its protocol, choosing it, its options, starting it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.backends.lite.engines import lite
from lite_runner.backends.lite.engines.lite_release import LITE
from lite_runner.backends.lite.ge import (
    CONTEXT,
    FILE_NAME,
    RANK_TABLE,
    GeConfig,
    compiles_with_ge,
    ge_config,
    preset_of,
)
from lite_runner.config.backend_checks import ENGINES, LITE_2_0, EngineName
from lite_runner.config.config_file import merged
from lite_runner.config.groups import compose_groups
from lite_runner.config.sections import ExportSettings, Infer, Ranks
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.mindir.manifest import GraphName, Layout, Manifest, fits_any, is_pair
from lite_runner.records import dataclass
from lite_runner.system import environment
from lite_runner.system.secret import encryption_key


class GraphEngine(Protocol):
    """Runs the graphs of one artifact; not thread-safe."""

    name: str  # lite, lite-worker or graph-cell; as in result.json

    def bind(self, graph: GraphName, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
        """The input arrays of a graph, of these shapes, to be filled in place.

        They keep their contents, and stay valid until the graph is bound to other shapes, which
        resizes it. Binding to the same shapes returns the same arrays.
        """
        ...

    def run(self, graph: GraphName) -> list[NDArray[Any]]:
        """The outputs for the current contents of the bound arrays; valid until the next run."""
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...


Device = Literal["CPU", "Ascend"]


@dataclass(frozen=True)
class EngineOptions:
    """Start options of an engine."""

    name: EngineName
    device: Device = "CPU"
    device_id: int = 0
    rank_id: int = 0  # of this process, with several ranks
    threads: int | None = None  # None: one per processor available to this process, on CPU
    ge: GeConfig | None = None
    key: bytes | None = None  # decryption key of an encrypted model


def why_unavailable(engine: EngineName, layout: Layout, device: Device) -> EnvironmentFault | None:
    """The error of an engine that cannot run a layout on this machine; None: it can."""
    if fits_any(layout) and device != "CPU":
        return EnvironmentFault(
            "the layout resizable runs on CPU only",
            "export.layout=static_pair runs on Ascend; or context.device_target=CPU",
        )
    return _KINDS[engine].lacking(layout, device)


def choose_engine(layout: Layout, asked: str | None, device: Device) -> EngineName:
    """The requested engine, or for None the first available one that runs the layout.

    Raises ConfigError if the requested one does not support the layout, EnvironmentFault if it, or
    every one that does, is unavailable.
    """
    engines = ENGINES[layout]
    if asked is not None:
        if asked not in engines:
            why = _KINDS[cast(EngineName, asked)].limit
            raise ConfigError(
                f"engine={asked} does not run the layout {layout}" + (f": {why}" if why else ""),
                f"engine={engines[-1]}",
            )
        engines = (asked,)
    errors = [why_unavailable(engine, layout, device) for engine in engines]
    for engine, error in zip(engines, errors, strict=True):
        if error is None:
            return engine
    assert errors[-1] is not None
    raise errors[-1]


def check_reads(engine: EngineName, layout: Layout) -> None:
    """Raise EnvironmentFault if an engine cannot read the MindIR that MindSpore writes."""
    if engine == "lite" and not fits_any(layout):  # resizable is rewritten for the oldest Lite
        from mindspore.train import mind_ir_pb2

        lite.check_reads(max(mind_ir_pb2.Version.values()))


def start_engine(
    graphs: Mapping[GraphName, Path], manifest: Manifest, options: EngineOptions
) -> GraphEngine:
    """Start an engine with the graphs of a manifest. Raises RunnerError if that fails."""
    return _KINDS[options.name].start(graphs, manifest, options)


def _without_lite(layout: Layout, device: Device) -> EnvironmentFault | None:
    if not lite.available():
        return EnvironmentFault(
            "no mindspore_lite in this Python",
            "install the wheel of the device's vendor, or use engine=auto",
        )
    if is_pair(layout) and device != "Ascend":
        return EnvironmentFault(
            "MindSpore Lite supports a KV cache inside a graph on Ascend only",
            "export.layout=resizable runs in it on CPU",
        )
    return None


def _without_worker(_layout: Layout, _device: Device) -> EnvironmentFault | None:
    try:
        LITE.find()
    except EnvironmentFault as error:
        return error
    return None


def _lite(
    graphs: Mapping[GraphName, Path], manifest: Manifest, options: EngineOptions
) -> GraphEngine:
    return lite.LiteEngine(graphs, options, manifest.model_type)


def _worker(
    graphs: Mapping[GraphName, Path], manifest: Manifest, options: EngineOptions
) -> GraphEngine:
    from lite_runner.backends.lite.engines.worker import WorkerEngine

    threads = options.threads
    if manifest.layout == "no_cache" and threads != 1:
        progress.note("threads=1: LayerNorm of MindSpore Lite 2.0 is wrong with several")
        threads = 1
    return WorkerEngine(graphs, threads=threads)


def _graph_cell(
    graphs: Mapping[GraphName, Path], manifest: Manifest, options: EngineOptions
) -> GraphEngine:
    environment.import_mindspore()
    from lite_runner.backends.lite.engines.graph_cell import GraphCellEngine
    from lite_runner.mindir.inspect import check_graphs

    if not manifest.encrypted:
        check_graphs(graphs, manifest)
    producer = manifest.versions.get("mindspore", "")
    return GraphCellEngine(graphs, manifest.graphs, options, producer)


@dataclass(frozen=True)
class _Kind:
    """An engine: its requirements here, its start, and the layouts that it cannot run."""

    lacking: Callable[[Layout, Device], EnvironmentFault | None]
    start: Callable[[Mapping[GraphName, Path], Manifest, EngineOptions], GraphEngine]
    limit: str = ""


_KINDS: dict[EngineName, _Kind] = {
    "lite": _Kind(_without_lite, _lite),
    "lite-worker": _Kind(_without_worker, _worker, LITE_2_0),
    "graph-cell": _Kind(lambda _layout, _device: None, _graph_cell),
}


def device_of(target: str, *, dry_run: bool) -> Device:
    """The device of the run; with `dry_run` it need not be here. Raises EnvironmentFault."""
    return cast(Device, environment.resolve_device(target, planned=dry_run))


def engine_for(
    settings: ExportSettings,
    layout: Layout,
    ge_files: tuple[Path, ...] = (),
    *,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    sharing: int | None = None,
) -> EngineOptions:
    """The engine of a run; `ge_files`: the config.ini beside the model, unless the run has its own.
    `sharing`: the ranks that the graphs are made for; None: those of the run.

    Raises ConfigError, EnvironmentFault where the one that is asked for cannot run the layout.
    """
    context, infer = settings.context, settings.infer
    device = device_of(context.device_target, dry_run=settings.dry_run)
    name = choose_engine(layout, settings.chosen_engine, device)
    ge = None
    if compiles_with_ge(name, device):
        ge = ge_of_run(infer, ge_files)
        note_ge_options(infer, ge)
        if (count := sharing or ranks.tensor) > 1:
            table = _rank_table(settings.parallel.rank_table_file) if ranks.size > 1 else None
            ge = _with_rank_table(ge or GeConfig(), count, table)
    elif not settings.writes_graphs:  # an export only writes them down
        given = ge_config(infer) or (GeConfig(files=ge_files) if ge_files else None)
        if given is not None:
            options = ", ".join(map(str, given.files)) or "ge="
            progress.note(f"{options}: for GE on Ascend; this runs in {name} on {device}")
    return EngineOptions(
        name=name,
        device=device,
        device_id=context.device_id,
        rank_id=ranks.rank or infer.rank_id,
        threads=context.threads,
        ge=ge,
        key=encryption_key(infer.enc_key),
    )


def _rank_table(given: str | None) -> str:
    """The rank table of a job: the `given` one, or that of RANK_TABLE_FILE; "": none."""
    return os.environ.get("RANK_TABLE_FILE", "") if given is None else given


def _with_rank_table(ge: GeConfig, count: int, table: str | None) -> GeConfig:
    """`ge` with the rank table through which the `count` ranks of a model communicate: its own, or
    the job's `table`, None for a process started by hand. Raises ConfigError where there is none.
    """
    if ge.names_rank_table:
        return ge
    if table:
        return replace(ge, rank_table=str(Path(table).expanduser().absolute()))
    key, ini = "parallel", ""
    if table is None:
        key = f"infer.ge_options.{CONTEXT}"
        ini = f", or a line {RANK_TABLE}=FILE in [{CONTEXT}] of infer.ge_config_path"
    raise ConfigError(
        f"{key}.{RANK_TABLE}: {count} ranks share the model, and in MindSpore Lite on Ascend they"
        " communicate only through a rank table",
        f"{key}.{RANK_TABLE}=FILE{ini}; scripts/hccl_tools.py writes one",
    )


def ge_of_run(infer: Infer, beside: tuple[Path, ...] = ()) -> GeConfig | None:
    """The options for this machine's Ascend processor; `beside`: config.ini files of the model's
    folder. None with ge=none, and for a processor without a preset.

    Raises EnvironmentFault if the processor cannot be identified.
    """
    given = ge_config(infer)
    if infer.ge_config_path or infer.ge_preset is None:
        return given
    if infer.ge_options is None and beside:
        return GeConfig(files=beside)
    preset = preset_of(environment.ascend_soc())
    if preset is None:
        return given
    options = compose_groups({"ge": preset})["infer"]["ge_options"]
    return ge_config(replace(infer, ge_options=merged(options, infer.ge_options or {})))


def note_ge_options(infer: Infer, ge: GeConfig | None) -> None:
    """Note the source of the GE options, and which ones are left to Lite's defaults."""
    if ge is not None and infer.ge_preset == "auto" and not infer.ge_config_path:
        soc = environment.ascend_soc()
        files = ", ".join(map(str, ge.files))
        progress.note(f"GE options: {files or f'ge={preset_of(soc)}, for {soc}'}")
    for text in (ge or GeConfig()).unset():
        progress.note(f"GE options: {text}")


def ge_to_write(infer: Infer, target: str) -> GeConfig | None:
    """The options to write with exported graphs: this machine's if the target is Ascend."""
    if target != "Ascend" or not environment.ascend_devices():
        if target == "Ascend" and infer.ge_preset == "auto":
            progress.note(
                f"no {FILE_NAME} is written: a run takes the GE options of its own processor;"
                " ge=atlas_800 or ge=atlas_800t_a2 writes them down for MindFormers' tools"
            )
        return ge_config(infer)
    return ge_of_run(infer)
