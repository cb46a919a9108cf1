"""Where the tokenizer of a run comes from, and what is written beside weights."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import tokenizer
from lite_runner.model.locate import locate, locate_cached
from lite_runner.model.tokenizer import end_tokens, side_files, tokenizer_for_plan, tokenizer_of
from lite_runner.text.tokenizer import byte_tokenizer
from tests.paths import REFERENCE, ROOT
from tests.tiny_gguf import write_tiny_gguf

Configure = Callable[..., RunConfig]
GGUF = ["model=auto", "load_checkpoint=model.gguf"]
RANDOM = ["model=tiny_llama", "load_checkpoint=random"]
BOOLS = (True, False)


def test_a_gguf_has_its_own(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    config = configure(*GGUF)
    tokenizer = tokenizer_of(config.tokenizer, locate(config.source))
    assert tokenizer.source == "model.gguf" and len(tokenizer.encode("the")) == 2


def test_random_weights_have_the_byte_tokenizer(configure: Configure) -> None:
    config = configure(*RANDOM)
    assert tokenizer_of(config.tokenizer, locate(config.source)).files() == byte_tokenizer().files()


def test_the_one_that_is_named_comes_first(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    config = configure(
        "model=tiny_llama",
        "load_checkpoint=random",
        "processor.tokenizer.tokenizer_file=model.gguf",
    )
    assert tokenizer_of(config.tokenizer, locate(config.source)).source == "model.gguf"


def test_checkpoint_download_stands_in_for_a_folder_without_one(configure: Configure) -> None:
    shutil.copytree(REFERENCE / "llama", "model")
    config = configure("model=auto", "load_checkpoint=model")
    files = locate(config.source)
    with pytest.raises(ArtifactError, match="no tokenizer in model"):
        tokenizer_of(config.tokenizer, files)
    assert tokenizer_for_plan(config.tokenizer, files, dry_run=True) is None
    folder = Path("checkpoint_download") / config.trainer.model_name
    folder.mkdir(parents=True)
    write_tiny_gguf(folder / "tokenizer.gguf")
    with pytest.raises(ArtifactError, match="the model's vocabulary"):  # a larger one is refused
        tokenizer_of(config.tokenizer, files)


def test_a_plan_does_without_one_that_would_be_fetched(configure: Configure) -> None:
    config = configure("model=tiny_llama", "load_checkpoint=hf://someone/model", "dry_run=true")
    assert tokenizer_for_plan(config.tokenizer, locate_cached(config.source), dry_run=True) is None


def test_texts_end_with_the_models_tokens_and_the_tokenizers(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    config = configure(*GGUF)
    files = locate(config.source)
    tokenizer = tokenizer_of(config.tokenizer, files)
    model = replace(files.model, eos_token_id=(5, 257))
    assert end_tokens(model, tokenizer) == (5, 257, 259, 260)


BELLE = "Human: {{ messages[-1].content }} \n\nAssistant:"


SWITCH = "{% if enable_thinking is false %}<think></think>{% endif %}"


@pytest.mark.parametrize("run_mode", ["predict predict_data=x chat=true", "chat", "serve"])
def test_thinking_is_switched_where_that_is_typed(configure: Configure, run_mode: str) -> None:
    mode = f"run_mode={run_mode}".split()

    def rendered(template: str, *typed: str) -> str:
        given = f"processor.tokenizer.chat_template={template}"
        config = configure(*RANDOM, *mode, given, *typed)
        tokenizer = tokenizer_of(config.tokenizer, locate(config.source))
        return tokenizer.render_chat([{"role": "user", "content": "x"}])

    assert rendered(SWITCH) == rendered(SWITCH, "enable_thinking=true") == ""
    assert rendered(SWITCH, "enable_thinking=false") == "<think></think>"
    assert rendered("{{ 1 }}", "enable_thinking=false") == "1"
    with pytest.raises(ConfigError, match="enable_thinking=true: the model does not think"):
        rendered("{{ 1 }}", "enable_thinking=true")
    with pytest.raises(ConfigError, match="enable_thinking=false: the model thinks, and its chat"):
        rendered("{# </think> #}", "enable_thinking=false")


@pytest.mark.parametrize("given", [BELLE, "belle.jinja"])
def test_a_chat_template_that_is_named_comes_first(configure: Configure, given: str) -> None:
    Path("belle.jinja").write_text(BELLE, encoding="utf-8")
    settings = {"processor": {"tokenizer": {"chat_template": given}}}
    Path("belle.yaml").write_text(json.dumps(settings), encoding="utf-8")
    config = configure(*RANDOM, "--config", "belle.yaml")
    tokenizer = tokenizer_of(config.tokenizer, locate(config.source))
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(chat) == "Human: Hi \n\nAssistant:"


def test_a_chat_template_that_is_not_there(configure: Configure) -> None:
    config = configure(*RANDOM, "processor.tokenizer.chat_template=belle.jinja")
    with pytest.raises(ArtifactError, match=r"chat_template: belle\.jinja: No such file"):
        tokenizer_of(config.tokenizer, locate(config.source))


def test_the_tokens_of_a_config_are_laid_over_the_files(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))

    def ids(*settings: str) -> list[int]:
        config = configure(*GGUF, *(f"processor.tokenizer.{one}" for one in settings))
        return tokenizer_of(config.tokenizer, locate(config.source)).encode("the")

    files = tokenizer_of(configure(*GGUF).tokenizer, locate(configure(*GGUF).source))
    text, bos = files.encode("the", add_special_tokens=False), files.bos_token_id
    eos = files.eos_token_ids[0]
    assert bos is not None
    assert ids("add_bos_token=true") == [bos, *text]
    assert ids("add_bos_token=false") == text
    assert ids("add_bos_token=false", "add_eos_token=true") == [*text, eos]
    assert ids("add_eos_token=true") == [*ids(), eos]  # bos as the files say
    other = files.token_of(text[0])
    assert ids("add_bos_token=true", f"bos_token={other}") == [text[0], *text]
    prefixed = files.encode(" the", add_special_tokens=False)
    assert ids("add_bos_token=false", "add_prefix_space=true") == prefixed
    with pytest.raises(ArtifactError, match="'<none>' is not in the vocabulary"):
        ids("eos_token=<none>")
    config = configure(*GGUF, f"processor.tokenizer.additional_special_tokens=[{other}]")
    special = tokenizer_of(config.tokenizer, locate(config.source))
    assert text[0] in special.special_ids and special.decode(text) != files.decode(text)


TEXTS = ["the of and to in a is that for it was on are as with his they at be this have from"] * 30
FROM_MINDFORMERS = """
import json, sys

sys.path.insert(0, sys.argv[1])
from worker import import_mindspore

import_mindspore("CPU")
from mindformers.models.llama.llama_tokenizer import LlamaTokenizer

given = json.load(sys.stdin)
ids = [
    [LlamaTokenizer("tokenizer.model", **keys)(text)["input_ids"] for text in given["texts"]]
    for keys in given["keys"]
]
print("ids", json.dumps(ids))
"""


def test_token_ids_are_those_of_the_real_mindformers(
    configure: Configure, mindformers_python: Path
) -> None:
    """Each key of a LlamaTokenizer that changes them, where a yaml has it and where none does."""
    with Path("tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(TEXTS),
            model_writer=file,
            model_type="bpe",
            vocab_size=300,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    keys: list[dict[str, Any]] = [
        *({"add_bos_token": bos, "add_eos_token": eos} for bos in BOOLS for eos in BOOLS),
        {},
        {"add_eos_token": True},
        {"add_bos_token": False, "bos_token": "a", "eos_token": "e"},
        {"add_eos_token": True, "bos_token": "</s>", "eos_token": "<s>"},
    ]
    texts = ["the of and", "", " the", "of  and", "word\nthe", "the</s> of", "<s>the"]
    done = subprocess.run(
        [mindformers_python, "-c", FROM_MINDFORMERS, ROOT / "lite_runner/backends/mindformers"],
        input=json.dumps({"keys": keys, "texts": texts}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.rpartition("ids ")[2])
    for given, theirs in zip(keys, expected, strict=True):
        raw = {
            "trainer": {"model_name": "llama2_7b"},
            "model": {"model_config": {"type": "LlamaConfig", "vocab_size": 300}},
            "processor": {
                "tokenizer": {"type": "LlamaTokenizer", "vocab_file": "tokenizer.model", **given}
            },
        }
        Path("llama.yaml").write_text(json.dumps(raw), encoding="utf-8")
        config = configure("--config", "llama.yaml", "load_checkpoint=random")
        tokenizer = tokenizer_of(config.tokenizer, locate(config.source))
        for text, ids in zip(texts, theirs, strict=True):
            if given.get("bos_token") != "a" or "<" not in text:  # <s> is three letters then
                assert tokenizer.encode(text) == ids, (given, text)


@pytest.mark.parametrize("run_mode", ["predict predict_data=x", "chat", "serve"])
def test_special_tokens_of_a_message_are_text_where_that_is_typed(
    configure: Configure, run_mode: str
) -> None:
    given = ["processor.tokenizer.chat_template={{ messages[0].content }}"]
    for typed, expected in (("true", [257]), ("false", [*b"</s>"])):
        mode = [*f"run_mode={run_mode}".split(), f"special_tokens_in_text={typed}"]
        config = configure(*RANDOM, *mode, *given)
        tokenizer = tokenizer_of(config.tokenizer, locate(config.source))
        assert tokenizer.encode_chat([{"role": "user", "content": "</s>"}]) == expected
        assert tokenizer.encode("</s>") == [257]  # no message


TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}


def test_random_weights_have_a_config_alone(configure: Configure) -> None:
    config = configure("model=tiny_llama", "load_checkpoint=random")
    assert side_files(config.tokenizer, locate(config.source)).keys() == {"config.json"}


def test_a_tokenizer_beside_the_source_is_copied(configure: Configure) -> None:
    shutil.copytree(REFERENCE / "llama", "model")
    Path("model/tokenizer.json").write_text("{}", encoding="utf-8")
    config = configure("model=auto", "load_checkpoint=model")
    found = side_files(config.tokenizer, locate(config.source))
    assert found.keys() == {"config.json", "tokenizer.json"} and found["tokenizer.json"] == b"{}"


def test_the_tokenizer_of_a_gguf_is_written_as_files(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    config = configure("model=auto", "load_checkpoint=model.gguf")
    found = side_files(config.tokenizer, locate(config.source))
    assert found.keys() == {"config.json"} | TOKENIZER_FILES
    assert json.loads(found["config.json"])["eos_token_id"] == [257, 259, 260]


def test_a_named_tokenizer_replaces_the_one_beside_the_source(configure: Configure) -> None:
    shutil.copytree(REFERENCE / "qwen2", "model")
    Path("model/vocab.json").write_text("{}", encoding="utf-8")
    write_tiny_gguf(Path("named.gguf"))
    named = "processor.tokenizer.tokenizer_file=named.gguf"
    config = configure("model=tiny_llama", "load_checkpoint=random", named)
    assert (
        side_files(config.tokenizer, locate(config.source)).keys()
        == {"config.json"} | TOKENIZER_FILES
    )


def test_a_dry_run_fetches_none(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(*_: object, **__: object) -> Path:
        raise AssertionError

    monkeypatch.setattr(tokenizer, "fetch", fetched)
    config = configure(
        *RANDOM, "processor.tokenizer.tokenizer_file=hf://some/model", "dry_run=true"
    )
    assert tokenizer_for_plan(config.tokenizer, locate(config.source), dry_run=True) is None
