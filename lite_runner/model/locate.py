"""Locate the model of a run and its tokenizer: fetch them unless they are cached, read the sizes.

No weights are read, so that whatever is wrong with the files shows at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lite_runner import progress
from lite_runner.architectures import architecture_of
from lite_runner.architectures.quantization import OF_BLOCKS, Quantization
from lite_runner.architectures.settings import LearnedKeySettings, PetLoraSettings
from lite_runner.architectures.spec import Decoder
from lite_runner.config import raise_errors
from lite_runner.config.checks import unavailable
from lite_runner.config.groups import DOWNLOADS, download_folders, own_source
from lite_runner.config.sections import RANDOM, ModelSource, TokenizerSettings, TokenizerSource
from lite_runner.errors import ArtifactError, ConfigError, show
from lite_runner.model import ModelFiles
from lite_runner.system.files import read_small
from lite_runner.text import CHAT_FORMS, holds_tokenizer, load_tokenizer
from lite_runner.text.tokenizer import Tokenizer, byte_tokenizer
from lite_runner.weights.checkpoint import (
    check_file,
    config_folder,
    gguf_at,
    model_config_in,
    model_config_of,
    rank_folders,
    weights_file,
)
from lite_runner.weights.formats import TOKENIZER_FILES
from lite_runner.weights.formats.gguf_file import GGUFFile
from lite_runner.weights.source import cached, fetch, is_on_hub

if TYPE_CHECKING:
    from lite_runner.model.exported_model import ExportedModel


def locate(source: ModelSource, *, weights: bool = True) -> ModelFiles:
    """Fetch what a run names, unless it is here, and read the model's sizes.

    Without `weights`, which a tokenizer does not need, those on the hub are not fetched. Raises
    ArtifactError where the model cannot be had or is not the one that the run names.
    """
    if source.exported is not None:
        return _exported(source)
    model = _configured_model(source)
    if source.checkpoint == RANDOM:
        if model is None:
            raise ConfigError(
                "model=auto takes the model's sizes from its checkpoint, and "
                "load_checkpoint=random has none",
                "name a model (model=tiny_llama), or a checkpoint (load_checkpoint=DIR)",
            )
        return _with_own_adapter(not_here(source, model), source)
    key = "pretrained_model_dir" if source.checkpoint == source.folder else "load_checkpoint"
    path = fetch(source.checkpoint, key, weights=weights)
    # A folder from the hub without weights holds no checkpoint, which is not an error here.
    alone = not weights and is_on_hub(source.checkpoint) and path.is_dir()
    sharded = bool(rank_folders(path))
    gguf = None if alone or sharded else gguf_at(path)
    # A damaged file is reported before missing ones.
    packed = weights and not sharded and check_file(path)
    stored = model_config_in(path) if alone else model_config_of(path)
    if model is None:
        if stored is None:
            raise ArtifactError(
                f"{path}: holds no sizes of its model, which model=auto needs",
                "name the model, e.g. model=llama2_7b, or put its config.json beside the weights",
            )
        model = stored
    elif stored is not None:
        check_same_model(model, stored, path)
    if packed and source.quant in (None, "a16"):
        quantization = Quantization("a16")
    else:
        quantization = quantization_of(source, path, gguf)
    files = ModelFiles(
        source.checkpoint,
        path,
        model,
        source.seed,
        strategy=Path(source.strategy).expanduser() if source.strategy else None,
        auto_trans=source.auto_trans,
        quantization=quantization,
        gguf=gguf,
    )
    return _with_own_adapter(files, source) if weights else files


def _with_own_adapter(files: ModelFiles, source: ModelSource) -> ModelFiles:
    if source.pet is None:
        return files
    if isinstance(source.pet, LearnedKeySettings):
        from lite_runner.model.learned_keys import with_learned_keys  # not for other runs

        return with_learned_keys(files, source.pet)
    from lite_runner.model.adapters import with_pet_lora  # not for other runs

    return with_pet_lora(files, source.pet, source.adapters)


def locate_cached(source: ModelSource) -> ModelFiles:
    """As `locate`, but nothing is fetched: the path is None where something would be.

    Raises ArtifactError for a file that is missing from this machine, and for model=auto where the
    sizes are in what would be fetched.
    """
    if source.checkpoint == RANDOM or source.exported is not None:
        return locate(source)
    here = cached(source.checkpoint)
    key, folder = "pretrained_model_dir", source.folder
    if here is not None and (not folder or cached(folder, key, weights=False) is not None):
        return locate(dataclasses.replace(source, checkpoint=str(here)))
    if source.model is None:
        raise ArtifactError(
            f"{source.checkpoint}: not in the cache, and model=auto reads the model's sizes from"
            " it",
            "dry_run=true fetches nothing: name the model, or run without it once",
        )
    return not_here(source, source.model)


def not_here(source: ModelSource, model: Decoder) -> ModelFiles:
    """The files of a model whose weights are not on this machine, or random."""
    return ModelFiles(source.checkpoint, None, model, source.seed, quantization=source.quantization)


def locate_for_plan(source: ModelSource) -> ModelFiles:
    """The files of a run, an adapter of adapter_path not merged; with dry_run=true nothing is
    fetched. Raises ArtifactError, ConfigError."""
    named = source.adapters is not None and source.adapters.path  # a script may load weights later
    lora = isinstance(source.pet, PetLoraSettings)
    if lora and source.checkpoint == RANDOM and not named:
        raise ConfigError(
            "model.model_config.pet_config.pet_type=lora: random weights have no LoRA weights",
            "load_checkpoint= a checkpoint that holds them, or adapter_path= an adapter's folder",
        )
    return locate_cached(source) if source.dry_run else locate(source)


def _configured_model(source: ModelSource) -> Decoder | None:
    """The model that a run describes, or pretrained_model_dir; None: the checkpoint does.

    Raises ArtifactError where that folder has no config.json.
    """
    key = "pretrained_model_dir"
    if source.model is not None or source.folder in ("", source.checkpoint):
        return source.model
    folder = fetch(source.folder, key, weights=False)
    model = model_config_in(folder)
    if model is None:
        raise ArtifactError(
            f"{key}: {folder} has no config.json, which says what the model is",
            "give the folder as it comes from Hugging Face",
        )
    return model


def _exported(source: ModelSource) -> ModelFiles:
    """The files of an exported model, which takes the place of a checkpoint. Raises ArtifactError
    where it is another one than the run's."""
    from lite_runner.model.exported_model import exported_model

    exported = exported_model(source)
    assert exported is not None, "it is named"
    if source.named:
        progress.note(f"load_checkpoint: not read, the weights are in {exported.folder}")
    if source.quant not in (None, "none"):
        raise ArtifactError(
            f"{exported.folder}: its graphs compute with floats, this run asks for"
            f" quant={source.quant}",
            "leave quant= out, or run the checkpoint with backend=native",
        )
    model = _model_of_export(exported, source.model, source.name)
    return ModelFiles(exported.manifest.source, None, model, source.seed, exported)


# Fields that may differ from the checkpoint's: context length and special tokens.
TOKEN_FIELDS = {"bos_token_id", "eos_token_id", "pad_token_id"}
FREE_FIELDS = {"seq_length", "rope_scaling", *TOKEN_FIELDS}


def check_same_model(configured: Decoder, stored: Decoder, path: Path) -> None:
    """Raise ArtifactError where the checkpoint at `path` is not of the configured model."""
    differences = _differences(configured, stored, "the checkpoint", FREE_FIELDS)
    if differences:
        raise ArtifactError(
            f"{path} is another model than the config's: {differences}",
            "model=auto takes everything from the checkpoint",
        )


def quantization_of(source: ModelSource, path: Path, gguf: GGUFFile | None = None) -> Quantization:
    """Quantization of the weights in memory: the run's, or that of a quantized checkpoint.
    `gguf`: the file at `path`, if it is one.

    Raises ArtifactError where the two differ, ConfigError for what cannot be computed.
    """
    asked, manifest = source.quantization, None
    if gguf is not None and gguf.quantized and source.quant in (None, *OF_BLOCKS):
        return Quantization(source.quant or ("a16" if source.compared else "a8"))
    if source.quant in OF_BLOCKS:
        raise ArtifactError(
            f"{path}: quant={source.quant} computes with the blocks of a quantized GGUF file,"
            " which this is not",
            f"leave quant= out, or quant={source.quant}w8, which makes integers of the weights too",
        )
    if gguf is None:
        from lite_runner.weights.quantization.quantized_checkpoint import read_quantization

        manifest = read_quantization(path)
    if manifest is None:
        return asked
    manifest.check_files(path if path.is_dir() else path.parent)
    stored = manifest.quantization
    if source.quant is None:
        what = f"{path}: quant={stored}"
        raise_errors(unavailable(source.floats_only, what, "load_checkpoint"))
        return stored
    if asked.quant == stored.quant:
        group = stored.group if source.quant_group is None else asked.group
        asked = dataclasses.replace(asked, group=group, finer=stored.finer)
    if source.modules_to_not_convert is None:
        asked = dataclasses.replace(asked, kept=stored.kept)
    if asked.same_weights != stored.same_weights:
        raise ArtifactError(
            f"{path}: quantized as {stored}, this run asks for quant={asked}",
            f"leave quant= out, or give what it was made from: load_checkpoint={manifest.source}",
        )
    return asked


def _model_of_export(exported: ExportedModel, configured: Decoder | None, name: str) -> Decoder:
    """The model of an export, with the special tokens of the configured one and its own length.

    Raises ArtifactError where the config names another model.
    """
    manifest = exported.manifest
    if configured is None:
        return manifest.model
    free = {"seq_length", *TOKEN_FIELDS}
    differences = _differences(configured, manifest.model, "the export", free)
    if differences:
        raise ArtifactError(
            f"{exported.folder}: an export of {manifest.model_name}, another model than "
            f"{name}: {differences}",
            "leave model= out: the export says which it is",
        )
    if configured.seq_length != manifest.model.seq_length:
        progress.note(
            f"seq_length {manifest.model.seq_length}, as {exported.folder} was exported;"
            f" {name} has {configured.seq_length}"
        )
    tokens = {field: getattr(configured, field) for field in TOKEN_FIELDS}
    return dataclasses.replace(manifest.model, **tokens)


def _differences(configured: Decoder, stored: Decoder, owner: str, free: Set[str]) -> str:
    """The sizes in which two models differ, but for those that are `free`; "" where in none."""
    asked, found = configured.sizes(), stored.sizes()
    names = architecture_of(stored).names
    if names and names == architecture_of(configured).names:
        # Under MindFormers' name, Llama: the tensors are the same, and the rest is compared.
        free = {*free, "family"}
    return "; ".join(
        f"{name}: the config says {asked[name]}, {owner} {found[name]}"
        for name in asked
        if name not in free and asked[name] != found[name]
    )


def tokenizer_of(source: TokenizerSource, files: ModelFiles, *, fetching: bool = True) -> Tokenizer:
    """The tokenizer that a run names, else the one beside the checkpoint, or in MindFormers'
    checkpoint_download, or that of the model's own source; with the run's chat template.

    Without `fetching`, only one that is here already or in the cache. Raises ArtifactError.
    """
    tokenizer = _tokenizer_of(source, files, fetching=fetching)
    settings = source.settings
    changes: dict[str, Any] = {}
    if settings.chat_template:
        changes["chat_template"] = _template(settings.chat_template)
    if settings.type != "ByteTokenizer":  # it needs no files
        changes |= _changes(settings, tokenizer)
    if changes:
        tokenizer = tokenizer.with_special(**changes)
    tokenizer.special_in_messages = source.special_in_messages
    if (thinks := source.enable_thinking) is not None:
        from lite_runner.text.thinking import thinking_switch

        try:
            tokenizer.template_kwargs = thinking_switch(tokenizer.chat_template, thinks)
        except ConfigError as error:
            raise ConfigError(f"enable_thinking={show(thinks)}: {error.message}") from None
    return tokenizer


def _changes(settings: TokenizerSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """The settings of a config that differ from the tokenizer's files."""
    named = tokenizer.named_tokens()
    added = {"add_bos": settings.add_bos_token, "add_eos": settings.add_eos_token}
    changes: dict[str, Any] = {name: value for name, value in added.items() if value is not None}
    if settings.bos_token not in (None, named.get("bos_token")):
        changes["bos"] = settings.bos_token
    if settings.eos_token not in (None, named.get("eos_token")):
        changes["eos"] = (settings.eos_token,)
    if settings.add_prefix_space:
        changes["prefix_space"] = True
    if settings.additional_special_tokens:
        changes["more"] = settings.additional_special_tokens
    return changes


def _template(given: str) -> str:
    """A chat template: the text itself, or that of a file. Raises ArtifactError."""
    if "{" in given:
        return given
    try:
        return read_small(Path(given).expanduser(), "a chat template").decode()
    except (OSError, ValueError) as error:  # a NUL, or not UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArtifactError(
            f"processor.tokenizer.chat_template: {given}: {reason}",
            "a file with a Jinja template, or the template itself: '{{ messages[-1].content }}'",
        ) from error


def _tokenizer_of(source: TokenizerSource, files: ModelFiles, *, fetching: bool) -> Tokenizer:
    settings = source.settings
    load = partial(
        load_tokenizer,
        model_vocab=files.model.vocab_size,
        chat_form=CHAT_FORMS.get(settings.type),
        spelling=architecture_of(files.model).spelling,
    )
    if named := source.named:
        file = "processor.tokenizer.tokenizer_file"
        key = file if settings.tokenizer_file else "pretrained_model_dir"
        return load(_source_of(named, key, fetching=fetching))
    exported = files.exported
    if exported is not None and exported.manifest.tokenizer:
        return load(exported.folder)
    path = files.path if exported is None else exported.folder
    if settings.type == "ByteTokenizer" or path is None:
        return byte_tokenizer()
    place = tokenizer_place(path)
    if place.is_dir() and not holds_tokenizer(place):
        place = _tokenizer_elsewhere(source, path, fetching=fetching) or place
    return load(place)


def tokenizer_for_plan(
    source: TokenizerSource, files: ModelFiles, *, dry_run: bool
) -> Tokenizer | None:
    """The tokenizer of a run; with dry_run=true None where it would have to be fetched. Raises
    ArtifactError."""
    if not dry_run:
        return tokenizer_of(source, files)
    if not files.is_local:
        return None
    try:
        return tokenizer_of(source, files, fetching=False)
    except ArtifactError:
        return None


def end_tokens(model: Decoder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end a text: the model's, then the tokenizer's."""
    return tuple(dict.fromkeys((*model.eos_token_id, *tokenizer.eos_token_ids)))


def tokenizer_place(checkpoint: Path) -> Path:
    """The place of a checkpoint's tokenizer, if it has one: its folder, or the GGUF."""
    in_file = checkpoint.suffix == ".gguf" and checkpoint.is_file()
    return weights_file(checkpoint) if in_file else config_folder(checkpoint)


def downloaded_tokenizer(model_name: str) -> Path | None:
    """The folder of checkpoint_download with a tokenizer of the model, or of its family (llama2 of
    llama2_7b)."""
    folders = download_folders(model_name)
    return next((folder for folder in folders if holds_tokenizer(folder)), None)


def _source_of(uri: str, key: str, *, fetching: bool) -> Path:
    """The path of `uri`, fetched without its weights. Raises ArtifactError."""
    if fetching:
        return fetch(uri, key, weights=False)
    path = cached(uri, key, weights=False)
    if path is None:
        raise ArtifactError(f"{key}: {uri}: not in the cache, and nothing is fetched")
    return path


def _tokenizer_elsewhere(
    source: TokenizerSource, checkpoint: Path, *, fetching: bool
) -> Path | None:
    """The tokenizer for a checkpoint that has none beside it; None where there is no other place.

    Raises ArtifactError where the model's own source cannot be had.
    """
    place, own = downloaded_tokenizer(source.model_name), source.usual
    if own == source.checkpoint:  # the config overrides the model's own
        own = own_source(source.model_name)
    if place is None and own not in ("", RANDOM, source.checkpoint):
        try:
            place = tokenizer_place(_source_of(own, "load_checkpoint", fetching=fetching))
        except ArtifactError as error:
            raise ArtifactError(
                f"no tokenizer beside {checkpoint}, and none could be fetched from the model's"
                " own source: "
                f"{error.message}",
                "processor.tokenizer.tokenizer_file= names one, as does "
                f"{DOWNLOADS}/{source.model_name}/",
            ) from error
    if place is not None:
        progress.note(f"tokenizer: from {place}, since {checkpoint} has none")
    return place


def side_files(source: TokenizerSource, files: ModelFiles) -> dict[str, bytes]:
    """Files that weights need beside them, by name: config.json and the tokenizer's.

    A tokenizer beside the source is copied as it is; that of a GGUF, of tokenizer_file or of
    checkpoint_download is written anew. Raises ArtifactError.
    """
    from lite_runner.weights.write import config_file, copied_files  # imported only to write

    path, model = files.path, files.model
    name, named = source.model_name, bool(source.named)
    if path is None and not named:
        return config_file(model)
    if path is not None and not named and not _is_gguf(path) and not _only_downloaded(name, path):
        return {**copied_files(path), **config_file(model)}
    tokenizer = tokenizer_of(source, files)
    # Other tokenizer files would contradict these.
    found = {} if path is None else copied_files(path, without=TOKENIZER_FILES)
    found |= {name: text.encode() for name, text in tokenizer.files().items()}
    # config.json can list all end tokens, the tokenizer's files only one.
    model = dataclasses.replace(model, eos_token_id=end_tokens(model, tokenizer))
    return found | config_file(model)


def _only_downloaded(model_name: str, checkpoint: Path) -> bool:
    beside = holds_tokenizer(tokenizer_place(checkpoint))
    return not beside and downloaded_tokenizer(model_name) is not None


def _is_gguf(path: Path) -> bool:
    return not rank_folders(path) and weights_file(path).suffix == ".gguf"
