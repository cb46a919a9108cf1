"""What lies beside the graphs of an export: tokenizer, manifest, yaml and config.ini."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from lite_runner.architectures import custom_network
from lite_runner.backends.ge_options import ge_to_write
from lite_runner.config.ge import FILE_NAME, render
from lite_runner.config.model_yaml import model_yaml
from lite_runner.export.job import ExportJob
from lite_runner.export.output_paths import OutputPaths
from lite_runner.mindir.manifest import MANIFEST, Graph, GraphName, Manifest
from lite_runner.system.files import sha256_of
from lite_runner.system.versions import versions
from lite_runner.weights.lora.adapter_file import digest

MODEL_TYPES: dict[str, Literal["MINDIR", "MINDIR_LITE", "PACKED"]] = {
    "mindir": "MINDIR",
    "mindir_lite": "MINDIR_LITE",
    "packed": "PACKED",
}


def write_tokenizer(folder: Path, job: ExportJob) -> tuple[str, ...]:
    """Write the tokenizer's files; their names. Raises ConfigError where there is no tokenizer."""
    files = job.required_tokenizer.files()
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return tuple(files)


def write_manifest(
    folder: Path, job: ExportJob, graphs: Mapping[GraphName, Graph], tokenizer: tuple[str, ...]
) -> None:
    """Write the manifest, which lists all files that are in the folder by now; `tokenizer`: names
    of those that are the tokenizer's."""
    config, files, spec = job.config, job.files, job.spec
    there = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in there if name != MANIFEST)
    manifest = Manifest(
        layout=spec.layout,
        model_name=config.model_name,
        model=files.model,
        source=files.source,
        target=spec.target,
        model_type=MODEL_TYPES[spec.model_type],
        precision=spec.precision,
        batch_size=spec.slots,
        seq_length=files.model.seq_length if spec.fits_any else spec.length,
        graphs=graphs,
        files={file: sha256_of(folder / file) for file in names},
        tokenizer=tokenizer,
        versions=versions(),
        encrypted=spec.key is not None,
        sampled=spec.sampled,
        adapter=files.adapter.name if files.adapter else "",
        adapter_sha256=digest(files.adapter) if files.adapter else "",
        operators=spec.operators,
    )
    manifest.write(folder)


def write_settings(folder: Path, job: ExportJob, manifest: Manifest, paths: OutputPaths) -> None:
    """Write the yaml and config.ini that MindFormers' tools want beside graphs.

    The user may change them, so the manifest does not list them. No yaml is written beside one of
    the user's, nor for a registered family, which the yaml cannot describe, nor for packed layers,
    which these tools do not read.
    """
    config = job.config
    if manifest.layout == "packed":
        return
    if custom_network(manifest.model) is None and not paths.has_own_yaml():
        text = model_yaml(manifest.model, config, manifest.seq_length, manifest.model_type.lower())
        (folder / f"{config.model_name}.yaml").write_text(text, encoding="utf-8")
    ge = ge_to_write(config, manifest.target)
    if ge is not None and ge.sections:
        (folder / FILE_NAME).write_text(render(ge.sections), encoding="utf-8")
