"""run_mode=export: a model as MindIR (or .ms), proved in the engine that it is for."""

from __future__ import annotations

import time
from pathlib import Path

from lite_runner import model_files, offline, progress
from lite_runner.artifact import export_artifact
from lite_runner.config.schema import RunConfig
from lite_runner.report import Result, RunFolder, Timing

DEFAULT_LENGTH = 512  # positions of a layout that fixes them


def run(config: RunConfig, folder: RunFolder) -> None:
    """Write the artifact. Raises RunnerError; nothing half-written gets the final name."""
    began = time.perf_counter()
    files = model_files.locate(config)
    tokenizer = model_files.tokenizer_of(config, files)
    length = config.infer.infer_seq_length or min(DEFAULT_LENGTH, files.model.seq_length)
    want = offline.wanted(config, config.predict_batch_size or 1, length)
    given = config.export_output or f"{config.output_dir}/{config.model_name}_{want.layout}"
    target = Path(given).expanduser()
    manifest = export_artifact(
        target, config, files, tokenizer, want, overwrite=bool(config.overwrite)
    )
    folder.write_result(
        Result(
            run_mode=config.run_mode,
            model=config.model_name,
            backend=config.backend,
            engine=want.engine,
            load_checkpoint=files.source,
            results=[],
            timing=Timing(load_s=time.perf_counter() - began),
        )
    )
    size = sum((target / name).stat().st_size for name in manifest.files)
    progress.note(f"wrote {target}: {want.layout}, {size / 1e6:.0f} MB, for engine={want.engine}")
