"""Typed keys and groups override those of a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lite_runner.config import at, put_at
from lite_runner.config.argv import parse
from lite_runner.config.config_file import merged
from lite_runner.config.groups import GROUPS, options_of
from lite_runner.config.schema import RunConfig, SamplingOptions
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve
from tests import frozen_keys as frozen
from tests.config.test_mindformers import LLAMA

Resolve = Callable[..., RunConfig]

MINDFORMERS = yaml.safe_load(LLAMA.replace("num_layers: 2", "num_layers: 2\n    theta: 1.0e+4"))
FORMER = {  # what a run of each mode has left
    mode: yaml.safe_load((frozen.FOLDER / f"{mode}.yaml").read_text(encoding="utf-8"))
    for mode in frozen.run_modes()
}
SAMPLES = [sample for sample in frozen.typed()["samples"] if "model=" not in sample]
# What an option of a group stands for.
MEANS = {
    "model": ("model.arch.type", "model.model_config.type"),
    "parallel": (
        *("use_parallel", "parallel_config.data_parallel", "parallel_config.model_parallel"),
    ),
    "ge": ("infer.ge_preset", "infer.ge_options"),
    "run_mode": ("run_mode",),
    "backend": ("backend",),
}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """The current folder, with the files that the samples name."""
    with frozen.beside(tmp_path):
        yield tmp_path


def config_of(words: list[str]) -> dict[str, Any] | str:
    """The config that a command line means, or why it is refused."""
    try:
        return resolve(parse(words, heads()))[0].to_dict()
    except ConfigError as error:
        return error.message


def value_in_file(sample: str) -> tuple[str, Any]:
    """A sample as a file says it."""
    key, _, text = sample.partition("=")
    with contextlib.suppress(yaml.YAMLError):
        return key, yaml.safe_load(text.replace("{", "{ ").replace(":", ": ")) if text else ""
    return key, text


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """A yaml of ours, of MindFormers, or of a former run, with any keys."""
    mode = draw(st.sampled_from(frozen.run_modes()))
    raw = dict(draw(st.sampled_from([{}, MINDFORMERS, FORMER[mode]])))
    for sample in draw(st.lists(st.sampled_from(SAMPLES), max_size=5)):
        for word in sample.split(" "):
            key, value = value_in_file(word)
            if key in GROUPS:
                raw["defaults"] = [*raw.get("defaults", ()), {key: value}]
            else:
                above: dict[str, Any] = {}
                put_at(above, key, value)
                raw = merged(raw, above)
    return raw


def words_of(raw: Mapping[str, Any]) -> Iterator[str]:
    """The names that a file has."""
    for name, value in raw.items():
        yield str(name)
        if isinstance(value, dict):
            yield from words_of(value)
        elif name == "defaults":
            for group in (group for entry in value for group in entry):
                yield from (group, *(key.rpartition(".")[2] for key in MEANS[group]))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=files(),
    mode=st.sampled_from(frozen.run_modes()),
    sample=st.sampled_from([*frozen.typed()["samples"]]),
)
def test_typed_keys_win_or_are_refused(
    here: Path, raw: dict[str, Any], mode: str, sample: str
) -> None:
    text = yaml.dump(raw, Dumper=yaml.CSafeDumper)
    (here / "file.yaml").write_text(text, encoding="utf-8")
    words, key = frozen.command_line(mode, sample), frozen.key_of(sample)
    alone, both = config_of(words), config_of(["--config", "file.yaml", *words])
    if isinstance(alone, str):
        return
    if isinstance(both, str):
        names = {key.rpartition(".")[2], *words_of(raw)}
        assert any(name in both for name in names), both
        return
    if sample == "backend=auto" and raw.get("engine", "auto") != "auto":
        assert at(both, "backend") == "mslite"  # the one that the file's engine is of
        return
    for shown in MEANS.get(key, (key,)):
        assert at(both, shown) == at(alone, shown), json.dumps(raw)


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_of_a_group_wins_over_a_former_run(here: Path, group: str) -> None:
    """Typed behind --config of a run of each other option."""
    options = [option for option in options_of(group) if group != "model" or "tiny" in option]
    base = {
        "run_mode": "predict",
        "model": "tiny_llama",
        "predict_data": "[a,b,c,d,e,f,g,h]",
        "backend": "mslite" if group == "ge" else "auto",
    }
    wrong = []
    for before in options:
        former = config_of([f"{k}={v}" for k, v in (base | {group: before}).items()])
        if isinstance(former, str):
            continue
        text = yaml.dump(former, Dumper=yaml.CSafeDumper)
        (here / "file.yaml").write_text(text, encoding="utf-8")
        for after in options:
            words = [f"{k}={v}" for k, v in (base | {group: after}).items()]
            alone = config_of(words)
            found = config_of(["--config", "file.yaml", f"{group}={after}"])
            if isinstance(alone, dict) and isinstance(found, dict):
                wrong += [
                    (before, after, key) for key in MEANS[group] if at(found, key) != at(alone, key)
                ]
    assert not wrong


@pytest.mark.parametrize("parallel", [name for name in options_of("parallel") if name != "dp2tp2"])
def test_a_parallel_option_over_the_layout_of_a_yaml(
    resolve: Resolve, tmp_path: Path, parallel: str
) -> None:
    path = tmp_path / "predict.yaml"
    for use in (False, True):
        path.write_text(yaml.safe_dump(MINDFORMERS | {"use_parallel": use}))
        words = ["run_mode=shard", f"parallel={parallel}", "load_checkpoint=x.ckpt"]
        config = resolve("--config", str(path), *words)
        alone = resolve("model=llama2_7b", *words)
        assert config.parallel_config == alone.parallel_config
        assert config.use_parallel == alone.use_parallel
    saved = config.parallel.strategy_ckpt_save_file
    assert saved == ("./s.ckpt" if config.use_parallel else "")  # which the option leaves open


def test_an_option_of_ones_own_over_a_file(resolve: Resolve, here: Path) -> None:
    (here / "mine/parallel").mkdir(parents=True)
    (here / "mine/parallel/cluster.yaml").write_text(
        "# @package _global_\ndefaults: [tp2, _self_]\n"
        "parallel: {master_addr: 10.0.0.1}\nparallel_config: {vocab_emb_dp: true}\n"
    )
    (here / "file.yaml").write_text(
        "use_parallel: true\nparallel: {master_addr: 10.0.0.2, timeout: 9}\n"
        "parallel_config: {data_parallel: 8, vocab_emb_dp: false}\n"
    )
    words = ["-cd", "mine", "model=tiny_llama", "parallel=cluster", "predict_data=a"]
    config = resolve("--config", "file.yaml", *words)
    assert (config.parallel.master_addr, config.parallel.timeout) == ("10.0.0.1", 9)
    layout = config.parallel_config
    assert (layout.data_parallel, layout.model_parallel, layout.vocab_emb_dp) == (1, 2, True)


GENERATION = {"max_new_tokens": 5, "max_length": 40, "eos_token_id": 7, "repetition_penalty": 1.5}
PREFIX = "model.model_config."
TYPED = {
    **GENERATION,
    **{f"{PREFIX}{name}": value for name, value in GENERATION.items() if name != "max_length"},
    f"{PREFIX}max_decode_length": 40,
    f"{PREFIX}do_sample": True,
}


@pytest.mark.parametrize("key", TYPED)
def test_typed_options_decide_the_generation(resolve: Resolve, here: Path, key: str) -> None:
    """Whatever of the same meaning a file says."""
    name = key.removeprefix(PREFIX).replace("max_decode_length", "max_length")
    typed = f"{key}={json.dumps(TYPED[key])}"
    for raw in (
        {"max_new_tokens": 6, "eos_token_id": 8, "repetition_penalty": 1.2, "do_sample": False},
        {"max_length": 50, "model": {"model_config": {"max_new_tokens": 9}}},
        {"generation_config": {"max_new_tokens": 9, "max_length": 60}},
        {},
    ):
        (here / "file.yaml").write_text(yaml.safe_dump(raw | {"seed": 1}))
        config = resolve("--config", "file.yaml", "model=tiny_llama", "predict_data=a", typed)
        assert isinstance(config, SamplingOptions)
        expected = TYPED[key]
        found = getattr(config.generation(), name)
        assert found == ((expected,) if name == "eos_token_id" else expected), raw
        if name == "max_length":
            assert config.generation().max_new_tokens is None


def test_a_temperature_that_is_typed_samples(resolve: Resolve, here: Path) -> None:
    for file, typed, expected in (
        ("do_sample: false", "temperature=0.5", True),
        ("do_sample: false", "top_k=3", True),
        ("do_sample: true", "temperature=1.0", True),
        ("do_sample: true\ntemperature: 0.5", "do_sample=false", False),
        ("do_sample: true", f"{PREFIX}do_sample=false", False),
    ):
        (here / "file.yaml").write_text(file)
        config: Any = resolve("--config", "file.yaml", "model=tiny_llama", "predict_data=a", typed)
        assert config.generation().do_sample is expected, (file, typed)


def test_sources_are_those_typed(resolve: Resolve, here: Path) -> None:
    def found(raw: Mapping[str, Any], *typed: str) -> Any:
        (here / "file.yaml").write_text(yaml.safe_dump(raw))
        return resolve("--config", "file.yaml", "model=tiny_llama", *typed)

    config = found({"load_checkpoint": "a"}, f"{PREFIX}checkpoint_name_or_path=b", "predict_data=x")
    assert config.checkpoint_source == "b"
    infer = {"infer": {"prefill_model_path": "a/x", "increment_model_path": "a/y"}}
    run = found(infer, "infer.model_dir=b", "backend=mslite", "predict_data=x").infer
    assert (run.model_dir, run.prefill_model_path, run.increment_model_path) == ("b", "", "")
    infer = {"infer": {"model_dir": "a"}}
    run = found(infer, "infer.prefill_model_path=b", "backend=mslite", "predict_data=x").infer
    assert (run.model_dir, run.prefill_model_path) == ("", "b")


def test_the_run_mode_that_is_typed_again_keeps_a_former_runs_keys(
    resolve: Resolve, here: Path
) -> None:
    former = resolve("model=tiny_llama", "predict_data=a", "max_new_tokens=3", "kv_cache=int8")
    (here / "file.yaml").write_text(yaml.safe_dump(former.to_dict()))
    for mode, words in (("predict", []), ("slora", ["adapter_path=adapters.json"])):
        again: Any = resolve("--config", "file.yaml", f"run_mode={mode}", *words)
        assert again.run_mode == mode
        assert (again.predict_data, again.max_new_tokens, again.kv_cache) == ("a", 3, "int8")
