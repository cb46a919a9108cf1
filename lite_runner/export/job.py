"""An export as it is handed from step to step: the model, the spec, and who verifies it."""

from __future__ import annotations

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.engines.start import EngineOptions
from lite_runner.config.options import ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ConfigError
from lite_runner.export.engine import engine_for
from lite_runner.export.memory import export_memory
from lite_runner.export.spec import ExportSpec, spec_of, spec_of_run
from lite_runner.model.files import ModelFiles
from lite_runner.records import dataclass
from lite_runner.sizing.need import Memory
from lite_runner.text.tokenizer import Tokenizer

DEFAULT_LENGTH = 512  # positions of a layout that fixes them


@dataclass(frozen=True)
class ExportJob:
    """A model to export. Of several ranks each has the same job, but for its rank."""

    config: ExportedOptions
    files: ModelFiles
    tokenizer: Tokenizer | None  # lies beside the graphs; None: only a model in the cache will do
    spec: ExportSpec
    engine: EngineOptions  # that it is verified in
    ranks: Ranks = Ranks()

    @property
    def first(self) -> bool:
        """Whether this rank writes what there is one of."""
        return self.ranks.rank == 0

    @property
    def memory(self) -> Memory:
        """Memory that writing it needs."""
        return export_memory(self.files, self.spec)

    @property
    def required_tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none."""
        if self.tokenizer is None:
            raise ConfigError(
                "an exported model has its tokenizer beside it, and there is none",
                "processor.tokenizer.tokenizer_file= names one",
            )
        return self.tokenizer


def job_of_export(
    config: ExportedOptions,
    files: ModelFiles,
    ranks: Ranks,
    tokenizer: Tokenizer | None = None,
    *,
    slots: int,
) -> ExportJob:
    """The export that run_mode=export writes, for batches of `slots` rows. Raises as `spec_of` and
    `engine_for`."""
    length = config.infer.infer_seq_length or default_length(files.model)
    spec = spec_of(config, files, slots, length)
    return ExportJob(config, files, tokenizer, spec, engine_for(config, spec.layout), ranks)


def default_length(model: Decoder) -> int:
    """Positions of a row, where the config says nothing."""
    return min(DEFAULT_LENGTH, model.seq_length)


def job_of_run(
    config: ExportedOptions,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    *,
    slots: int,
    length: int,
    ranks: Ranks,
) -> ExportJob:
    """The export that serves a run of `slots` rows of `length` positions, in the run's engine.
    Raises as `spec_of` and `engine_for`."""
    spec = spec_of_run(config, files, slots, length)
    engine = engine_for(config, spec.layout, ranks=ranks)
    return ExportJob(config, files, tokenizer, spec, engine, ranks)
