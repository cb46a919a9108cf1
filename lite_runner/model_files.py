"""The model that a config means: its sizes, its tensors on disk and its tokenizer.

Nothing large is read here, so that whatever is wrong with the files shows at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from lite_runner import progress
from lite_runner.config.compose import raise_faults
from lite_runner.config.model import ModelConfig
from lite_runner.config.quantization import Quantization
from lite_runner.config.quantization_checks import unavailable
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.given_model import GivenModel, given_model
from lite_runner.text.loading import load_tokenizer
from lite_runner.text.tokenizer import Tokenizer, byte_tokenizer
from lite_runner.weights.adapter import Adapter, open_adapters
from lite_runner.weights.checkpoint import model_config_in, model_config_of
from lite_runner.weights.merge import merged, merged_model
from lite_runner.weights.pieces import pieces
from lite_runner.weights.quantization import with_quantization
from lite_runner.weights.quantized_checkpoint import read_quantization
from lite_runner.weights.random import random_checkpoint
from lite_runner.weights.recut import tensors_for, whole_tensors
from lite_runner.weights.shard_manifest import rank_folders
from lite_runner.weights.source import fetch
from lite_runner.weights.tensor import LazyTensor
from lite_runner.weights.write import COPIED_FILES

RANDOM = "random"
# What a run may choose against its checkpoint: how far it goes, and which tokens end a text.
TOKEN_FIELDS = {"bos_token_id", "eos_token_id", "pad_token_id"}
FREE_FIELDS = {"seq_length", "rope_scaling", *TOKEN_FIELDS}


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is and what it is."""

    source: str  # as the config names it; "random" for weights made from the seed
    path: Path | None  # None: random
    model: ModelConfig
    seed: int
    given: GivenModel | None = None  # an exported model, which needs no checkpoint
    strategy: Path | None = None  # how a sharded checkpoint is cut
    auto_trans: bool = False  # whether one that is cut otherwise than wanted is cut anew
    base: ModelConfig | None = None  # with an adapter: the model that it is merged into
    adapter: Adapter | None = None
    quantization: Quantization = Quantization()  # noqa: RUF009  (frozen)

    def tensors(
        self, ranks: Ranks | None = None, *, vocab_parallel: bool = True
    ) -> Mapping[str, LazyTensor]:
        """Every tensor, or what `ranks` holds of it, in MindFormers' names, checked but not read.

        Quantized matrices have their integers, in one rank. Raises ArtifactError.
        """
        self._check_there_are_weights()
        ranks = ranks or Ranks()
        quantized = self.quantization.quant != "none"
        if self.path is None or self.adapter is not None or quantized:
            # Integers are those of the whole matrix, whatever is then cut from it.
            return pieces(self.whole(), self.model, ranks, vocab_parallel=vocab_parallel)
        tensors = tensors_for(
            self.path,
            self.model,
            ranks,
            strategy=self.strategy,
            auto_trans=self.auto_trans,
            vocab_parallel=vocab_parallel,
        )
        return with_quantization(tensors, self.model, self.quantization)

    def whole(self) -> Mapping[str, LazyTensor]:
        """Every tensor of the model, a sharded one put together, an adapter merged into them.

        Raises ArtifactError.
        """
        self._check_there_are_weights()
        base = self.base or self.model
        if self.path is None:
            tensors: Mapping[str, LazyTensor] = random_checkpoint(base, self.seed)
        else:
            tensors = whole_tensors(self.path, base, self.strategy)
        if self.adapter is not None:
            tensors = merged(tensors, self.adapter, base)
        return with_quantization(tensors, self.model, self.quantization)

    def _check_there_are_weights(self) -> None:
        if self.given is not None:
            raise ArtifactError(f"{self.given.folder}: an exported model, whose weights stay in it")
        if self.quantization.quant != "none" and self.path and rank_folders(self.path):
            raise ArtifactError(
                f"{self.path}: cut for several ranks, and quant={self.quantization} wants a whole "
                "checkpoint",
                "merge it first: run_mode=shard parallel=single",
            )


def locate(config: RunConfig, *, weights: bool = True) -> ModelFiles:
    """Fetch what the config names, unless it is here, and read the model's sizes.

    Without `weights`, which a tokenizer does not need, those on the hub are not fetched. Raises
    ArtifactError where it is not to be had or is another model than the config says.
    """
    given = given_model(config)
    if given is not None:
        return files_of(given, config)
    source, model = config.checkpoint_source, config.model_config()
    if source == RANDOM:
        if model is None:
            raise ConfigError(
                "model=auto takes the model's sizes from its checkpoint, and "
                "load_checkpoint=random has none",
                "name a model (model=tiny_llama), or a checkpoint (load_checkpoint=DIR)",
            )
        return ModelFiles(source, None, model, config.seed, quantization=config.quantization)
    path = fetch(source, progress.note, weights=weights)
    # A hub's folder without weights is a folder without a checkpoint, and no fault here.
    alone = not weights and source.startswith("hf://")
    own = model_config_in(path) if alone else model_config_of(path)
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
        strategy=Path(strategy).expanduser() if strategy else None,
        auto_trans=config.auto_trans_ckpt,
        quantization=_quantization(config, path),
    )


def _quantization(config: RunConfig, path: Path) -> Quantization:
    """How the weights are held: as the config says, or as a quantized checkpoint is.

    Raises ArtifactError where the two are not the same, ConfigError for what cannot be done.
    """
    manifest, asked = read_quantization(path), config.quantization
    if manifest is None:
        return asked
    held = manifest.quantization
    if config.quant is None:
        raise_faults(list(unavailable(config, f"{path}: quant={held}", "load_checkpoint")))
        return held
    if config.quant_group is None and asked.quant == held.quant:
        return held
    if asked.same_weights != held.same_weights:
        raise ArtifactError(
            f"{path}: quantized as {held}, this run asks for quant={asked}",
            f"leave quant= out, or give what it was made from: load_checkpoint={manifest.source}",
        )
    return asked


def with_adapter(files: ModelFiles, config: RunConfig) -> ModelFiles:
    """The model with the adapter of adapter_path merged into it, where the config names one.

    Raises ConfigError where it leaves open which, ArtifactError where it does not fit the model.
    """
    if not config.adapter_path:
        return files
    adapters = adapters_of(config, files.model)
    if len(adapters) != 1:
        raise ConfigError(
            f"adapter_path={config.adapter_path} lists {len(adapters)} adapters, one can be merged",
            f"adapter_id={next(iter(adapters))}",
        )
    (adapter,) = adapters.values()
    model = merged_model(files.model, adapter)
    return dataclasses.replace(files, model=model, base=files.model, adapter=adapter)


def adapters_of(
    config: RunConfig, model: ModelConfig, names: Sequence[str] | None = None
) -> dict[str, Adapter]:
    """The adapters of adapter_path that have these `names`; without any those that adapter_id
    names, all where it names none.

    Raises ArtifactError.
    """
    ids = config.adapter_id
    if names is None and ids is not None:
        names = [ids] if isinstance(ids, str) else [name for name in ids if name is not None]
    root = Path(config.adapter_root).expanduser() if config.adapter_root else None
    return open_adapters(Path(config.adapter_path).expanduser(), model, names, root=root)


def files_of(given: GivenModel, config: RunConfig) -> ModelFiles:
    """An exported model in place of a checkpoint; the config may choose other special tokens.

    Raises ArtifactError where the config names another model.
    """
    manifest, wanted = given.manifest, config.model_config()
    if config.load_checkpoint:
        progress.note(f"load_checkpoint: not read, the weights are in {given.folder}")
    model = manifest.model
    if wanted is not None:
        differing = _differing(wanted, model, "the export", TOKEN_FIELDS)
        if differing:
            raise ArtifactError(
                f"{given.folder}: an export of {manifest.model_name}, another model than "
                f"{config.model_name}: {differing}",
                "leave model= out: the export says which it is",
            )
        tokens = {name: getattr(wanted, name) for name in TOKEN_FIELDS}
        model = dataclasses.replace(model, **tokens)
    held = manifest.operators.quantization if manifest.operators else Quantization()
    asked = config.quantization
    wrong = asked.quant != held.quant or (config.quant_group and asked.group != held.group)
    if config.quant is not None and wrong:
        raise ArtifactError(
            f"{given.folder}: exported with quant={held}, this run asks for quant={asked}",
            "leave quant= out: the export says which it is",
        )
    return ModelFiles(manifest.source, None, model, config.seed, given, quantization=held)


def tokenizer_of(config: RunConfig, files: ModelFiles) -> Tokenizer:
    """The tokenizer that the config names, or the model's own. Raises ArtifactError."""
    settings = config.processor.tokenizer
    vocab = files.model.vocab_size
    if settings.tokenizer_file is not None:
        key = "processor.tokenizer.tokenizer_file"
        path = fetch(settings.tokenizer_file, progress.note, key, weights=False)
        return load_tokenizer(path, model_vocab=vocab)
    given = files.given
    if given is not None and (given.manifest.tokenizer or settings.type != "ByteTokenizer"):
        return load_tokenizer(given.folder, model_vocab=vocab)
    if settings.type == "ByteTokenizer" or files.path is None:
        return byte_tokenizer()
    beside = files.path
    if beside.is_file() and beside.suffix != ".gguf":
        beside = beside.parent
    return load_tokenizer(beside, model_vocab=vocab)


def files_beside(config: RunConfig, files: ModelFiles) -> dict[str, bytes]:
    """The tokenizer's files, by name, for a folder of the model's weights to be run from.

    Those beside the source are copied as they are, for a GGUF or a tokenizer_file they are made.
    """
    named = config.processor.tokenizer.tokenizer_file is not None
    if files.path is None and not named:
        return {}
    if files.path is None or named or files.path.suffix == ".gguf":
        texts = tokenizer_of(config, files).files()
        return {name: text.encode() for name, text in texts.items()}
    folder = files.path if files.path.is_dir() else files.path.parent
    found = (folder / name for name in COPIED_FILES)
    return {file.name: file.read_bytes() for file in found if file.is_file()}


def end_tokens(model: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those that the model names, and the tokenizer's own."""
    return tuple(dict.fromkeys((*model.eos_token_id, *tokenizer.eos_token_ids)))


def _check_same_model(wanted: ModelConfig, own: ModelConfig, path: Path) -> None:
    differing = _differing(wanted, own, "the checkpoint", FREE_FIELDS)
    if differing:
        raise ArtifactError(
            f"{path} is another model than the config's: {differing}",
            "model=auto takes everything from the checkpoint",
        )


def _differing(wanted: ModelConfig, own: ModelConfig, owner: str, free: Set[str]) -> str:
    """What two models have not in common, "" where they are one."""
    return "; ".join(
        f"{field.name}: the config says {getattr(wanted, field.name)}, {owner} "
        f"{getattr(own, field.name)}"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in free and getattr(wanted, field.name) != getattr(own, field.name)
    )
