"""AutoModel: models by a name, a folder, a checkpoint or a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lite_runner.api.config import AutoConfig, PretrainedConfig, config_of
from lite_runner.config.generation import decided

if TYPE_CHECKING:
    from lite_runner.api.model import PreTrainedModel


class AutoModel:
    """Makes models; has no objects of its own."""

    @classmethod
    def from_pretrained(
        cls, name_or_dir: str | Path, *, checkpoint_name_or_path: str | Path = "", **settings: Any
    ) -> PreTrainedModel:
        """The model of a name of conf/model, a folder or a checkpoint.

        `checkpoint_name_or_path`: weights to take in place of the model's own; `settings` are
        attributes of its config, as use_past=True. See from_config. Raises ConfigError,
        ArtifactError.
        """
        return cls.from_config(config_of(name_or_dir, settings, checkpoint_name_or_path))

    @classmethod
    def from_config(
        cls, config: PretrainedConfig | str | Path | Mapping[str, Any], **settings: Any
    ) -> PreTrainedModel:
        """The model of an AutoConfig, or of a yaml file as run_mindformer takes it, or of the
        content of such a file.

        `settings` are attributes of its config, which are set for this model alone. The model is a
        Cell, unless it has backend="native", for which MindSpore is not imported. Raises
        ConfigError, ArtifactError.
        """
        if isinstance(config, PretrainedConfig):
            config = config.copy()
        else:
            config = AutoConfig.from_pretrained(config)
        config.update(decided(settings))
        return _model_of(config)


def _model_of(config: PretrainedConfig) -> PreTrainedModel:
    from lite_runner.api.options import without_call_options
    from lite_runner.model.locate import locate

    run = without_call_options(config.run_config())
    files = locate(run.source)
    if run.backend == "native":
        from lite_runner.api.model import PreTrainedModel

        return PreTrainedModel(config, files)
    # MindSpore takes most of a second to import.
    from lite_runner.api.network import network_of

    return network_of(config, files)


class AutoModelForCausalLM(AutoModel):
    """Another of MindFormers' names of it."""
