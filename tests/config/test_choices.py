"""Which options a run has: typed ones, those of files, and checkpoints in place of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config.schema import RunConfig

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]

HI = "predict_data=hi"
TINY = """
trainer: {model_name: mine}
model:
  arch: {type: LlamaForCausalLM}
  model_config: {type: LlamaConfig, hidden_size: 64, num_layers: 2, num_heads: 4, n_kv_heads: 2,
    seq_length: 256,
    intermediate_size: 128, vocab_size: 320, theta: 500.0, checkpoint_name_or_path: /x.ckpt}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path


# -- A checkpoint says which model it is. ----------------------------------------------------------


@pytest.mark.parametrize("name", ["x.gguf", "a folder", "~/x.gguf", "smollm2_a16w8"])
def test_a_path_as_the_model(
    resolve: Resolve, here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / name.removeprefix("~/")).touch()
    for words in ([f"model={name}"], ["--model", name], [f"load_checkpoint={name}"]):
        config = resolve(*words, HI)
        assert (config.trainer.model_name, config.load_checkpoint) == ("auto", name)
    assert resolve(f"model={name}", f"load_checkpoint={name}", HI).load_checkpoint == name


def test_a_source_as_the_model(resolve: Resolve) -> None:
    config = resolve("model=hf://org/model", HI)
    assert (config.trainer.model_name, config.checkpoint_source) == ("auto", "hf://org/model")
    config = resolve("load_checkpoint=hf://org/model@main", HI)
    assert (config.trainer.model_name, config.checkpoint_source) == ("auto", "hf://org/model@main")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("a/Qwen2.5-0.5B-Q4_K_M.gguf", "Qwen2.5-0.5B-Q4_K_M"),
        ("a/my model/", "my_model"),
        ("hf://org/model@main", "model"),
        ("a/.hidden.ckpt", "hidden"),
        (".", "auto"),
    ],
)
def test_a_model_is_called_what_its_weights_are(resolve: Resolve, source: str, name: str) -> None:
    assert resolve("model=auto", f"load_checkpoint={source}", HI).model_name == name


def test_a_model_that_is_named_stays(resolve: Resolve, here: Path) -> None:
    (here / "tiny_gpt2").mkdir()
    assert resolve("model=tiny_gpt2", HI).model_name == "tiny_gpt2"
    assert resolve("model=tiny_gpt2", "load_checkpoint=/x", HI).model_name == "tiny_gpt2"
    assert resolve("load_checkpoint=random", HI).model_name == "smollm2_135m"
    # A model's name as load_checkpoint is its usual weights, and without model= its sizes.
    assert resolve("load_checkpoint=llama2_7b", HI).model_name == "llama2_7b"


def test_the_checkpoint_of_a_file(resolve: Resolve, here: Path) -> None:
    Path("run.yaml").write_text("load_checkpoint: x.ckpt\nmax_new_tokens: 4\n")
    assert resolve("--config", "run.yaml", HI).trainer.model_name == "auto"
    assert resolve("--config", "run.yaml", "model=gpt2", HI).model_name == "gpt2"
    Path("mine.yaml").write_text(TINY)
    config = resolve("--config", "mine.yaml", "--config", "run.yaml", HI)
    assert (config.trainer.model_name, config.load_checkpoint) == ("mine", "x.ckpt")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model=gone/x.gguf"], "model: got 'gone/x.gguf', but there is no such file or folder"),
        (["model=gone.gguf"], "model: got 'gone.gguf', but there is no such file or folder"),
        (["model=org/name"], "model=hf://org/name is the repository on the hub"),
        (["model=org"], "model: got 'org', expected one of auto, "),
        (["model=a\0/b"], "no such file or folder"),
        (["model=" + "a/" * 5000], "no such file or folder"),
        (["model=x.gguf", "load_checkpoint=y.gguf"], "and load_checkpoint=y.gguf besides"),
        (["model=x.gguf", "--config", "mine.yaml"], "mine.yaml has a model of its own;"),
    ],
)
def test_a_path_that_is_no_model(
    faults: Faults, here: Path, words: list[str], expected: str
) -> None:
    Path("x.gguf").touch()
    Path("mine.yaml").write_text(TINY)
    message = faults(*words, HI)
    assert expected in message and "faults" not in message


# -- A file and a typed model. ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "model", "expected"),
    [
        (TINY, "smollm2_135m", "hidden_size 64, not 576"),
        (TINY, "tiny_llama", "theta 500.0, not 10000.0"),
        (TINY, "llama2_13b", "hidden_size 64, not 5120"),
        (TINY, "gpt2", "chosen is GPT2LMHeadModel; leave model= out"),
        (TINY, "auto", "chosen is auto; leave model= out"),
        ("trainer: {model_name: llama2_7b}", "smollm2_135m", "model_name llama2_7b"),
        ("trainer: {model_name: auto}\nmodel: {arch: {type: auto}}", "gpt2", "GPT2LMHeadModel"),
    ],
)
def test_a_file_of_another_model_is_refused(
    faults: Faults, here: Path, file: str, model: str, expected: str
) -> None:
    Path("mine.yaml").write_text(file)
    message = faults("--config", "mine.yaml", f"model={model}", HI)
    assert expected in message and "leave model= out to run the file's" in message


@pytest.mark.parametrize(
    "file",
    [
        "model: {model_config: {max_new_tokens: 9, compute_dtype: float32}}",
        "model: {model_config: {num_layers: 1}}",  # as typed: of no model in particular
        "trainer: {model_name: a_name}",
        "trainer: {model_name: tiny_llama}",
        "model: {arch: {type: LlamaForCausalLM}, model_config: {seq_length: 64}}",
        "trainer: {model_name: tiny_llama}\nmodel: {model_config: {num_layers: 1}}",
    ],
)
def test_a_file_that_goes_with_the_model(resolve: Resolve, here: Path, file: str) -> None:
    Path("mine.yaml").write_text(file)
    model = resolve("--config", "mine.yaml", "model=tiny_llama", HI).model_config()
    assert model is not None and model.hidden_size == 64


# -- Words without a key. --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["The capital of France is"], "run_lite.py predict_data='The capital of France is'"),
        (["Hi,", "it's"], "run_lite.py predict_data='Hi, it'\"'\"'s'"),
        (["my model.gguf"], "run_lite.py model='my model.gguf' predict_data='TEXT'"),
        (["hf://a/b", "Why?"], "run_lite.py model=hf://a/b predict_data='Why?'"),
        (["folder"], "run_lite.py model=folder predict_data='TEXT'"),
        (["gpt2", "Hi"], "run_lite.py model=gpt2 predict_data=Hi"),
        (["export"], "run_lite.py run_mode=export"),
        (["prompts.txt"], "run_lite.py predict_data=prompts.txt"),
        (["run.yaml"], "run_lite.py --config run.yaml predict_data='TEXT'"),
        (["predict_data=I", "love", "Beijing"], "mean: predict_data='I love Beijing'"),
        (["model=gpt2", "Hi you"], "mean: predict_data='Hi you'"),
        (["a" * 9000], "run_lite.py predict_data=aaa"),
    ],
)
def test_words_without_a_key_get_the_command(
    faults: Faults, here: Path, words: list[str], meant: str
) -> None:
    Path("folder").mkdir()
    message = faults(*words)
    assert "expected key=value; did you mean: " in message and meant in message
    assert "predict_data is empty" not in message
