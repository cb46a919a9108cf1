"""An adapter for a model that is loaded already."""

from __future__ import annotations

from lite_runner.config.options import SessionOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.adapters import AdapterJob, check_adapters, rank_adapters
from lite_runner.model.files import ModelFiles
from lite_runner.model.merged_adapter import adapter_root_of
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_reader import open_adapter


def open_later(config: SessionOptions, files: ModelFiles, name: str, folder: str) -> Adapter:
    """The adapter of a folder below adapter_root, as a backend of one rank takes it.

    Raises ArtifactError as `open_adapters`.
    """
    root = adapter_root_of(config)
    assert root is not None
    opened = open_adapter(name, folder, files.model, root)
    check_adapters([opened], files)
    (adapter,) = rank_adapters(AdapterJob([opened], (), root=root), config, files.model, Ranks())
    return adapter
