"""The small files that are written beside a model's weights: config.json and the tokenizer's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lite_runner.config.schema import RunConfig
from lite_runner.model.files import ModelFiles
from lite_runner.model.tokenizer import (
    downloaded_tokenizer,
    end_tokens,
    tokenizer_of,
    tokenizer_place,
)
from lite_runner.text.loading import holds_tokenizer
from lite_runner.weights.checkpoint import weights_file
from lite_runner.weights.formats.hugging_face import TOKENIZER_FILES
from lite_runner.weights.sharding.shard_manifest import rank_folders
from lite_runner.weights.write import config_file, copied_files


def side_files(config: RunConfig, files: ModelFiles) -> dict[str, bytes]:
    """Files that weights need beside them, by name: config.json and the tokenizer's.

    A tokenizer beside the source is copied as it is; that of a GGUF, of tokenizer_file or of
    checkpoint_download is written anew. Raises ArtifactError.
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
    beside = holds_tokenizer(tokenizer_place(checkpoint))
    return not beside and downloaded_tokenizer(config) is not None


def _is_gguf(path: Path) -> bool:
    return not rank_folders(path) and weights_file(path).suffix == ".gguf"
