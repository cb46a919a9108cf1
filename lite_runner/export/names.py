"""What an export is called where nobody names it: by its model and by what it differs in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lite_runner.export.job import ExportJob, default_length
from lite_runner.export.output_paths import OutputPaths
from lite_runner.weights.lora.adapter_file import digest


def output_paths(job: ExportJob, folder: str, *, overwrite: bool) -> OutputPaths:
    """Where the config wants the artifact: at the paths of a pair, in `folder`, or, where that is
    "", in a folder of output_dir."""
    config, infer = job.config, job.config.infer
    if infer.prefill_model_path:
        prefill = Path(infer.prefill_model_path).expanduser()
        increment = Path(infer.increment_model_path).expanduser()
        return OutputPaths.of_pair(prefill, increment, overwrite)
    if not folder:
        parts = [config.model_name, job.spec.layout, *_particulars(job)]
        folder = f"{config.output_dir}/{'_'.join(parts)}"
    return OutputPaths(Path(folder).expanduser(), overwrite=overwrite)


def _particulars(job: ExportJob) -> Iterator[str]:
    """What tells an export from the one without settings on this device: each is part of the
    folder's name, so that exports that differ do not meet in one folder."""
    files, spec = job.files, job.spec
    if spec.target != job.engine.device:
        yield spec.target.lower()
    if spec.model_type == "mindir_lite":
        yield "lite"
    if spec.operators is not None:
        yield str(files.quantization).replace(" quant_group=", "-g")
        if spec.operators.kv_cache != "fp32":
            yield f"kv-{spec.operators.kv_cache}"
    weights = spec.precision if spec.rounded == "float32" else spec.rounded
    if weights != ("float16" if spec.target == "Ascend" else "float32"):
        yield weights
    if spec.sampled:
        yield "sampled"
    if spec.key is not None:
        yield "encrypted"
    if spec.ranks > 1:
        yield f"tp{spec.ranks}"
    if not spec.fits_any:
        if spec.slots > 1:
            yield f"b{spec.slots}"
        if spec.length != default_length(files.model):
            yield f"s{spec.length}"
    if files.adapter is not None:
        # The name is the user's folder or from a file; two adapters may have the same.
        name = re.sub(r"[^\w.-]", "-", files.adapter.name)[:40]
        yield f"{name}-{digest(files.adapter)[:8]}"
