"""The engine that runs an exported model: its protocol, choosing it, starting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.backends.lite.engines import lite
from lite_runner.backends.lite.engines.lite_release import find_lite_python
from lite_runner.backends.lite.ge import GeConfig
from lite_runner.config.offline_checks import ENGINES, LITE_2_0, EngineName
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.mindir.manifest import GraphName, Layout, Manifest, fits_any, is_pair
from lite_runner.records import dataclass
from lite_runner.system import environment


class Engine(Protocol):
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
    threads: int | None = None  # None: the engine's default
    ge: GeConfig | None = None
    key: bytes | None = None  # decryption key of an encrypted model


def why_unavailable(engine: EngineName, layout: Layout, device: Device) -> EnvironmentFault | None:
    """The error of an engine that cannot run a layout on this machine; None: it can."""
    if fits_any(layout) and device != "CPU":
        return EnvironmentFault(
            "the layout resizable runs on CPU only",
            "export.layout=static_pair runs on Ascend; or context.device_target=CPU",
        )
    if engine == "lite":
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
    if engine == "lite-worker":
        try:
            find_lite_python()
        except EnvironmentFault as fault:
            return fault
    return None


def choose_engine(layout: Layout, asked: str, device: Device) -> EngineName:
    """The requested engine, or for "auto" the first available one that runs the layout.

    Raises ConfigError if the requested one does not support the layout, EnvironmentFault if it, or
    every one that does, is unavailable.
    """
    engines = ENGINES[layout]
    if asked != "auto":
        if asked not in engines:
            why = LITE_2_0 if asked == "lite-worker" and layout in ("static_pair", "full") else ""
            raise ConfigError(
                f"engine={asked} does not run the layout {layout}" + (f": {why}" if why else ""),
                f"engine={engines[-1]}",
            )
        engines = tuple(engine for engine in engines if engine == asked)
    faults = [why_unavailable(engine, layout, device) for engine in engines]
    for engine, fault in zip(engines, faults, strict=True):
        if fault is None:
            return engine
    assert faults[-1] is not None
    raise faults[-1]


def check_reads(engine: EngineName, layout: Layout) -> None:
    """Raise EnvironmentFault if an engine cannot read the MindIR that MindSpore writes."""
    if engine == "lite" and not fits_any(layout):  # resizable is rewritten for the oldest Lite
        from mindspore.train import mind_ir_pb2

        lite.check_reads(max(mind_ir_pb2.Version.values()))


def start_engine(
    graphs: Mapping[GraphName, Path], manifest: Manifest, options: EngineOptions
) -> Engine:
    """Start an engine with the graphs of a manifest. Raises RunnerError if that fails."""
    if options.name == "lite":
        return lite.LiteEngine(
            graphs,
            model_type=manifest.model_type,
            target=options.device,
            device_id=options.device_id,
            rank_id=options.rank_id,
            threads=options.threads,
            ge=options.ge,
            dec_key=options.key,
        )
    if options.name == "lite-worker":
        from lite_runner.backends.lite.engines.worker import WorkerEngine

        threads = options.threads
        if manifest.layout == "no_cache" and threads != 1:
            progress.note("threads=1: LayerNorm of MindSpore Lite 2.0 is wrong with several")
            threads = 1
        return WorkerEngine(graphs, threads=threads)
    environment.import_mindspore()
    from lite_runner.backends.lite.engines.graph_cell import GraphCellEngine
    from lite_runner.mindir.inspect import check_graphs

    if not manifest.encrypted:
        check_graphs(graphs, manifest)
    return GraphCellEngine(
        graphs,
        manifest.graphs,
        device=options.device,
        device_id=options.device_id,
        threads=options.threads,
        dec_key=options.key,
        producer=manifest.versions.get("mindspore", ""),
    )
