"""Draft models: their files, and a check that their vocabulary is the model's."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from lite_runner.architectures import model_of
from lite_runner.config import Invalid, raise_errors, read
from lite_runner.config.groups import compose_groups, from_chosen_hub, options_of
from lite_runner.config.sections import Model, ModelSource
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate_for_plan, tokenizer_place
from lite_runner.text import holds_tokenizer, load_tokenizer
from lite_runner.text.tokenizer import Tokenizer


def draft_files(name: str, source: ModelSource) -> ModelFiles:
    """The files of the draft model of a run: a model of conf/model, or a path or source of weights,
    which are computed as they are stored. Raises ConfigError, ArtifactError."""
    checkpoint, model = name, None
    if name in options_of("model"):
        errors: list[Invalid] = []
        found: Model = read(compose_groups({"model": name})["model"], Model, "model", errors)
        raise_errors(errors)
        checkpoint = from_chosen_hub(found.model_config.checkpoint_name_or_path)
        model = model_of(found.model_config)
    source = replace(
        source,
        checkpoint=checkpoint,
        named=True,
        folder="",
        name=name,
        model=model,
        quant=None,
        quant_group=None,
        modules_to_not_convert=None,
        strategy="",
        auto_trans=False,
        pet=None,
        adapters=None,
        exported=None,
    )
    try:
        return locate_for_plan(source)
    except ArtifactError as error:
        raise ArtifactError(
            f"draft_model={name}: {error.message}",
            "draft_model= the name of a model, a folder or a file of weights, or hf://OWNER/NAME",
        ) from error


def check_vocabulary(draft: ModelFiles, files: ModelFiles, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError unless a token of a draft model is that of the model, where the files tell,
    else unless there are as many."""
    if draft.path is not None and draft.path == files.path:
        return
    sizes = draft.model.vocab_size, files.model.vocab_size
    own = None if draft.path is None or tokenizer is None else _vocabulary(draft.path)
    found = ""
    if own is None or tokenizer is None:
        if sizes[0] != sizes[1]:
            found = f"{sizes[0]} tokens, expected {sizes[1]}"
    elif others := [
        (id, token) for token, id in tokenizer.vocabulary().items() if own.get(id, token) != token
    ]:
        id, token = min(others)
        found = f"token {id} is {own[id]!r}, expected {token!r} as in {tokenizer.source}"
    if found:
        raise ConfigError(
            f"draft_model: {draft.source} has another vocabulary: {found}",
            "draft_model= a smaller model of the same family",
        )


@lru_cache(maxsize=1)
def _vocabulary(checkpoint: Path) -> dict[int, str] | None:
    """The tokens of a checkpoint by id; None without a tokenizer beside it."""
    place = tokenizer_place(checkpoint)
    if place.is_dir() and not holds_tokenizer(place):
        return None
    tokens = load_tokenizer(place, model_vocab=None).vocabulary()
    return {id: token for token, id in tokens.items()}
