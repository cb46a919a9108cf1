"""What is written beside weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from lite_runner.config.schema import RunConfig
from lite_runner.model.locate import locate
from lite_runner.model.side_files import side_files
from tests.paths import REFERENCE
from tests.tiny_gguf import write_tiny_gguf

Configure = Callable[..., RunConfig]
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}


def test_random_weights_have_a_config_alone(configure: Configure) -> None:
    config = configure("model=tiny_llama", "load_checkpoint=random")
    assert side_files(config, locate(config)).keys() == {"config.json"}


def test_a_tokenizer_beside_the_source_is_copied(configure: Configure) -> None:
    shutil.copytree(REFERENCE / "llama", "model")
    Path("model/tokenizer.json").write_text("{}", encoding="utf-8")
    config = configure("model=auto", "load_checkpoint=model")
    found = side_files(config, locate(config))
    assert found.keys() == {"config.json", "tokenizer.json"} and found["tokenizer.json"] == b"{}"


def test_the_tokenizer_of_a_gguf_is_written_as_files(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    config = configure("model=auto", "load_checkpoint=model.gguf")
    found = side_files(config, locate(config))
    assert found.keys() == {"config.json"} | TOKENIZER
    assert json.loads(found["config.json"])["eos_token_id"] == [257, 259, 260]


def test_a_named_tokenizer_replaces_the_one_beside_the_source(configure: Configure) -> None:
    shutil.copytree(REFERENCE / "qwen2", "model")
    Path("model/vocab.json").write_text("{}", encoding="utf-8")
    write_tiny_gguf(Path("named.gguf"))
    named = "processor.tokenizer.tokenizer_file=named.gguf"
    config = configure("model=tiny_llama", "load_checkpoint=random", named)
    assert side_files(config, locate(config)).keys() == {"config.json"} | TOKENIZER
