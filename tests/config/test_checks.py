from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner import run_modes
from lite_runner.config.checks import fits_model
from lite_runner.config.prompts import read_requests
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import Release
from tests.each import each
from tests.sizes import ModelConfig

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
TINY = "model=tiny_llama"
MODEL = "model.model_config"


@each(
    ("settings", "expected"),
    [
        (["run_mode=export"], "predict_data has no effect with run_mode=export"),
        (["run_mode=shard"], "predict_data has no effect with run_mode=shard"),
        (["run_mode=slora"], "run_mode=slora needs adapter_path=lora_adapter.json"),
        (["export_output=x"], "export_output has no effect with run_mode=predict"),
        (
            ["parallel=dp2tp2", "backend=mslite"],
            "data_parallel and model_parallel above 1 together need backend=ms",
        ),
        (["parallel=tp2", "run_mode=convert"], "use_parallel=true has no effect with run_mode=con"),
        (["parallel_config.pipeline_stage=2"], "pipeline_stage: got 2, expected 1"),
        (["parallel_config.model_parallel=2"], "got model_parallel=2 with use_parallel=false"),
        (["parallel=dp2"], "data_parallel: got 2, expected at most the 1 prompt of predict_data"),
        (["parallel=dp2", "predict_batch_size=3"], "got 3, expected a multiple of data_parallel=2"),
        (["adapter_id=zh"], "adapter_id needs adapter_path=lora_adapter.json"),
        (["max_loaded_adapters=2"], "max_loaded_adapters needs adapter_path=lora_adapter.json"),
        (["adapter_dtype=bf16"], "adapter_dtype needs adapter_path=lora_adapter.json"),
        (
            ["adapter_dtype=bf16", "adapter_path=/a", "adapter_id=a", "run_mode=eval"],
            "adapter_dtype has no effect with run_mode=eval",
        ),
        (
            ["src_strategy_path_or_dir=/s", "backend=mslite", "infer.model_dir=x"],
            "src_strategy_path_or_dir=/s has no effect with an exported model",
        ),
        (
            ["src_strategy_path_or_dir=/s", "load_checkpoint=random"],
            "src_strategy_path_or_dir=/s has no effect with load_checkpoint=random",
        ),
        (
            ["auto_trans_ckpt=true", "run_mode=convert"],
            "auto_trans_ckpt has no effect with run_mode=convert",
        ),
        (["only_save_strategy=true"], "only_save_strategy=true needs use_parallel=true"),
        (["context.mode=1", "backend=mslite"], "context.mode=1 (pynative): an exported model is"),
        (["parallel.parallel_mode=2"], "got 2, expected 1 (semi-auto) or 0"),
        (
            ["parallel.parallel_mode=0", "parallel=tp2"],
            "parallel.parallel_mode=0 is data parallel alone; parallel_config.model_parallel=2",
        ),
        (
            ["parallel.strategy_ckpt_save_file=s"],
            "strategy_ckpt_save_file=s has an effect only with",
        ),
        (
            ["temperature=0", "do_sample=true"],
            "temperature=0 is greedy, and do_sample=true samples",
        ),
        (["temperature=-1"], "temperature: got -1, expected a number >= 0"),
        (["top_k=5", "num_beams=2"], "num_beams=2 with top_k=5 is not available"),
        (["speculate=ngram", "num_beams=2"], "speculate=ngram has no effect with num_beams=2"),
        (["draft_model=x", "num_beams=2"], "draft_model=x has no effect with num_beams=2"),
        (["draft_model=x", "speculate=ngram"], "speculate=ngram and draft_model=x both draft"),
        (["do_sample=true", "num_beams=2"], "num_beams=2 with do_sample=true"),
        (["num_beams=2", "num_return_sequences=3"], "got 3, expected at most num_beams=2"),
        (["num_beams=2", "stop=x"], "stop strings are not available with num_beams=2"),
        (["num_return_sequences=2"], "greedy completions are all the same"),
        (["length_penalty=2"], "length_penalty=2 has an effect only with num_beams > 1"),
        (["min_new_tokens=5", "max_new_tokens=4"], "expected at most max_new_tokens=4"),
        (["min_new_tokens=33"], "expected at most max_new_tokens=32"),
        (["min_new_tokens=9", "max_length=8"], "expected at most max_length=8"),
        (["max_new_tokens=256"], "max_new_tokens: got 256, expected less than the model's"),
        (["max_length=257"], "max_length: got 257, expected at most the model's context of 256"),
        ([f"{MODEL}.max_new_tokens=999"], "got 999, expected less than"),
        (
            [f"{MODEL}.max_new_tokens=null", f"{MODEL}.max_decode_length=999"],
            "model.model_config.max_decode_length: got 999",
        ),
        (["eos_token_id=320"], "eos_token_id: got 320, expected less than the vocabulary of 320"),
        (["eos_token_id=[1,999]"], "eos_token_id: got 999"),
        ([f"{MODEL}.pad_token_id=320"], "pad_token_id: got 320"),
        (["stop="], "stop: an empty string"),
        (["stop=['a','']"], "stop: an empty string"),
        (["convert_format=ckpt"], "convert_format has no effect with run_mode=predict"),
        (["overwrite=true"], "overwrite has no effect with run_mode=predict"),
        ([f"{MODEL}.n_kv_heads=3"], "num_heads: got 4, expected a multiple of n_kv_heads=3"),
        ([f"{MODEL}.use_sliding_window=true"], "sliding_window: got null, expected a number of"),
        (
            [
                *(f"{MODEL}.use_sliding_window=true", f"{MODEL}.sliding_window=8"),
                f"{MODEL}.layer_types=[sliding_attention]",
            ],
            "layer_types: got 1 layers, expected num_layers=2",
        ),
        (
            [f"{MODEL}.layer_types=[full_attention]", f"{MODEL}.no_rope_layers=[1,0,1]"],
            "no_rope_layers: got 3 layers, expected num_layers=2",
        ),
        ([f"{MODEL}.num_layers=4097"], "num_layers: got 4097"),
        ([f"{MODEL}.head_dim=7"], "head_dim: got 7, expected an even number"),
        (
            [f"{MODEL}.head_dim=null", f"{MODEL}.hidden_size=66"],
            "hidden_size: got 66, expected a multiple of num_heads=4",
        ),
        ([f"{MODEL}.vocab_size=258"], "vocab_size: got 258, expected at least 259"),
        (
            [f"{MODEL}.rope_scaling={{type: linear, factor: 0.5, original_seq_length: 0}}"],
            "rope_scaling.original_seq_length: got 0",
        ),
        (
            [
                f"{MODEL}.rope_scaling={{type: llama3, factor: 2, original_seq_length: 9,"
                " low_freq_factor: 4, high_freq_factor: 1}"
            ],
            "expected 0 < low < high",
        ),
        (
            [
                f"{MODEL}.rope_scaling={{type: yarn, factor: 2, original_seq_length: 9,"
                " beta_fast: 1, beta_slow: 2}"
            ],
            "expected 0 < slow < fast",
        ),
        (["trainer.model_name=../x"], "trainer.model_name: got '../x'"),
        ([f"trainer.model_name={101 * 'a'}"], "expected at most 100 letters, digits and"),
        ([f"context.cache_limit={400 * '9'}GB"], "expected gigabytes as 58GB or 3.5GB"),
        (["output_dir="], "output_dir is empty"),
        (["output_dir=a\0b"], "output_dir: got 'a\\x00b', expected no NUL"),
        (["model=tiny_bloom", f"{MODEL}.num_heads=5"], "hidden_size: got 64, expected a multiple"),
        (["model=auto", "load_checkpoint=random"], "model=auto has no sizes"),
    ],
)
def test_conflicting_settings_are_refused(
    faults: Faults, settings: list[str], expected: str
) -> None:
    assert expected in faults(TINY, "predict_data=hi", *settings)


def test_off_is_always_allowed(resolve: Resolve) -> None:
    config = resolve(
        *(
            TINY,
            "predict_data=hi",
            "use_parallel=false",
            "auto_trans_ckpt=false",
            "adapter_id=null",
        ),
        *("only_save_strategy=false", "temperature=0", "top_k=0", "top_p=1", "min_p=0"),
        *("src_strategy_path_or_dir=", "load_checkpoint=", "num_beams=1"),
    )
    assert config.generation().do_sample is False


@pytest.mark.parametrize("data", ["", "[]", "['a','']"])
def test_an_empty_prompt_is_refused(faults: Faults, data: str) -> None:
    message = faults(TINY, f"predict_data={data}")
    assert "predict_data" in message and "empty" in message


def test_a_prompt_that_is_not_utf8_is_refused(faults: Faults) -> None:
    assert "predict_data: not valid UTF-8" in faults(TINY, "predict_data=a\udcff")


def test_a_missing_prompt_file_is_refused(faults: Faults, tmp_path: Path) -> None:
    assert f"no file {tmp_path}/x.txt" in faults(TINY, f"predict_data={tmp_path}/x.txt")
    assert "no file" in faults(TINY, "predict_data=" + "x" * 5000 + ".txt")
    (tmp_path / "d.txt").mkdir()
    assert "no file" in faults(TINY, f"predict_data={tmp_path}/d.txt")


def test_a_plan_needs_no_prompt(resolve: Resolve) -> None:
    assert resolve(TINY, "dry_run=true").predict_data == ""


def test_convert_needs_an_output_and_no_generation(resolve: Resolve, faults: Faults) -> None:
    message = faults(TINY, "run_mode=convert", "predict_data=hi", "top_k=3")
    for part in ("convert_output is empty", "predict_data has no effect", "top_k has no effect"):
        assert part in message
    assert "got 'pt', expected one of" in faults(
        TINY, "run_mode=convert", "convert_output=x", "convert_format=pt"
    )
    for release, error in (
        ("1.x", "mindformers.release: got 1.x, expected a release such as 1.0 or 1.3.2"),
        ("0.8", "mindformers.release: got 0.8, expected"),
        ("1.0 convert_format=huggingface", "has no effect with convert_format=huggingface"),
    ):
        keys = f"mindformers.release={release}".split()
        assert error in faults(TINY, "run_mode=convert", "convert_output=x", *keys)
    chosen = resolve(TINY, "run_mode=convert", "convert_output=x", "mindformers.release=1.0.2")
    assert chosen.release == Release((1, 0)) and chosen == run_modes.from_dict(chosen.to_dict())
    config = resolve(TINY, "run_mode=convert", "convert_output=a b=c", "overwrite=true")
    assert (config.convert_format, config.convert_output, config.overwrite) == (
        "safetensors",
        "a b=c",
        True,
    )
    assert run_modes.from_dict(config.to_dict()) == config


def test_generation_options_come_from_the_run_then_from_the_model(resolve: Resolve) -> None:
    defaults = resolve("model=llama2_7b", "predict_data=x").generation()
    assert (defaults.max_length, defaults.max_new_tokens, defaults.top_k) == (512, None, 3)
    assert (defaults.eos_token_id, defaults.pad_token_id) == ((2,), 0)
    given = resolve(
        *("model=llama2_7b", "predict_data=x", "do_sample=true", "top_k=0", "max_new_tokens=7"),
        *("eos_token_id=[5,6]", "seed=9", "stop=###", "repetition_penalty=1.5", "min_p=0.1"),
    ).generation()
    assert (given.do_sample, given.top_k, given.max_new_tokens, given.max_length) == (
        True,
        0,
        7,
        None,
    )
    assert (given.eos_token_id, given.seed, given.stop) == ((5, 6), 9, ("###",))
    assert (given.repetition_penalty, given.min_p) == (1.5, 0.1)


def test_a_length_of_the_run_replaces_the_models(resolve: Resolve) -> None:
    generation = resolve(TINY, "predict_data=x", "max_length=50").generation()
    assert (generation.max_new_tokens, generation.max_length) == (None, 50)


def test_the_model_that_a_checkpoint_holds_is_checked_when_it_is_known(resolve: Resolve) -> None:
    config = resolve("model=auto", "load_checkpoint=x", "predict_data=x", "max_new_tokens=64")
    assert config.model_config() is None
    model = ModelConfig("gpt2", 50, 8, 1, 2, 2, 4, 32, 64, 1e-5, True, eos_token_id=(50,))
    texts = [fault.text for fault in fits_model(config, model)]
    assert len(texts) == 2 and "max_new_tokens: got 64" in texts[0] and "eos" in texts[1]
    assert config.generation(model).eos_token_id == (50,)


def test_the_type_to_compute_in_follows_the_device(resolve: Resolve) -> None:
    config = resolve(TINY, "predict_data=x")
    assert config.precision.computed("CPU") == "float32"
    assert config.precision.computed("Ascend") == "float16"
    found = resolve(TINY, "predict_data=x", f"{MODEL}.compute_dtype=bfloat16").precision
    assert found.computed("Ascend") == found.weights("Ascend") == "bfloat16"
    assert (found.computed("CPU"), found.weights("CPU")) == ("float32", "bfloat16")
    assert found.rounded("CPU") == "bfloat16" and found.rounded("Ascend") == "float32"


def test_sizes_resolve_to_a_model(resolve: Resolve) -> None:
    model = resolve(TINY, "predict_data=x").model_config()
    assert model is not None
    assert (model.architecture, model.n_kv_heads, model.head_dim) == ("llama", 2, 24)
    model = resolve("model=bloom_560m", "predict_data=x").model_config()
    assert model is not None
    assert (model.architecture, model.n_kv_heads, model.head_dim) == ("bloom", 16, 64)
    assert model.intermediate_size == 4096


def test_windows_resolve_to_a_model(resolve: Resolve) -> None:
    assert resolve("model=mistral_7b", "predict_data=hi").model_config().windows == (4096,) * 32
    window = ("use_sliding_window=true", "sliding_window=9", "max_window_layers=27")
    typed = (f"model.model_config.{one}" for one in window)
    model = resolve("model=qwen2_7b", "predict_data=hi", *typed).model_config()
    assert (model.architecture, model.windows) == ("qwen2", (None,) * 27 + (9,))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["model=tiny_llama", "parallel=tp8"],
            "got 8, which does not divide num_heads=4; expected one of 1, 2, 4",
        ),
        (["model=smollm2_135m", "parallel=tp2"], "num_heads=9, n_kv_heads=3; expected one of 1, 3"),
        (
            ["model=gpt2", "parallel=tp2"],
            "vocab_size=50257; expected one of 1; parallel_config"
            ".vocab_emb_dp=true leaves the vocabulary whole",
        ),
        (
            ["model=gpt2", "parallel=tp8", "parallel_config.vocab_emb_dp=true"],
            "num_heads=12, n_kv_heads=12; expected one of 1, 2, 3, 4, 6, 12",
        ),
        (["model=llama2_70b", "parallel=tp2", "parallel_config.model_parallel=12"], "num_heads=64"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_degrees_that_do(
    faults: Faults, settings: list[str], expected: str
) -> None:
    assert expected in faults("predict_data=hi", *settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["model=tiny_qwen2", "parallel=tp4"],  # two key/value heads
        ["model=smollm2_135m", "parallel=tp2", "parallel_config.model_parallel=3"],
        ["model=gpt2", "parallel=tp2", "parallel_config.vocab_emb_dp=true"],
        ["model=llama2_70b", "parallel=tp8"],
        ["model=tiny_bloom", "parallel=dp2", "predict_data=[a,b]", "predict_batch_size=4"],
        ["model=tiny_bloom", "parallel=dp2", "predict_data=-"],
    ],
)
def test_divisors_are_allowed(resolve: Resolve, settings: list[str]) -> None:
    assert resolve("predict_data=hi", *settings).use_parallel


def test_a_default_that_does_not_fit_the_context_shrinks(resolve: Resolve) -> None:
    shorter = f"{MODEL}.seq_length=16"
    config = resolve("model=tiny_llama", "predict_data=x", shorter)
    generation = config.generation()
    assert (generation.max_new_tokens, generation.max_length) == (32, 16)
    config = resolve("model=gpt2", "predict_data=x", shorter)  # whose default is max_decode_length
    assert config.generation().max_length == 16
    # What was asked for wins, and has to fit.
    config = resolve("model=gpt2", "predict_data=x", shorter, "max_new_tokens=3", "max_length=99")
    assert (config.generation().max_new_tokens, config.generation().max_length) == (3, None)


def test_a_key_of_another_run_mode_that_is_left_open_asks_for_nothing(resolve: Resolve) -> None:
    line = ["model=tiny_llama", "run_mode=eval", f"eval_data={__file__}"]
    assert resolve(*line, "predict_data=", "max_new_tokens=null") == resolve(*line)
    assert resolve(*line, "predict_data=x", "predict_data=") == resolve(*line)


def test_every_value_of_a_run_modes_key_is_checked(faults: Faults) -> None:
    assert "max_new_tokens: got 'x'" in faults(
        "model=tiny_llama", "max_new_tokens=x", "max_new_tokens=3", "predict_data=a"
    )


@pytest.mark.parametrize("key", ["predict_data", "max_new_tokens", "load_checkpoint"])
def test_a_placeholder_of_omegaconf_is_no_value(faults: Faults, key: str, tmp_path: Path) -> None:
    expected = f"{key}: a value is missing"
    assert expected in faults("model=tiny_llama", f"{key}=???")
    (tmp_path / "own.yaml").write_text(f"model: tiny_llama\n{key}: ???\n")
    assert expected in faults("--config", str(tmp_path / "own.yaml"))


def test_three_question_marks_are_a_prompt(resolve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "???"}')
    for word in ("predict_data=['???','a']", f"predict_data={tmp_path / 'own.jsonl'}"):
        config = resolve("model=tiny_llama", word)
        assert read_requests(config)[0].prompt == "???", word


@each(
    "words",
    [
        ["output_dir=~no_such_user/x"],
        ["load_checkpoint=~no_such_user/x"],
        ["adapter_path=~no_such_user/x"],
        ["infer.model_dir=~no_such_user/x"],
        ["infer.prefill_model_path=~no_such_user/x", "infer.increment_model_path=a"],
        ["run_mode=eval", "predict_data=", "eval_data=~no_such_user/x"],
        ["run_mode=convert", "predict_data=", "convert_output=~no_such_user/x"],
        ["--config-dir", "~no_such_user/x"],
        ["hydra.searchpath=['~no_such_user/x']"],
    ],
)
def test_the_home_of_nobody(faults: Faults, words: list[str]) -> None:
    found = faults("predict_data=hi", *words)
    assert "~no_such_user/x: there is no such user, or no home of theirs" in found
    found = faults(TINY, "predict_data=hi", *words)
    assert "~no_such_user/x: there is no such user, or no home of theirs" in found


def test_heads_that_are_normed_together_are_of_one_rank(faults: Faults) -> None:
    errors = faults("model=olmo2_1b", "predict_data=hi", "load_checkpoint=random", "parallel=tp2")
    assert "got 2, expected 1: olmo2 normalizes queries and keys over all heads" in errors


def test_ranks_that_share_a_model_do_not_look_up_by_default(resolve: Resolve) -> None:
    line = ["model=tiny_llama", "predict_data=x"]
    assert resolve(*line).looks_up
    assert not resolve(*line, "speculate=none").looks_up
    assert not resolve(*line, "parallel=tp2").looks_up
