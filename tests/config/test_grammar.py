"""Values that are read without Hydra's parser equal those that it reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from lite_runner.config import grammar
from lite_runner.config.argv import parse, value_of
from lite_runner.config.compose import config_yaml, portable
from lite_runner.config.schema import RunConfig
from lite_runner.run_modes import heads, resolve
from tests.each import each

NUMBERS = st.from_regex(r"-?[0-9]{1,20}(\.[0-9]{0,20})?", fullmatch=True)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]*", fullmatch=True)


@given(NUMBERS | NAMES)
@example("a16w8")
@example("fp16-")
@example("tRue")
@example("Null")
@example("NaN")
@example("-inf")
@example("infinite")
@example("-0")
@example("-0.0")
@example("007")
@example("0.30000000000000004")
@example("true")
@example("True")
@example("null")
@example("1e3")
@example(" 5")
def test_plain_values_are_those_of_hydra(text: str) -> None:
    expected = grammar._parse(text).value()
    found = value_of(text, float)
    assert (type(found), repr(found)) == (type(expected), repr(expected))


Faults = Callable[..., str]
TINY = "model=tiny_llama"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERE", "/data")
    monkeypatch.setenv("COUNT", "7")
    monkeypatch.setenv("ODD", "${oc.env:WHERE} ${seed}")
    monkeypatch.setenv("API_KEY", "0123456789abcdef")
    monkeypatch.delenv("ABSENT", raising=False)
    return tmp_path


def run(text: str, *words: str) -> Any:
    Path("a.yaml").write_text(text, encoding="utf-8")
    return resolve(parse(["--config", "a.yaml", TINY, *words], heads()))[0]


@each(
    ("given", "expected"),
    [
        ("${oc.env:WHERE}", "/data"),
        ("${oc.env:WHERE}/x", "/data/x"),
        ("${oc.env:ABSENT,other}", "other"),
        ("${oc.env:ABSENT,${oc.env:WHERE}}", "/data"),
        ("a ${trainer.model_name} b", "a tiny_llama b"),
        ("${model.model_config.seq_length}", "256"),
        ("${.output_dir}/${seed}", "./outputs/5"),
        ("${oc.env:ODD}", "${oc.env:WHERE} ${seed}"),  # a value is not read again
        (r"\${seed}", "${seed}"),
        ("$HOME and {seed}", "$HOME and {seed}"),
        ("${model[model_config].seq_length}", "256"),
    ],
)
def test_values_of_texts(given: str, expected: str) -> None:
    config = run(yaml.safe_dump({"predict_data": f"{given} ", "seed": 5}))
    assert config.predict_data == f"{expected} "


def test_values_have_their_types() -> None:
    config = run(
        "max_new_tokens: ${oc.decode:${oc.env:COUNT}}\nseed: ${max_new_tokens}\nsystem: ''\n"
        "stop: ${predict_data}\npredict_data: [a, b]\nmin_new_tokens: ${oc.decode:null}\n"
        "context: {threads: '${.device_id}', device_id: 3}\n"
    )
    assert (config.max_new_tokens, config.seed, config.min_new_tokens) == (7, 7, None)
    assert config.stop == config.predict_data == ("a", "b") and config.context.threads == 3


def test_references_see_typed_values() -> None:
    text = "seed: 1\nparallel_config: {model_parallel: 1}\npredict_data: hi\n"
    more = "max_new_tokens: ${seed}\nmin_new_tokens: ${parallel_config.model_parallel}\n"
    config = run(text + more, "seed=4", "parallel=tp2")
    assert (config.max_new_tokens, config.min_new_tokens) == (4, 2)


def test_options_and_the_model_may_be_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "eval")
    monkeypatch.setenv("MODEL", "tiny_gpt2")
    Path("a.yaml").write_text(
        "defaults: [{model: '${oc.env:MODEL}'}]\nrun_mode: ${oc.env:MODE}\neval_data: a.yaml\n"
    )
    config = resolve(parse(["--config", "a.yaml"], heads()))[0]
    assert (config.run_mode, config.model_name) == ("eval", "tiny_gpt2")


@each(
    ("text", "expected"),
    [
        ("seed: ${oc.env:ABSENT}", "seed: '${oc.env:ABSENT}': no environment variable ABSENT"),
        ("seed: ${gone.key}", "no such key: gone.key (in a.yaml)"),
        ("seed: ${seed}", "seed refers to itself"),
        ("seed: ${weights_seed}\nweights_seed: ${seed}", "refers to itself"),
        ("seed: ${now:%Y}", "now: expected oc.env:NAME"),
        ("seed: ${oc.select:seed}", "oc.select: expected oc.env:NAME"),
        ("seed: ${hydra:run.dir}", "hydra: expected oc.env:NAME"),
        ("seed: ${", r"\\${ is a plain ${"),
        ("seed: ${oc.decode:${oc.env:ODD}}", "expected a text without ${"),
        ("seed: ${oc.env:COUNT}", "seed: got '7', expected an integer"),
        ("output_dir: ${oc.env:API_KEY}", "API_KEY may be a secret"),
        ("infer: {enc_key: 'x${oc.env:API_KEY}'}", "expected ${oc.env:NAME} alone"),
        ("seed: ${....x}", "no section so far above seed"),
    ],
)
def test_interpolations_that_are_refused(faults: Faults, text: str, expected: str) -> None:
    Path("a.yaml").write_text(text)
    message = faults("--config", "a.yaml", TINY, "predict_data=hi")
    assert expected.replace("\\\\", "\\") in message and "0123456789abcdef" not in message


def test_a_secret_stays_in_the_environment() -> None:
    for text, words, key in (
        ("infer: {enc_key: '${oc.env:API_KEY}'}", ["run_mode=export"], "infer.enc_key"),
        ("serve: {api_key: '${oc.env:API_KEY}'}", ["run_mode=serve"], "serve.api_key"),
        ("serve: {api_key: '${oc.env:API_KEY,x}'}", ["run_mode=serve"], "serve.api_key"),
    ):
        config: RunConfig = run(text, *words)
        section, name = key.split(".")
        assert yaml.safe_load(config_yaml(config))[section][name] == "env:API_KEY"
        assert "0123456789abcdef" not in str(config.to_dict())


def test_nothing_else_is_interpolated(here: Path) -> None:
    Path("p.txt").write_text("${oc.env:WHERE}\n")
    assert run("seed: 1", "predict_data=${oc.env:WHERE} ${seed}").predict_data == (
        "${oc.env:WHERE} ${seed}"
    )
    former = run("seed: 1", "predict_data=${oc.env:WHERE}", "stop=${x}")
    Path("run.yaml").write_text(yaml.safe_dump(portable(former)))
    again: Any = resolve(parse(["--config", "run.yaml"], heads()))[0]
    assert (again.predict_data, again.stop) == ("${oc.env:WHERE}", "${x}")


def test_references_that_grow_are_refused(faults: Faults) -> None:
    doubled = "\n".join(f"k{i}: ${{k{i + 1}}}${{k{i + 1}}}" for i in range(40))
    Path("a.yaml").write_text(f"predict_data: ${{k0}}\n{doubled}\nk40: xx\n")
    assert "references expand to more than" in faults("--config", "a.yaml", TINY)
    Path("a.yaml").write_text("a: &a\n  b: *a\n  c: ${seed}\nseed: 1\n")
    assert "or a value holds itself" in faults("--config", "a.yaml", TINY, "predict_data=x")
