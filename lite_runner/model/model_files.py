"""The model that a config means: its sizes, its tensors on disk and its tokenizer.

Nothing large is read here, so that whatever is wrong with the files shows at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from lite_runner import progress
from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import raise_faults
from lite_runner.config.groups import own_source
from lite_runner.config.options import AdapterOptions, ComputeOptions, StrategyOptions
from lite_runner.config.quantization import Quantization
from lite_runner.config.quantization_checks import unavailable
from lite_runner.config.ranks import Ranks
from lite_runner.config.requests import adapter_names
from lite_runner.config.schema import DType, RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.exported_model import ExportedModel, exported_model
from lite_runner.sizing.need import readable
from lite_runner.text.loading import holds_tokenizer, load_tokenizer
from lite_runner.text.tokenizer import Tokenizer, byte_tokenizer
from lite_runner.weights.checkpoint import (
    PICKLES,
    check_file,
    folder_of,
    model_config_in,
    model_config_of,
    weights_file,
    with_lora,
)
from lite_runner.weights.formats.hugging_face import TOKENIZER_FILES
from lite_runner.weights.lora.adapter import Adapter, fitted, open_adapters
from lite_runner.weights.lora.adapter_config import lora_settings
from lite_runner.weights.lora.merge import merged, merged_model
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.quantization.quantized_checkpoint import read_quantization
from lite_runner.weights.quantization.rounding import with_matrices_in
from lite_runner.weights.random import random_checkpoint
from lite_runner.weights.sharding.pieces import pieces
from lite_runner.weights.sharding.reshard import tensors_for, whole_tensors
from lite_runner.weights.sharding.shard_manifest import rank_folders
from lite_runner.weights.source import fetch, held
from lite_runner.weights.tensor import LazyTensor
from lite_runner.weights.write import config_file, copied_files

RANDOM = "random"
# Suffixes of files that hold weights; the second where there are none of the first.
WEIGHTS = ((".safetensors", ".ckpt", ".gguf"), PICKLES)
DOWNLOADS = "checkpoint_download"  # MindFormers', in the current folder
# What a run may choose against its checkpoint: how far it goes, and which tokens end a text.
TOKEN_FIELDS = {"bos_token_id", "eos_token_id", "pad_token_id"}
FREE_FIELDS = {"seq_length", "rope_scaling", *TOKEN_FIELDS}


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is and what it is."""

    source: str  # as the config names it; "random" for weights made from the seed
    path: Path | None  # None: random
    model: Decoder
    seed: int
    given: ExportedModel | None = None  # an exported model, which needs no checkpoint
    strategy: Path | None = None  # how a sharded checkpoint is cut
    auto_trans: bool = False  # whether one that is cut otherwise than wanted is cut anew
    base: Decoder | None = None  # with an adapter: the model that it is merged into
    adapter: Adapter | None = None
    quantization: Quantization = Quantization()  # noqa: RUF009  (frozen)
    held: Mapping[str, LazyTensor] | None = None  # this rank's tensors, in memory; None: on disk
    rounded: DType = "float32"  # a run's wider matrices are rounded to it; integers stay

    def tensors(
        self, ranks: Ranks | None = None, *, vocab_parallel: bool = True
    ) -> Mapping[str, LazyTensor]:
        """Every tensor, or what `ranks` holds of it, in MindFormers' names, checked but not read.

        Quantized matrices have their integers, in one rank; others are `rounded`. Raises
        ArtifactError.
        """
        tensors = self._unrounded(ranks or Ranks(), vocab_parallel)
        quantized = self.quantization.quant != "none"
        return tensors if quantized else with_matrices_in(tensors, self.rounded)

    def whole(self) -> Mapping[str, LazyTensor]:
        """Every tensor of the model, a sharded one put together, an adapter merged into them.

        Raises ArtifactError.
        """
        if self.held is not None:
            return with_quantization(self.held, self.model, self.quantization)
        self._check_there_are_weights()
        base = self.base or self.model
        if self.path is None:
            tensors: Mapping[str, LazyTensor] = random_checkpoint(base, self.seed)
        elif self.adapter is not None and self.adapter.folder == self.path:
            tensors, _ = with_lora(self.path, base)
        else:
            tensors = whole_tensors(self.path, base, self.strategy)
        if self.adapter is not None:
            tensors = merged(tensors, self.adapter, base)
        return with_quantization(tensors, self.model, self.quantization)

    def _unrounded(self, ranks: Ranks, vocab_parallel: bool) -> Mapping[str, LazyTensor]:
        if self.held is not None:
            return with_quantization(self.held, self.model, self.quantization)
        self._check_there_are_weights()
        if self.path is None or self.adapter is not None or self.quantization.quant != "none":
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

    def whereabouts(self) -> str:
        """Where the weights are, and how large what holds them is."""
        if self.given is not None:
            return f"in the exported model {self.given.folder}"
        if self.source == RANDOM:
            return RANDOM
        if self.path is None:
            return f"{self.source}: would be fetched"
        return f"{self.source}: {readable(self.stored_bytes())} here"

    def stored_bytes(self) -> int:
        """Size of the files that hold the weights; 0 where they are made or not here."""
        if self.path is None:
            return 0
        if self.path.is_file():
            return self.path.stat().st_size
        every = [item for item in self.path.rglob("*") if item.is_file()]
        sizes = [
            sum(item.stat().st_size for item in every if item.suffix in suffixes)
            for suffixes in WEIGHTS
        ]
        return sizes[0] or sizes[1]

    def cut(self, ranks: Ranks, *, vocab_parallel: bool) -> Mapping[str, LazyTensor]:
        """As `tensors`, however the checkpoint itself is cut."""
        return dataclasses.replace(self, auto_trans=True).tensors(
            ranks, vocab_parallel=vocab_parallel
        )

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
    given = exported_model(config)
    if given is not None:
        return files_of(given, config)
    source, model = config.checkpoint_source, _model_told(config)
    if source == RANDOM:
        if model is None:
            raise ConfigError(
                "model=auto takes the model's sizes from its checkpoint, and "
                "load_checkpoint=random has none",
                "name a model (model=tiny_llama), or a checkpoint (load_checkpoint=DIR)",
            )
        files = ModelFiles(
            source, None, model, config.checkpoint_seed, quantization=config.quantization
        )
        return _with_own_lora(files, config)
    key = "pretrained_model_dir" if source == config.pretrained_model_dir else "load_checkpoint"
    path = fetch(source, progress.note, key, weights=weights)
    # A hub's folder without weights is a folder without a checkpoint, and no fault here.
    alone = not weights and source.startswith("hf://")
    if weights and not rank_folders(path):
        check_file(path)  # what is broken is told before anything is missed beside it
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
    strategy = config.src_strategy_path_or_dir if isinstance(config, StrategyOptions) else ""
    files = ModelFiles(
        source,
        path,
        model,
        config.checkpoint_seed,
        strategy=Path(strategy).expanduser() if strategy else None,
        auto_trans=isinstance(config, ComputeOptions) and config.auto_trans_ckpt,
        quantization=_quantization(config, path),
    )
    return _with_own_lora(files, config) if weights else files


def _with_own_lora(files: ModelFiles, config: RunConfig) -> ModelFiles:
    """With pet_type=lora, the adapter merged: that of adapter_path, or the checkpoint's own.

    Raises ArtifactError where there is none, or it does not fit the model.
    """
    pet, path = config.model.model_config.pet_config, files.path
    if pet is None:
        return files
    if isinstance(config, AdapterOptions) and config.adapter_path:
        return with_adapter(files, config)
    assert path is not None  # checks.py: random weights have none
    _, lora = with_lora(path, files.model)
    if not lora:
        raise ArtifactError(
            f"{path}: pet_config.pet_type=lora, but the checkpoint holds no LoRA weights (names "
            "that end in lora_a and lora_b)",
            "adapter_path= the adapter's folder, or leave pet_config out for the base model",
        )
    settings = lora_settings(path, pet.lora_rank, pet.lora_alpha, pet.target_modules)
    adapter = fitted("lora", path, lora, path, settings, files.model)
    return _merged(files, adapter)


def _merged(files: ModelFiles, adapter: Adapter) -> ModelFiles:
    model = merged_model(files.model, adapter)
    return dataclasses.replace(files, model=model, base=files.model, adapter=adapter)


def planned(config: RunConfig) -> ModelFiles:
    """Like `locate`, but nothing is fetched: what would be has no path.

    Raises ArtifactError where something is missing that no run would find, and where the sizes of
    the model are in what would have to be fetched.
    """
    source = config.checkpoint_source
    told = config.pretrained_model_dir
    if source == RANDOM or exported_model(config) is not None:
        return locate(config)
    here = held(source)
    if here is not None and (not told or held(told, "pretrained_model_dir") is not None):
        return locate(dataclasses.replace(config, load_checkpoint=str(here)))
    model = config.model_config()
    if model is None:
        raise ArtifactError(
            f"{source}: not in the cache, and model=auto has the model's sizes from it",
            "dry_run=true fetches nothing: name the model, or run without it once",
        )
    return ModelFiles(source, None, model, config.checkpoint_seed, quantization=config.quantization)


def find(config: RunConfig) -> ModelFiles:
    """The files of a run, an adapter of adapter_path not merged; with dry_run=true nothing is
    fetched. Raises ArtifactError."""
    return planned(config) if config.dry_run else locate(config)


def found_tokenizer(config: RunConfig, files: ModelFiles) -> Tokenizer | None:
    """The tokenizer of a run; with dry_run=true None where it would have to be fetched. Raises
    ArtifactError."""
    if not config.dry_run:
        return tokenizer_of(config, files)
    if files.source != RANDOM and files.path is None and files.given is None:
        return None
    try:
        return tokenizer_of(config, files, fetching=False)
    except ArtifactError:
        return None


def _model_told(config: RunConfig) -> Decoder | None:
    """The model that the config means, itself or by pretrained_model_dir; None: the checkpoint's.

    Raises ArtifactError where that folder is none of a model.
    """
    model, key = config.model_config(), "pretrained_model_dir"
    if model is not None or config.pretrained_model_dir in ("", config.checkpoint_source):
        return model
    folder = fetch(config.pretrained_model_dir, progress.note, key, weights=False)
    model = model_config_in(folder)
    if model is None:
        raise ArtifactError(
            f"{key}: {folder} has no config.json, which says what the model is",
            "give the folder as it comes from Hugging Face",
        )
    return model


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


def with_adapter(files: ModelFiles, config: AdapterOptions) -> ModelFiles:
    """The model with the adapter of adapter_path merged into it, where the config names one.

    Raises ConfigError where it leaves open which, ArtifactError where it does not fit the model.
    """
    if not config.adapter_path or files.adapter is not None:
        return files
    adapters = adapters_of(config, files.model)
    if len(adapters) != 1:
        raise ConfigError(
            f"adapter_path={config.adapter_path} lists {len(adapters)} adapters, one can be merged",
            f"adapter_id={next(iter(adapters))}",
        )
    (adapter,) = adapters.values()
    return _merged(files, adapter)


def adapters_of(
    config: AdapterOptions, model: Decoder, names: Sequence[str] | None = None
) -> dict[str, Adapter]:
    """The adapters of adapter_path that have these `names`; without any those that adapter_id
    names, all where it names none.

    Raises ArtifactError.
    """
    if names is None and config.adapter_id is not None:
        names = adapter_names(config.adapter_id)
    root = Path(config.adapter_root).expanduser() if config.adapter_root else None
    return open_adapters(Path(config.adapter_path).expanduser(), model, names, root=root)


def files_of(given: ExportedModel, config: RunConfig) -> ModelFiles:
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
    return ModelFiles(
        manifest.source, None, model, config.checkpoint_seed, given, quantization=held
    )


def tokenizer_of(config: RunConfig, files: ModelFiles, *, fetching: bool = True) -> Tokenizer:
    """The tokenizer that the config names, else the one beside the checkpoint, or in MindFormers'
    checkpoint_download, or that of the model's own source.

    Without `fetching`, only one that is here already or in the cache. Raises ArtifactError.
    """
    settings = config.processor.tokenizer
    vocab = files.model.vocab_size
    if named := config.tokenizer_source:
        file = "processor.tokenizer.tokenizer_file"
        key = file if settings.tokenizer_file else "pretrained_model_dir"
        return load_tokenizer(_source_of(named, key, fetching=fetching), model_vocab=vocab)
    given = files.given
    if given is not None and given.manifest.tokenizer:
        return load_tokenizer(given.folder, model_vocab=vocab)
    source = files.path if given is None else given.folder
    if settings.type == "ByteTokenizer" or source is None:
        return byte_tokenizer()
    place = _beside(source)
    if place.is_dir() and not holds_tokenizer(place):
        place = _tokenizer_elsewhere(config, source, fetching=fetching) or place
    return load_tokenizer(place, model_vocab=vocab)


def _source_of(uri: str, key: str, *, fetching: bool) -> Path:
    """Where what `uri` names lies, without its weights. Raises ArtifactError."""
    if fetching:
        return fetch(uri, progress.note, key, weights=False)
    path = held(uri, key)
    if path is None:
        raise ArtifactError(f"{key}: {uri}: not in the cache, and nothing is fetched")
    return path


def _beside(path: Path) -> Path:
    """Where a checkpoint has its tokenizer, if it has one: in its folder, or in the GGUF."""
    return path if path.suffix == ".gguf" and path.is_file() else folder_of(path)


def _tokenizer_elsewhere(config: RunConfig, checkpoint: Path, *, fetching: bool) -> Path | None:
    """The tokenizer of a checkpoint that has none beside it; None where there is no other place.

    Raises ArtifactError where the model's own source is not to be had.
    """
    place = _downloaded(config)
    own = config.model.model_config.checkpoint_name_or_path
    if own == config.checkpoint_source:  # the config took another for the model's own
        own = own_source(config.model_name)
    if place is None and own not in ("", RANDOM, config.checkpoint_source):
        try:
            place = _beside(_source_of(own, "load_checkpoint", fetching=fetching))
        except ArtifactError as error:
            raise ArtifactError(
                f"no tokenizer beside {checkpoint}, and the model's own source has none to be had: "
                f"{error.message}",
                "processor.tokenizer.tokenizer_file= names one, as does "
                f"{DOWNLOADS}/{config.model_name}/",
            ) from error
    if place is not None:
        progress.note(f"tokenizer: of {place}, since none lies beside {checkpoint}")
    return place


def _downloaded(config: RunConfig) -> Path | None:
    """The folder of the model or its family (llama2 of llama2_7b), with a tokenizer."""
    name = config.model_name
    folders = (Path(DOWNLOADS) / one for one in (name, name.partition("_")[0]))
    return next((folder for folder in folders if holds_tokenizer(folder)), None)


def files_beside(config: RunConfig, files: ModelFiles) -> dict[str, bytes]:
    """What the model's weights need beside them to be run, by the file's name: config.json, and
    the tokenizer's files.

    Those of a tokenizer that lie beside the source are copied as they are; for a GGUF, a
    tokenizer_file, or one of checkpoint_download they are made. Raises ArtifactError.
    """
    path, model = files.path, files.model
    named = bool(config.tokenizer_source)
    if path is None and not named:
        return config_file(model)
    if path is not None and not named and not _is_gguf(path) and not _only_downloaded(config, path):
        return {**copied_files(path), **config_file(model)}
    tokenizer = tokenizer_of(config, files)
    # Other files of a tokenizer would contradict these.
    found = {} if path is None else copied_files(path, without=TOKENIZER_FILES)
    found |= {name: text.encode() for name, text in tokenizer.files().items()}
    # config.json has room for all tokens that end a text, the tokenizer's files for one.
    model = dataclasses.replace(model, eos_token_id=end_tokens(model, tokenizer))
    return found | config_file(model)


def _only_downloaded(config: RunConfig, checkpoint: Path) -> bool:
    return not holds_tokenizer(_beside(checkpoint)) and _downloaded(config) is not None


def _is_gguf(path: Path) -> bool:
    return not rank_folders(path) and weights_file(path).suffix == ".gguf"


def end_tokens(model: Decoder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those that the model names, and the tokenizer's own."""
    return tuple(dict.fromkeys((*model.eos_token_id, *tokenizer.eos_token_ids)))


def _check_same_model(wanted: Decoder, own: Decoder, path: Path) -> None:
    differing = _differing(wanted, own, "the checkpoint", FREE_FIELDS)
    if differing:
        raise ArtifactError(
            f"{path} is another model than the config's: {differing}",
            "model=auto takes everything from the checkpoint",
        )


def _differing(wanted: Decoder, own: Decoder, owner: str, free: Set[str]) -> str:
    """What two models have not in common, "" where they are one."""
    asked, found = wanted.sizes(), own.sizes()
    names = architecture_of(own).names
    if names and names == architecture_of(wanted).names:
        # As what MindFormers calls a Llama: the tensors are the same, the rest is compared.
        free = {*free, "family"}
    return "; ".join(
        f"{name}: the config says {asked[name]}, {owner} {found[name]}"
        for name in asked
        if name not in free and asked[name] != found[name]
    )
