"""The layout of an exported model's graphs: the one asked for, or the one that serves best here."""

from __future__ import annotations

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.engines.start import Device, why_unavailable
from lite_runner.config.cluster import ranks_of
from lite_runner.config.engines import ENGINES
from lite_runner.config.options import ExportedOptions
from lite_runner.config.schema import DType
from lite_runner.errors import EnvironmentFault
from lite_runner.mindir import resizable_inputs
from lite_runner.mindir.manifest import Layout
from lite_runner.native import packed_model


def choose_layout(config: ExportedOptions, model: Decoder, target: Device) -> Layout:
    """The layout that export.layout names; of "auto", by target, engine and what is installed."""
    if config.export.layout != "auto":
        return config.export.layout
    if config.engine == "native":
        return "packed"
    if (
        target == "Ascend"
        or config.model.model_config.is_sample_acceleration
        or config.infer.prefill_model_path
        or ranks_of(config).tensor > 1
    ):
        return "static_pair"
    if config.engine == "graph-cell" or config.infer.enc_key:
        return "dynamic"
    named = config.engine != "auto" or config.infer.model_type == "mindir_lite"
    if resizable_inputs.unsupported(model) and not named:
        return "dynamic"
    faults = [why_unavailable(engine, "resizable", target) for engine in ENGINES["resizable"]]
    if named or None in faults:
        return "resizable"
    assert isinstance(faults[-1], EnvironmentFault)
    progress.note(f"engine=auto: graph-cell, since {faults[-1].message}")
    return "dynamic"


def layout_faults(layout: Layout, model: Decoder, dtype: DType, *, encrypted: bool) -> list[str]:
    """Why graphs of this layout cannot be had of the model, computed in `dtype`."""
    if layout == "packed":
        return [f"export.layout=packed: {why}" for why in packed_model.unsupported(model)]
    if layout != "resizable":
        return []
    faults = []
    if dtype != "float32":
        faults.append(f"export.layout=resizable computes in float32; got {dtype}")
    faults += [
        f"export.layout=resizable: {why}; take export.layout=dynamic or static_pair"
        for why in resizable_inputs.unsupported(model)
    ]
    if encrypted:
        faults.append("infer.enc_key needs export.layout=dynamic or static_pair")
    return faults
