"""--config: several files, their defaults, and folders of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.config_file import laid_over
from lite_runner.config.schema import RunConfig
from lite_runner.run_modes import heads, jobs_of

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]

HI = "predict_data=hi"
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
    assert "b.yaml is of another model than a.yaml (trainer.model_name 'gpt2'," in message
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
def test_what_a_file_may_not_say_to_hydra(
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
    assert laid_over(endless, endless)["b"] == 1
    assert laid_over({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
