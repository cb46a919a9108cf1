"""Chooses and starts the engine that runs an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from lite_runner import native, progress
from lite_runner.backends.engines import lite
from lite_runner.backends.engines.base import Engine
from lite_runner.backends.engines.lite_python import find_lite_python
from lite_runner.config.engines import ENGINES, EngineName
from lite_runner.config.ge import GeConfig
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.mindir.manifest import GraphName, Layout, Manifest
from lite_runner.records import dataclass
from lite_runner.system import environment

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
    """Why an engine that supports a layout cannot run it on this machine; None: it can."""
    if layout == "resizable" and device != "CPU":
        return EnvironmentFault(
            "the layout resizable runs on CPU only",
            "export.layout=static_pair runs on Ascend; or context.device_target=CPU",
        )
    if engine == "native":
        if device != "CPU":
            return EnvironmentFault(
                "packed layers are for this project's own operators, which run on CPU only",
                "context.device_target=CPU",
            )
        if fault := native.unusable():
            return EnvironmentFault(f"this project's own operators {fault.why}", fault.remedy)
    if engine == "lite":
        if not lite.available():
            return EnvironmentFault(
                "no mindspore_lite in this Python",
                "install the wheel of the device's vendor, or use engine=auto",
            )
        if layout == "static_pair" and device != "Ascend":
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


def choose_engine(
    layout: Layout, asked: EngineName | Literal["auto"], device: Device
) -> EngineName:
    """The requested engine, or the first available one that runs the layout.

    Raises ConfigError if the requested one does not support the layout, EnvironmentFault if it, or
    every one that does, is unavailable.
    """
    engines = ENGINES[layout]
    if asked != "auto":
        if asked not in engines:
            raise ConfigError(
                f"engine={asked} does not run the layout {layout}", f"engine={engines[-1]}"
            )
        engines = (asked,)
    faults = [why_unavailable(engine, layout, device) for engine in engines]
    for engine, fault in zip(engines, faults, strict=True):
        if fault is None:
            return engine
    assert faults[-1] is not None
    raise faults[-1]


def check_reads(engine: EngineName, layout: Layout) -> None:
    """Raise EnvironmentFault if an engine cannot read the MindIR that MindSpore writes."""
    if engine == "lite" and layout != "resizable":  # resizable is rewritten for the oldest Lite
        from mindspore.train import mind_ir_pb2

        lite.check_reads(max(mind_ir_pb2.Version.values()))


def check_operators(what: str, device: Device) -> None:
    """Raise EnvironmentFault unless `what` can use the native kernels on this device."""
    if device != "CPU":
        raise EnvironmentFault(
            f"{what} needs this project's own operators, which run on CPU only; got {device}",
            "context.device_target=CPU, or export it without quant=",
        )
    native.check_usable(what)


def start_engine(
    graphs: Mapping[GraphName, Path], manifest: Manifest, options: EngineOptions
) -> Engine:
    """Start an engine with the graphs of a manifest. Raises RunnerError if that fails."""
    assert manifest.model_type != "PACKED"
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
        from lite_runner.backends.engines.worker import WorkerEngine

        threads = options.threads
        if manifest.layout == "no_cache" and threads != 1:
            progress.note("threads=1: LayerNorm of MindSpore Lite 2.0 is wrong with several")
            threads = 1
        return WorkerEngine(graphs, threads=threads)
    environment.import_mindspore()
    from lite_runner.backends.engines.graph_cell import GraphCellEngine
    from lite_runner.mindir.inspect import check_graphs

    if not manifest.encrypted and manifest.operators is None:
        check_graphs(graphs, manifest)
    return GraphCellEngine(
        graphs,
        manifest.graphs,
        device=options.device,
        device_id=options.device_id,
        threads=options.threads,
        dec_key=options.key,
        packed=manifest if manifest.operators else None,
        producer=manifest.versions.get("mindspore", ""),
    )
