"""Options of a run: typed ones, those of files, and checkpoints in place of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.config_file import merged, read_config
from lite_runner.config.schema import RunConfig
from lite_runner.run_modes import heads, schemas
from lite_runner.sweep import jobs_of

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
def test_a_model_has_the_name_of_its_weights(resolve: Resolve, source: str, name: str) -> None:
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
    assert expected in message and "errors in" not in message


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


MINE = """# @package _global_
# Mine.
defaults:
  - tiny_llama
  - _self_
trainer:
  model_name: mine
model:
  model_config:
    num_layers: 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of groups of the user's own, in the current folder."""
    folder = tmp_path / "my 'conf'"
    for group in ("model", "parallel"):
        (folder / group).mkdir(parents=True)
    (folder / "model/mine.yaml").write_text(MINE)
    (folder / "parallel/dp3.yaml").write_text(
        "# @package _global_\ndefaults: [dp2, _self_]\nparallel_config: {data_parallel: 3}\n"
    )
    return folder


def test_several_files_are_laid_over_one_another(resolve: Resolve, own: Path) -> None:
    Path("a.yaml").write_text("seed: 1\ncontext: {device_id: 3, mode: 1}\nmax_new_tokens: 4\n")
    Path("b.yaml").write_text("seed: 2\ncontext: {mode: 0}\n")
    config = resolve("--config", "a.yaml", "--config=b.yaml", "model=tiny_gpt2", HI)
    assert (config.seed, config.context.device_id, config.context.mode) == (2, 3, 0)
    assert config.max_new_tokens == 4
    assert resolve("--config=b.yaml", "--config=a.yaml", "model=gpt2", HI).seed == 1


def test_files_of_two_models_are_refused(faults: Faults, resolve: Resolve, own: Path) -> None:
    Path("a.yaml").write_text("trainer: {model_name: llama2_7b}\n")
    Path("b.yaml").write_text("trainer: {model_name: gpt2}\n")
    message = faults("--config", "a.yaml", "--config", "b.yaml", HI)
    assert "b.yaml describes another model than a.yaml (trainer.model_name 'gpt2'," in message
    Path("b.yaml").write_text("model: {model_config: {max_new_tokens: 3}}\n")
    config = resolve("--config", "a.yaml", "--config", "b.yaml", HI)
    assert (config.model_name, config.model.model_config.max_new_tokens) == ("llama2_7b", 3)


def test_defaults_choose_options(resolve: Resolve, own: Path) -> None:
    Path("a.yaml").write_text(
        "defaults:\n  - model: tiny_gpt2\n  - override /parallel: tp2\n  - _self_\nseed: 5\n"
    )
    config = resolve("--config", "a.yaml", HI)
    assert (config.model_name, config.seed) == ("tiny_gpt2", 5)
    assert config.parallel_config.model_parallel == 2
    assert resolve("--config", "a.yaml", "model=tiny_llama", HI).model_name == "tiny_llama"
    assert resolve("--config", "a.yaml", "load_checkpoint=/x", HI).model_name == "tiny_gpt2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("defaults: [model: gpt3]", "model: got 'gpt3' (in a.yaml), expected one of"),
        ("defaults: [models: gpt2]", "defaults: got models (in a.yaml), expected one of model,"),
        ("defaults: [_self_, model: gpt2]", "_self_ is not the last entry (in a.yaml)"),
        ("defaults: [base]", "got 'base' (in a.yaml), expected GROUP: OPTION or _self_"),
        ("defaults: gpt2", "defaults: got 'gpt2' (in a.yaml), expected a list"),
        ("hydra: {run: {dir: x}}", "hydra.run: Hydra's own settings are not used here"),
        ("hydra: {searchpath: x}", "hydra.searchpath: got 'x' (in a.yaml), expected a list"),
        ("hydra: {searchpath: [gone]}", "gone: no such folder of config groups"),
    ],
)
def test_settings_of_hydra_that_a_file_may_not_have(
    faults: Faults, own: Path, text: str, expected: str
) -> None:
    Path("a.yaml").write_text(text)
    assert expected in faults("--config", "a.yaml", HI)


def test_a_folder_adds_models_and_options(resolve: Resolve, own: Path) -> None:
    quoted = str(own.name).replace("'", "\\'")
    Path("a.yaml").write_text(f'hydra: {{searchpath: ["{own.name}"]}}\n')
    for words in (
        ["--config-dir", own.name],
        ["-cd", str(own)],
        [f"hydra.searchpath=['{quoted}']"],
        [f"hydra.searchpath=['file://{str(own).replace(chr(39), chr(92) + chr(39))}']"],
        ["--config", "a.yaml"],
    ):
        config = resolve(*words, "model=mine", HI)
        model = config.model_config()
        assert config.model_name == "mine" and model is not None
        assert (model.num_layers, model.hidden_size) == (3, 64)
    assert (
        resolve(
            "-cd", own.name, "parallel=dp3", "predict_data=[a,b,c]"
        ).parallel_config.data_parallel
        == 3
    )


def test_a_sweep_over_ones_own_models(own: Path) -> None:
    line = parse(["-m", "-cd", str(own), "model=glob(min*)", HI, "seed=1,2"], heads())
    assert [config.model_name for _, config, _ in jobs_of(line)] == ["mine", "mine"]


def test_a_package_of_configs(
    resolve: Resolve, faults: Faults, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.rename("a_package")
    monkeypatch.syspath_prepend(str(own.parent))
    assert resolve("hydra.searchpath=[pkg://a_package]", "model=mine", HI).model_name == "mine"
    message = faults("hydra.searchpath=[pkg://not_there_at_all.conf]", HI)
    assert "no package not_there_at_all is installed" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-cd", "gone"], "gone: no such folder of config groups"),
        (["-cd", "."], ".: holds no config group; expected a folder model, parallel,"),
        (["hydra.searchpath=x"], "expected a list of folders, as hydra.searchpath=[DIR]"),
        (["hydra.searchpath=[1]"], "expected a list of folders, as hydra.searchpath=[DIR]"),
        (["-cd", "my 'conf'", "model=min"], "did you mean mine?"),
        (["-cd", "my 'conf'", "model=gpt2"], "model=gpt2 is in "),
        (["-cd", "my 'conf'", "model=broken"], "do not compose"),
    ],
)
def test_a_folder_that_does_not_serve(
    faults: Faults, own: Path, words: list[str], expected: str
) -> None:
    (own / "model/gpt2.yaml").write_text(MINE)
    (own / "model/broken.yaml").write_text("a: [1")
    assert expected in faults(*words, HI)


def test_data_is_laid_over_to_a_bounded_depth() -> None:
    endless: dict[str, object] = {"b": 1}
    endless["a"] = endless
    assert merged(endless, endless)["b"] == 1
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}


EXPERIMENT = """# @package _global_
defaults:
  - override /model: tiny_gpt2
  - override /parallel: tp2
seed: 7
max_new_tokens: 5
context: {threads: 1}
"""


@pytest.fixture
def experiment(own: Path) -> Path:
    """The same folder with a group of the user's own."""
    (own / "experiment").mkdir()
    (own / "experiment/x.yaml").write_text(EXPERIMENT)
    (own / "experiment/y.yaml").write_text("# @package _global_\nseed: 8\n")
    (own / "experiment/z.yaml").write_text("seed: 8\n")
    return own


def test_groups_of_ones_own(resolve: Resolve, experiment: Path) -> None:
    Path("a.yaml").write_text(
        "seed: 1\nmax_new_tokens: 2\nmin_new_tokens: 1\nuse_parallel: false\n"
        "parallel_config: {model_parallel: 1}\n"
    )
    words = ["-cd", str(experiment), "+experiment=x", HI]
    for more in ([], ["--config", "a.yaml"]):
        config: Any = resolve(*words, *more)
        assert (config.seed, config.max_new_tokens, config.context.threads) == (7, 5, 1)
        assert (config.model_name, config.parallel_config.model_parallel) == ("tiny_gpt2", 2)
        assert config.min_new_tokens == (1 if more else None)
    typed: Any = resolve(*words, "seed=3", "model=tiny_llama", "parallel=single")
    assert (typed.seed, typed.model_name, typed.use_parallel) == (3, "tiny_llama", False)
    assert resolve(*words, "load_checkpoint=random").model_name == "tiny_gpt2"
    line = parse(["-m", "-cd", str(experiment), "+experiment=x,y", HI, "model=tiny_llama"], heads())
    assert [config.seed for _, config, _ in jobs_of(line)] == [7, 8]


def test_a_run_needs_no_sweeper_of_ones_own(resolve: Resolve, experiment: Path) -> None:
    """Only --multirun uses one, and it may not be installed."""
    sweeper = "defaults:\n  - override /hydra/sweeper: absent"
    text = EXPERIMENT.replace("defaults:", sweeper)
    (experiment / "experiment/x.yaml").write_text(text)
    assert resolve("-cd", str(experiment), "+experiment=x", HI).seed == 7


def test_a_folder_of_experiments_alone(resolve: Resolve, tmp_path: Path, own: Path) -> None:
    (tmp_path / "only/experiment").mkdir(parents=True)
    (tmp_path / "only/experiment/x.yaml").write_text(EXPERIMENT)
    assert resolve("-cd", str(tmp_path / "only"), "+experiment=x", HI).seed == 7


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("experiment=x", "+experiment=x adds an option of it"),
        ("+experiment=w", "+experiment: got 'w', expected one of x, y, z"),
        ("+experiment=z", "z.yaml: expected '# @package _global_' as its first line"),
        ("+experimen=x", "+experimen=x: no such key"),
    ],
)
def test_errors_of_ones_own_group(
    faults: Faults, experiment: Path, word: str, expected: str
) -> None:
    assert expected in faults("-cd", str(experiment), word, HI)


def test_messages_name_what_a_config_came_from(here: Path) -> None:
    first, second = here / "a.yaml", here / "b.yaml"
    for path in (first, second):
        path.write_text("seed: 1\n")
    paths = [str(first), str(second)]
    assert read_config(paths, None, schemas()).source == f"{first} and {second}"
    assert read_config([], {"seed": 1}, schemas()).source == "the config"
    assert read_config([], None, schemas()).source == "the flags"
