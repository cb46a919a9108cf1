"""What does not go together in a config about quantized weights."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.config.fields import Fault, fault
from lite_runner.config.schema import RunConfig


def quantization_faults(config: RunConfig) -> Iterator[Fault]:
    """The settings quant and quant_group against each other and against the rest."""
    writing = config.run_mode == "quantize"
    if config.quant_group is not None and config.quant != "a16w4":
        yield fault(
            ("quant_group", "quant"),
            f"quant_group={config.quant_group} needs quant=a16w4: 8 bits have no groups to choose",
        )
    if writing and not config.quantize_output:
        yield fault("quantize_output", "quantize_output is empty; give the folder to write")
    if writing and config.quantization.quant == "none":
        yield fault("quant", "run_mode=quantize needs quant=a16w8, a16w4 or a8w8")
    if config.quantization.quant == "none":
        return
    if config.run_mode in ("convert", "shard"):
        yield fault(
            ("quant", "run_mode"),
            f"quant={config.quant} has no meaning with run_mode={config.run_mode}, which writes"
            " floats; run_mode=quantize writes integers",
        )
    yield from unavailable(config, f"quant={config.quant}", "quant")


def unavailable(config: RunConfig, what: str, key: str) -> Iterator[Fault]:
    """What cannot be done with quantized weights; `what` says where they come from."""
    export = config.run_mode == "export"
    offline = export or config.backend == "mslite"
    layout, target = config.export.layout, config.export.target
    asked = {
        "run_mode=slora": config.run_mode == "slora",
        "model.model_config.use_past=false": config.predicts and not config.use_past,
        # Our own operators run in MindSpore alone, and one graph of them does all.
        f"export.layout={layout}": offline and layout not in ("auto", "dynamic"),
        f"engine={config.engine}": offline and config.engine not in ("auto", "graph-cell"),
        f"export.target={target}": offline and target == "Ascend",
        "infer.model_type=mindir_lite": offline and config.infer.model_type == "mindir_lite",
        "export.weight_fp16=true": offline and config.export.weight_fp16,
        "infer.enc_key": offline and bool(config.infer.enc_key),
        "infer.prefill_model_path": export and bool(config.infer.prefill_model_path),
        "model.model_config.is_sample_acceleration=true": offline
        and config.model.model_config.is_sample_acceleration,
    }
    for setting, given in asked.items():
        if given:
            other = setting.partition("=")[0]
            yield fault((key, other), f"{what} is not available with {setting}")
