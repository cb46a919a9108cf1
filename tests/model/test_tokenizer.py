"""Where the tokenizer of a run comes from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError
from lite_runner.model.locate import locate, locate_cached
from lite_runner.model.tokenizer import end_tokens, tokenizer_for_plan, tokenizer_of
from lite_runner.text.tokenizer import byte_tokenizer
from tests.paths import REFERENCE
from tests.tiny_gguf import write_tiny_gguf

Configure = Callable[..., RunConfig]
GGUF = ["model=auto", "load_checkpoint=model.gguf"]
RANDOM = ["model=tiny_llama", "load_checkpoint=random"]


def test_a_gguf_has_its_own(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    config = configure(*GGUF)
    tokenizer = tokenizer_of(config, locate(config))
    assert tokenizer.source == "model.gguf" and len(tokenizer.encode("the")) == 2


def test_random_weights_have_the_byte_tokenizer(configure: Configure) -> None:
    config = configure(*RANDOM)
    assert tokenizer_of(config, locate(config)).files() == byte_tokenizer().files()


def test_the_one_that_is_named_comes_first(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    config = configure(
        "model=tiny_llama",
        "load_checkpoint=random",
        "processor.tokenizer.tokenizer_file=model.gguf",
    )
    assert tokenizer_of(config, locate(config)).source == "model.gguf"


def test_checkpoint_download_stands_in_for_a_folder_without_one(configure: Configure) -> None:
    shutil.copytree(REFERENCE / "llama", "model")
    config = configure("model=auto", "load_checkpoint=model")
    files = locate(config)
    with pytest.raises(ArtifactError, match="no tokenizer in model"):
        tokenizer_of(config, files)
    assert tokenizer_for_plan(replace(config, dry_run=True), files) is None
    folder = Path("checkpoint_download") / config.trainer.model_name
    folder.mkdir(parents=True)
    write_tiny_gguf(folder / "tokenizer.gguf")
    with pytest.raises(ArtifactError, match="the model's vocabulary"):  # a larger one is refused
        tokenizer_of(config, files)


def test_a_plan_does_without_one_that_would_be_fetched(configure: Configure) -> None:
    config = configure("model=tiny_llama", "load_checkpoint=hf://someone/model", "dry_run=true")
    assert tokenizer_for_plan(config, locate_cached(config)) is None


def test_texts_end_with_the_models_tokens_and_the_tokenizers(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    config = configure(*GGUF)
    files = locate(config)
    tokenizer = tokenizer_of(config, files)
    model = replace(files.model, eos_token_id=(5, 257))
    assert end_tokens(model, tokenizer) == (5, 257, 259, 260)
