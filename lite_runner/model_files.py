"""The model that a config means: its sizes, its tensors on disk and its tokenizer.

Nothing large is read here, so that whatever is wrong with the files shows at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lite_runner import progress
from lite_runner.config.model import ModelConfig
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text.loading import load_tokenizer
from lite_runner.text.tokenizer import Tokenizer, byte_tokenizer
from lite_runner.weights.checkpoint import model_config_of
from lite_runner.weights.pieces import pieces
from lite_runner.weights.random import random_checkpoint
from lite_runner.weights.recut import tensors_for, whole_tensors
from lite_runner.weights.source import fetch
from lite_runner.weights.tensor import LazyTensor

RANDOM = "random"
# What a run may choose against its checkpoint: how far it goes, and which tokens end a text.
FREE_FIELDS = {"seq_length", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id"}


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is and what it is."""

    source: str  # as the config names it; "random" for weights made from the seed
    path: Path | None  # None: random
    model: ModelConfig
    seed: int
    strategy: Path | None = None  # how a sharded checkpoint is cut
    auto_trans: bool = False  # whether one that is cut otherwise than wanted is cut anew

    def tensors(
        self, ranks: Ranks | None = None, *, vocab_parallel: bool = True
    ) -> Mapping[str, LazyTensor]:
        """Every tensor, or what `ranks` holds of it, in MindFormers' names, checked but not read.

        Raises ArtifactError.
        """
        ranks = ranks or Ranks()
        if self.path is None:
            whole = random_checkpoint(self.model, self.seed)
            return pieces(whole, self.model, ranks, vocab_parallel=vocab_parallel)
        return tensors_for(
            self.path,
            self.model,
            ranks,
            strategy=self.strategy,
            auto_trans=self.auto_trans,
            vocab_parallel=vocab_parallel,
        )

    def whole(self) -> Mapping[str, LazyTensor]:
        """Every tensor of the model, a sharded one put together. Raises ArtifactError."""
        if self.path is None:
            return random_checkpoint(self.model, self.seed)
        return whole_tensors(self.path, self.model, self.strategy)


def locate(config: RunConfig) -> ModelFiles:
    """Fetch what the config names, unless it is here, and read the model's sizes.

    Raises ArtifactError where it is not to be had or is another model than the config says.
    """
    source, model = config.checkpoint_source, config.model_config()
    if source == RANDOM:
        if model is None:
            raise ConfigError(
                "model=auto takes the model's sizes from its checkpoint, and "
                "load_checkpoint=random has none",
                "name a model (model=tiny_llama), or a checkpoint (load_checkpoint=DIR)",
            )
        return ModelFiles(source, None, model, config.seed)
    path = fetch(source, progress.note)
    own = model_config_of(path)
    if model is None:
        if own is None:
            raise ArtifactError(
                f"{path}: holds no sizes of its model, which model=auto needs",
                "name the model, e.g. model=llama2_7b, or put its config.json beside the weights",
            )
        model = own
    elif own is not None:
        _check_same_model(model, own, path)
    strategy = config.src_strategy_path_or_dir
    return ModelFiles(
        source,
        path,
        model,
        config.seed,
        Path(strategy).expanduser() if strategy else None,
        config.auto_trans_ckpt,
    )


def tokenizer_of(config: RunConfig, files: ModelFiles) -> Tokenizer:
    """The tokenizer that the config names, or the checkpoint's own. Raises ArtifactError."""
    settings = config.processor.tokenizer
    vocab = files.model.vocab_size
    if settings.tokenizer_file is not None:
        key = "processor.tokenizer.tokenizer_file"
        return load_tokenizer(fetch(settings.tokenizer_file, progress.note, key), model_vocab=vocab)
    if settings.type == "ByteTokenizer" or files.path is None:
        return byte_tokenizer()
    beside = files.path
    if beside.is_file() and beside.suffix != ".gguf":
        beside = beside.parent
    return load_tokenizer(beside, model_vocab=vocab)


def end_tokens(model: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those that the model names, and the tokenizer's own."""
    return tuple(dict.fromkeys((*model.eos_token_id, *tokenizer.eos_token_ids)))


def _check_same_model(wanted: ModelConfig, own: ModelConfig, path: Path) -> None:
    differing = [
        f"{field.name}: the config says {getattr(wanted, field.name)}, the checkpoint "
        f"{getattr(own, field.name)}"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in FREE_FIELDS and getattr(wanted, field.name) != getattr(own, field.name)
    ]
    if differing:
        raise ArtifactError(
            f"{path} is another model than the config's: " + "; ".join(differing),
            "model=auto takes everything from the checkpoint",
        )
