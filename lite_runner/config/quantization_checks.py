"""Validation errors of quantized weights."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.config.choices import RANDOM
from lite_runner.config.fields import Fault, fault
from lite_runner.config.options import ExportedOptions
from lite_runner.config.schema import RunConfig


def quantization_faults(config: RunConfig) -> Iterator[Fault]:
    """quant and quant_group with each other, and with the rest of the config."""
    if config.quant_group is not None and config.quant != "a16w4":
        yield fault(
            ("quant_group", "quant"),
            f"quant_group={config.quant_group} needs quant=a16w4: 8 bits have no groups to choose",
        )
    if config.quant == "a8" and config.checkpoint_source == RANDOM:
        yield fault(
            ("quant", "load_checkpoint"),
            "quant=a8 needs a quantized GGUF file, and random weights are floats; quant=a8w8 makes"
            " integers of them",
        )
    if config.quantization.quant != "none":
        yield from unavailable(config, f"quant={config.quant}", "quant")


def written_as_floats(config: RunConfig) -> Iterator[Fault]:
    """For run modes that write the weights as floats."""
    if config.quantization.quant != "none":
        yield fault(
            ("quant", "run_mode"),
            f"quant={config.quant} has no effect with run_mode={config.run_mode}, which writes"
            " floats; run_mode=quantize writes integers",
        )


def unavailable(config: RunConfig, what: str, key: str) -> Iterator[Fault]:
    """What is not available with quantized weights; `what` names the setting they come from."""
    asked = {f"run_mode={config.run_mode}": not config.takes_quantized}
    if isinstance(config, ExportedOptions):
        asked |= _of_exported(config)
    for setting, given in asked.items():
        if given:
            other = setting.partition("=")[0]
            yield fault((key, other), f"{what} is not available with {setting}")


def _of_exported(config: ExportedOptions) -> dict[str, bool]:
    """Settings of exported models by name, and whether the run has each."""
    offline = config.writes_graphs or config.backend == "mslite"
    layout, target = config.export.layout, config.export.target
    return {
        "model.model_config.use_past=false": not config.writes_graphs and not config.use_past,
        # Our own operators run in MindSpore or by themselves, and one graph of them does all.
        f"export.layout={layout}": offline and layout not in ("auto", "dynamic", "packed"),
        f"engine={config.engine}": offline
        and config.engine not in ("auto", "graph-cell", "native"),
        f"export.target={target}": offline and target == "Ascend",
        "infer.model_type=mindir_lite": offline and config.infer.model_type == "mindir_lite",
        "export.weight_fp16=true": offline and config.export.weight_fp16,
        "infer.enc_key": offline and bool(config.infer.enc_key),
        "infer.prefill_model_path": config.writes_graphs and bool(config.infer.prefill_model_path),
        "model.model_config.is_sample_acceleration=true": offline
        and config.model.model_config.is_sample_acceleration,
    }
