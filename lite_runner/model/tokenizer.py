"""The tokenizer of a run, named or of its checkpoint, and the files written beside weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.config.groups import DOWNLOADS, download_folders, own_source
from lite_runner.config.sections import RANDOM, TokenizerSettings, TokenizerSource
from lite_runner.errors import ArtifactError, ConfigError, show
from lite_runner.model import ModelFiles
from lite_runner.system.files import read_small
from lite_runner.text import CHAT_FORMS, holds_tokenizer, load_tokenizer
from lite_runner.text.tokenizer import Tokenizer, byte_tokenizer
from lite_runner.weights.checkpoint import config_folder, rank_folders, weights_file
from lite_runner.weights.formats import TOKENIZER_FILES
from lite_runner.weights.source import cached, fetch


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
    if settings.type != "ByteTokenizer":  # it has tokens of its own
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
    except (OSError, ValueError) as error:  # a NUL, not UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArtifactError(
            f"processor.tokenizer.chat_template: {given}: {reason}",
            "a file with a Jinja template, or the template itself: '{{ messages[-1].content }}'",
        ) from error


def _tokenizer_of(source: TokenizerSource, files: ModelFiles, *, fetching: bool) -> Tokenizer:
    settings = source.settings
    vocab, form = files.model.vocab_size, CHAT_FORMS.get(settings.type)
    if named := source.named:
        file = "processor.tokenizer.tokenizer_file"
        key = file if settings.tokenizer_file else "pretrained_model_dir"
        return load_tokenizer(
            _source_of(named, key, fetching=fetching), model_vocab=vocab, chat_form=form
        )
    exported = files.exported
    if exported is not None and exported.manifest.tokenizer:
        return load_tokenizer(exported.folder, model_vocab=vocab, chat_form=form)
    path = files.path if exported is None else exported.folder
    if settings.type == "ByteTokenizer" or path is None:
        return byte_tokenizer()
    place = tokenizer_place(path)
    if place.is_dir() and not holds_tokenizer(place):
        place = _tokenizer_elsewhere(source, path, fetching=fetching) or place
    return load_tokenizer(place, model_vocab=vocab, chat_form=form)


def tokenizer_for_plan(
    source: TokenizerSource, files: ModelFiles, *, dry_run: bool
) -> Tokenizer | None:
    """The tokenizer of a run; with dry_run=true None where it would have to be fetched. Raises
    ArtifactError."""
    if not dry_run:
        return tokenizer_of(source, files)
    if not files.is_here:
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
    if own == source.checkpoint:  # the config replaced the model's own
        own = own_source(source.model_name)
    if place is None and own not in ("", RANDOM, source.checkpoint):
        try:
            place = tokenizer_place(_source_of(own, "load_checkpoint", fetching=fetching))
        except ArtifactError as error:
            raise ArtifactError(
                f"no tokenizer beside {checkpoint}, and the model's own source has none to be had: "
                f"{error.message}",
                "processor.tokenizer.tokenizer_file= names one, as does "
                f"{DOWNLOADS}/{source.model_name}/",
            ) from error
    if place is not None:
        progress.note(f"tokenizer: of {place}, since none lies beside {checkpoint}")
    return place


def side_files(source: TokenizerSource, files: ModelFiles) -> dict[str, bytes]:
    """Files that weights need beside them, by name: config.json and the tokenizer's.

    A tokenizer beside the source is copied as it is; that of a GGUF, of tokenizer_file or of
    checkpoint_download is written anew. Raises ArtifactError.
    """
    from lite_runner.weights.write import config_file, copied_files  # not for those who only read

    path, model = files.path, files.model
    name, named = source.model_name, bool(source.named)
    if path is None and not named:
        return config_file(model)
    if path is not None and not named and not _is_gguf(path) and not _only_downloaded(name, path):
        return {**copied_files(path), **config_file(model)}
    tokenizer = tokenizer_of(source, files)
    # Other files of a tokenizer would contradict these.
    found = {} if path is None else copied_files(path, without=TOKENIZER_FILES)
    found |= {name: text.encode() for name, text in tokenizer.files().items()}
    # config.json has room for all tokens that end a text, the tokenizer's files for one.
    model = dataclasses.replace(model, eos_token_id=end_tokens(model, tokenizer))
    return found | config_file(model)


def _only_downloaded(model_name: str, checkpoint: Path) -> bool:
    beside = holds_tokenizer(tokenizer_place(checkpoint))
    return not beside and downloaded_tokenizer(model_name) is not None


def _is_gguf(path: Path) -> bool:
    return not rank_folders(path) and weights_file(path).suffix == ".gguf"
