"""Locating the model and the tokenizer that a config names, without needless fetches or writes."""

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

from lite_runner.app import main
from lite_runner.architectures.quantization import Quantization
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model import locate as locate_module
from lite_runner.model.locate import (
    check_same_model,
    end_tokens,
    locate,
    locate_cached,
    locate_for_plan,
    quantization_of,
    side_files,
    tokenizer_for_plan,
    tokenizer_of,
)
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.weights.formats import gguf_file
from lite_runner.weights.repository import Repository
from tests.models import model_named, reference_model
from tests.packed_folders import write_folder
from tests.paths import REFERENCE, ROOT
from tests.tiny_gguf import write_tiny_gguf

Configure = Callable[..., RunConfig]
HUB = "load_checkpoint=hf://someone/model"
LLAMA = f"load_checkpoint={REFERENCE / 'llama'}"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("something is fetched")

    monkeypatch.setattr(Repository, "fetch", fail)


def test_the_sizes_are_the_checkpoints(configure: Configure) -> None:
    files = locate(configure("model=auto", LLAMA).source)
    assert (files.path, files.model) == (REFERENCE / "llama", reference_model("llama"))


def test_random_weights_need_a_named_model(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="name a model"):
        locate(replace(configure("model=auto", LLAMA), load_checkpoint="random").source)


def test_another_model_than_the_checkpoint_is_refused(configure: Configure) -> None:
    with pytest.raises(ArtifactError, match="num_layers: the config says"):
        locate(configure("model=llama2_7b", LLAMA).source)


def test_a_checkpoint_without_sizes_needs_a_named_model(configure: Configure) -> None:
    Path("model").mkdir()
    shutil.copy(REFERENCE / "llama/model.safetensors", "model")
    with pytest.raises(ArtifactError, match=r"^model: holds no sizes of its model"):
        locate(configure("model=auto", "load_checkpoint=model").source)


@pytest.mark.usefixtures("no_network")
def test_an_uncached_source_has_no_path(configure: Configure) -> None:
    files = locate_cached(configure("model=tiny_llama", HUB).source)
    assert files.path is None and not files.is_local
    assert files.location() == "hf://someone/model: would be fetched"
    assert locate_for_plan(configure("model=tiny_llama", HUB, "dry_run=true").source) == files
    with pytest.raises(ArtifactError, match="not in the cache"):
        locate_cached(configure("model=auto", HUB).source)


@pytest.mark.usefixtures("no_network")
def test_a_cached_source_is_located_without_the_network(configure: Configure) -> None:
    config = configure("model=auto", LLAMA)
    assert locate_cached(config.source) == locate(config.source) == locate_for_plan(config.source)


@pytest.fixture
def from_hub(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that hf://someone/model comes to: a config.json, and maybe what a test adds."""
    folder = Path("snapshot")
    folder.mkdir()
    shutil.copy(REFERENCE / "llama/config.json", folder)
    monkeypatch.setattr(Repository, "fetch", lambda self, **options: folder)
    return folder


def test_without_weights_a_folder_from_the_hub_needs_none(
    configure: Configure, from_hub: Path
) -> None:
    files = locate(configure("model=auto", HUB).source, weights=False)
    assert (files.path, files.model, files.gguf) == (from_hub, reference_model("llama"), None)
    with pytest.raises(ArtifactError, match="snapshot"):
        locate(configure("model=auto", HUB).source)


def test_with_weights_a_folder_from_the_hub_is_read_as_another(
    configure: Configure, from_hub: Path
) -> None:
    """The sizes of a GGUF are in it; config.json is of the weights that are not there."""
    (from_hub / "config.json").unlink()
    write_tiny_gguf(from_hub / "model.gguf")
    files = locate(configure("model=auto", HUB).source)
    assert files.gguf is not None and files.model == locate_at(configure, from_hub).model


def locate_at(configure: Configure, path: Path, **options: bool) -> ModelFiles:
    return locate(configure("model=auto", f"load_checkpoint={path}").source, **options)


def test_without_weights_a_file_here_says_the_sizes(configure: Configure) -> None:
    write_tiny_gguf(Path("model.gguf"))
    files = locate_at(configure, Path("model.gguf"), weights=False)
    assert files.gguf is not None and files.model == locate_at(configure, Path("model.gguf")).model


def test_a_damaged_file_is_reported_when_weights_are_needed(configure: Configure) -> None:
    Path("model").mkdir()
    shutil.copy(REFERENCE / "llama/config.json", "model")
    Path("model/model.safetensors").write_bytes(bytes(7))
    assert locate_at(configure, Path("model"), weights=False).path == Path("model")
    with pytest.raises(ArtifactError, match=r"^model/model.safetensors: "):
        locate_at(configure, Path("model"))
    Path("model/config.json").unlink()  # what is missing beside it is not what is wrong
    with pytest.raises(ArtifactError, match=r"^model/model.safetensors: "):
        locate_at(configure, Path("model"))


def test_the_key_of_a_missing_source_is_named(configure: Configure) -> None:
    for key in ("load_checkpoint", "pretrained_model_dir"):
        Path("gone").mkdir()
        config = configure("model=tiny_llama", f"{key}=gone")
        Path("gone").rmdir()
        with pytest.raises(ArtifactError, match=rf"^{key}: .*gone"):
            locate(config.source)


def test_reading_shards_follows_the_config(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = locate(configure("model=auto", LLAMA).source)
    assert plain.strategy is None and not plain.auto_trans
    assert locate(configure("model=auto", LLAMA, "auto_trans_ckpt=true").source).auto_trans
    monkeypatch.setenv("HOME", str(Path.cwd()))
    Path("strategy").mkdir()
    strategy = "src_strategy_path_or_dir=~/strategy"
    found = locate(configure("model=auto", LLAMA, strategy, "auto_trans_ckpt=true").source)
    assert found.strategy == Path.cwd() / "strategy"


def test_a_sharded_checkpoint_is_located_without_its_files(configure: Configure) -> None:
    """Each rank opens its own; with the sizes in a manifest no file of weights is."""
    words = ("run_mode=shard", "model=auto", LLAMA, "parallel=tp2", "shard_output=cut")
    assert main([*words, "verbosity=0"]) == 0
    files = locate_at(configure, Path("cut"))
    assert files.gguf is None and files.model == reference_model("llama")


def test_an_adapter_is_merged_into_weights_only(configure: Configure) -> None:
    pet = "{pet_type: lora, lora_rank: 8, lora_alpha: 16, target_modules: .*wq}"
    config = configure("model=auto", LLAMA, f"model.model_config.pet_config={pet}")
    assert locate(config.source, weights=False).adapter is None
    with pytest.raises(ArtifactError, match="holds no LoRA weights"):
        locate(config.source)


@pytest.mark.parametrize(
    "line",
    [
        ["predict_data=the end"],
        ["predict_data=the end", "context.cache=false"],
        ["predict_data=the end", "quant=a16w8"],
        ["predict_data=the end", "dry_run=true"],
        ["run_mode=convert", "convert_format=huggingface", "convert_output=hf"],
        ["run_mode=convert", "convert_output=x.ckpt", "convert_format=ckpt", "dry_run=true"],
        ["run_mode=quantize", "quant=a16w8", "quantize_output=q"],
        ["run_mode=shard", "parallel=tp2", "shard_output=ranks"],
        ["run_mode=eval", "eval_data=text.txt"],
    ],
    ids=" ".join,
)
def test_the_header_of_a_gguf_is_parsed_once_in_a_run(
    line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(Path("model.gguf"))
    Path("text.txt").write_text("the end of the text", encoding="utf-8")
    parsed, header = [], gguf_file._Reader.header

    def counted(reader: gguf_file._Reader) -> gguf_file.GGUFHeader:
        parsed.append(reader._path)
        return header(reader)

    monkeypatch.setattr(gguf_file._Reader, "header", counted)
    assert main(["verbosity=0", "model=auto", "load_checkpoint=model.gguf", *line]) == 0
    assert parsed == [Path("model.gguf")]


def test_context_and_special_tokens_are_the_runs_to_choose() -> None:
    model = model_named("tiny_llama")
    check_same_model(replace(model, seq_length=7, eos_token_id=(5,)), model, Path("x"))
    with pytest.raises(ArtifactError, match=r"^x is another model than the config's: .*vocab_size"):
        check_same_model(model, reference_model("llama"), Path("x"))


def test_a_quantized_checkpoint_says_how(configure: Configure) -> None:
    line = ["model=tiny_llama", "load_checkpoint=random"]
    assert main(["run_mode=quantize", *line, "quant=a16w4", "quantize_output=q"]) == 0
    stored = quantization_of(configure("model=tiny_llama").source, Path("q"))
    assert (stored.quant, stored.group) == ("a16w4", 32)
    same = configure("model=tiny_llama", "quant=a16w4")
    assert quantization_of(same.source, Path("q")) == stored
    with pytest.raises(ArtifactError, match=r"leave quant= out, or give .*load_checkpoint=random"):
        quantization_of(configure("model=tiny_llama", "quant=a16w8").source, Path("q"))
    Path("plain").mkdir()
    assert quantization_of(same.source, Path("plain")) == same.quantization


def test_a_folder_of_another_tool_takes_the_word_that_its_results_have(
    configure: Configure,
) -> None:
    write_folder(Path("gptq"), "gptq 4 bits")
    for quant in ([], ["quant=a16"]):
        config = configure("model=auto", "load_checkpoint=gptq", *quant)
        assert locate(config.source).quantization == Quantization("a16")
    with pytest.raises(
        ArtifactError, match="quant=a8 computes with the blocks of a quantized GGUF"
    ):
        locate(configure("model=auto", "load_checkpoint=gptq", "quant=a8").source)


def test_a_pretrained_folder_without_a_config_is_named(configure: Configure) -> None:
    Path("empty").mkdir()
    given = ("model=auto", f"load_checkpoint={REFERENCE / 'llama'}", "pretrained_model_dir=empty")
    with pytest.raises(ArtifactError, match=r"pretrained_model_dir: empty has no config\.json"):
        locate(configure(*given).source)


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

    monkeypatch.setattr(locate_module, "fetch", fetched)
    config = configure(
        *RANDOM, "processor.tokenizer.tokenizer_file=hf://some/model", "dry_run=true"
    )
    assert tokenizer_for_plan(config.tokenizer, locate(config.source), dry_run=True) is None
