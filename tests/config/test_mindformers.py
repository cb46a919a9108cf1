from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.architectures.llama import LlamaSettings, feed_forward_width
from lite_runner.architectures.spec import Norm, RopeScaling, Rotary
from lite_runner.config.mindformers import format_keys
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import AscendSettings
from lite_runner.errors import ConfigError
from lite_runner.system import yaml_file
from lite_runner.system.yaml_file import read_yaml

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
Notes = Callable[..., list[str]]

LLAMA = """
seed: 7
output_dir: './output'
load_checkpoint: ''
auto_trans_ckpt: False
run_mode: 'predict'
trainer: {type: CausalLanguageModelingTrainer, model_name: 'llama2_7b'}
runner_config: {epochs: 2, batch_size: 1}
optimizer: &optimizer {type: AdamWeightDecay, eps: 1.e-8}
callbacks:
  - type: MFLossMonitor
use_parallel: False
parallel: {parallel_mode: 1, strategy_ckpt_save_file: ./s.ckpt}
parallel_config: {data_parallel: 8, model_parallel: 2}
moe_config: {expert_num: 1}
profile: False
context: {mode: 0, device_target: Ascend, max_device_memory: 58GB, device_id: 3, save_graphs: False,
  ascend_config: {precision_mode: must_keep_origin_dtype}}
model:
  model_config:
    type: LlamaConfig
    batch_size: 1
    seq_length: 1024
    hidden_size: 4096
    num_layers: 2
    num_heads: 32
    vocab_size: 32000
    multiple_of: 256
    rms_norm_eps: 1.0e-5
    compute_dtype: float16
    use_past: False
    extend_method: "None"
    qkv_concat: False
    checkpoint_name_or_path: llama2_7b
    repetition_penalty: 1
    max_decode_length: 512
    top_k: 3
    do_sample: True
  arch: {type: LlamaForCausalLM}
processor:
  return_tensors: ms
  tokenizer: {type: LlamaTokenizer, vocab_file: /t/tokenizer.model, pad_token: <s>}
  type: LlamaProcessor
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """`file(old, new, ...)` writes LLAMA with the replacements and gives its path."""

    def write(*replacements: str) -> str:
        text = LLAMA
        for old, new in zip(replacements[::2], replacements[1::2], strict=True):
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "file.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_file_is_merged_over_conf(resolve: Resolve, file: Callable[..., str]) -> None:
    config = resolve("--config", file(), "--predict_data", "hi")
    settings = config.model.model_config
    assert isinstance(settings, LlamaSettings)
    assert (config.seed, config.output_dir, config.model_name) == (7, "./output", "llama2_7b")
    assert (settings.seq_length, settings.num_layers) == (1024, 2)
    assert settings.intermediate_size == 11008
    assert (settings.use_past, settings.do_sample, settings.compute_dtype) == (
        False,
        True,
        "float16",
    )
    assert (config.context.device_target, config.context.device_id) == ("Ascend", 3)
    # A model's name stands for its usual weights; the cards of a file mean nothing without
    # use_parallel.
    assert config.checkpoint_source == "hf://meta-llama/Llama-2-7b-hf"
    assert config.parallel_config.data_parallel == 1
    assert config.processor.tokenizer.tokenizer_file == "/t/tokenizer.model"


def test_ignored_keys_are_one_note(notes: Notes, file: Callable[..., str]) -> None:
    path = file()
    [note] = notes("--config", path, "--predict_data", "hi")
    assert note.startswith(f"no effect here, of {path}: callbacks, moe_config, optimizer")
    for part in ("parallel_config", "context (save_graphs)", "tokenizer (pad_token)"):
        assert part in note
    assert "multiple_of" not in note and "optimizer." not in note
    [note] = notes("--config", path, "--predict_data", "hi", "--device_target", "CPU")
    assert "context (ascend_config, max_device_memory, save_graphs)" in note


def test_a_top_p_of_zero_is_the_likeliest_token(resolve: Resolve, file: Callable[..., str]) -> None:
    for path in (file("top_k: 3", "top_p: 0"), file("seed: 7", "generation_config: {top_p: 0}")):
        settings = resolve("--config", path, "--predict_data", "hi").model.model_config
        assert (settings.top_p, settings.top_k) == (1.0, 1)


def test_the_settings_of_a_card(resolve: Resolve, faults: Faults, file: Callable[..., str]) -> None:
    context = resolve("--config", file(), "--predict_data", "hi").context
    assert context.max_device_memory == "58GB"
    assert context.ascend_config == {"precision_mode": "must_keep_origin_dtype"}
    typed = [
        *("--config", file(), "--predict_data", "hi", "context.max_device_memory=3.5GB"),
        "context.ascend_config.jit_compile=true",
    ]
    context = resolve(*typed).context
    assert context.max_device_memory == "3.5GB"
    settings = {"precision_mode": "must_keep_origin_dtype", "jit_compile": True}
    assert AscendSettings.of(context) == AscendSettings("3.5GB", settings)
    for size in ("58", "0GB", "58gb", "x"):
        errors = faults(*typed, f"context.max_device_memory={size}")
        assert "expected gigabytes as 58GB or 3.5GB" in errors
    errors = faults(*typed, "context.ascend_config.precision_mod=x")
    assert "MindSpore has no such setting of Ascend; did you mean precision_mode?" in errors


def test_the_command_line_wins_over_the_file(resolve: Resolve, file: Callable[..., str]) -> None:
    config = resolve(
        *("--config", file(), "--seed", "9", "--device_target", "CPU", "--do_sample", "False"),
        *("--load_checkpoint", "/a b/c=d", "--output_dir", "o", "--predict_batch_size", "4"),
        *("--model.model_config.seq_length", "600", "--predict_data", "a\\nb", "c"),
        *("--device_id", "0", "--mode", "0", "--auto_trans_ckpt", "False", "max_new_tokens=3"),
    )
    assert (config.seed, config.context.device_target, config.do_sample) == (9, "CPU", False)
    assert (config.load_checkpoint, config.output_dir) == ("/a b/c=d", "o")
    assert (config.predict_batch_size, config.max_new_tokens) == (4, 3)
    model = config.model_config()
    assert model is not None and model.seq_length == 600
    assert config.predict_data == ("a\nb", "c")


def test_flags_work_without_a_file(resolve: Resolve, notes: Notes, faults: Faults) -> None:
    args = ("--model", "tiny_llama", "--run_mode", "predict", "--predict_data", "hi")
    assert resolve(*args, "--use_parallel", "False").model_name == "tiny_llama"
    [note] = notes(*args, "--batch_size", "4", "--profile", "False")
    assert note == "no effect here, of the flags: runner_config"
    assert resolve(*args, "--profile", "True").profile
    assert "--foo.bar 3: no such key" in faults(*args, "--foo.bar", "3")
    assert "did you mean --context.mode?" in faults(*args, "--context.mod", "3")


@pytest.mark.parametrize(
    ("replacements", "expected"),
    [
        (["seed: 7", "sed: 7"], "sed: no such key; did you mean seed?; ~sed leaves it out (in"),
        (["callbacks:", "callback:"], "callback: no such key; did you mean callbacks?"),
        (["num_layers", "num_layer"], "did you mean model.model_config.num_layers?"),
        (["max_device_memory", "max_device_memry"], "did you mean context.max_device_memory?"),
        (["seed: 7", "seed: x"], "seed: got 'x', expected an integer"),
        (["top_k: 3", "top_k: 3.5"], "top_k: got 3.5"),
        (["run_mode: 'predict'", "run_mode: trains"], "run_mode: got 'trains' (in the file"),
        (["device_target: Ascend", "device_target: GPU"], "expected one of auto, CPU, Ascend"),
        (["use_parallel: False", "use_parallel: True"], "data_parallel: got 8, expected at most"),
        (["profile: False", "profile: 3"], "profile: got 3, expected true or false"),
        (["auto_trans_ckpt: False", "only_save_strategy: True"], "only_save_strategy=true needs"),
        (["use_past: False", "hidden_act: gelu"], "hidden_act: got 'gelu', expected silu"),
        (
            ["use_past: False", "pet_config: {pet_type: lora, lora_rank: 8}"],
            "pet_config.target_modules: missing; expected a string or a list",
        ),
        (
            ["use_past: False", "pet_config: {pet_type: lora2}"],
            "pet_type: 'lora2' is not available: there are lora, slora, ptuning2 and prefixtuning",
        ),
        (
            ["use_past: False", "pet_config: {pet_type: [lora]}"],
            "pet_type: ['lora'] is not available: there are lora, slora, ptuning2 and prefixtuning",
        ),
        (["seed: 7", "register_path: ./mine"], "it is taken from the command line only"),
        (["run_mode: 'predict'", "run_mode: train"], "finetune_output is empty"),
        (["multiple_of: 256", "multiple_of: x"], "expected numbers"),
        (["multiple_of: 256", "multiple_of: 0"], "expected numbers"),
        (['extend_method: "None"', "extend_method: ALIBI"], "extend_method: got 'ALIBI'"),
        (["context: {mode: 0,", "context: 3\nx: {mode: 0,"], "context: got 3, expected a section"),
        (["LlamaForCausalLM", "Llama4"], "Llama4 is not supported"),
        (
            ["model_name: 'llama2_7b'", "model_name: mine", "hidden_size: 4096", "theta: 1.0e+4"],
            "hidden_size: missing; a model that is not in conf/model needs it",
        ),
    ],
)
def test_errors_in_a_file_are_refused(
    faults: Faults, file: Callable[..., str], replacements: list[str], expected: str
) -> None:
    assert expected in faults("--config", file(*replacements), "--predict_data", "hi")


def test_a_key_of_a_file_is_left_out(
    resolve: Resolve, faults: Faults, file: Callable[..., str]
) -> None:
    path = file("seed: 7", "seed: 7\nmy: {key: null}")
    line = ("--config", path, "predict_data=hi")
    assert "my: no such key; ~my leaves it out" in faults(*line)
    assert resolve(*line, "~my").seed == 7
    several = resolve("--config", path, "--predict_data", "hi", "~my").predict_data
    assert several == "hi"
    assert resolve(*line, "~my.key", "~my").seed == 7
    assert resolve(*line, "~my", "~seed=7").seed != 7
    assert "~seed: a key cannot be left out" in faults(*line, "~my", "~seed=8")
    assert "~yours" in faults(*line, "~my", "~yours")
    path = file("seed: 7", 'seed: 7\n"my.key": 3')
    assert resolve("--config", path, "predict_data=hi", "~my.key").seed == 7


def test_the_adapters_of_slora(resolve: Resolve, file: Callable[..., str]) -> None:
    path = file("use_past: False", "pet_config: {pet_type: slora, adapter_path: a.json}")
    flags = ["--predict_data", "hi", "--load_checkpoint", "x.ckpt", "--adapter_id", "mine"]
    config = resolve("--config", path, *flags)
    assert (config.adapter_path, config.adapter_id) == ("a.json", "mine")


def test_a_model_of_ones_own(resolve: Resolve, file: Callable[..., str]) -> None:
    path = file("'llama2_7b'", "mine", "checkpoint_name_or_path: llama2_7b", "theta: 5.0e+5")
    config = resolve("--config", path, "--predict_data", "hi", "--load_checkpoint", "x.ckpt")
    assert config.model_name == "mine"
    model = config.model_config()
    assert model is not None and (model.num_layers, model.rotary.theta) == (2, 500000.0)


def test_a_file_of_another_family_than_the_model_chosen(
    faults: Faults, file: Callable[..., str]
) -> None:
    message = faults("--config", file(), "model=bloom_560m", "--predict_data", "hi")
    assert "got 'LlamaForCausalLM'" in message and "chosen is BloomLMHeadModel" in message


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("extend_method: PI\n    scaling_factor: 4.0", ("linear", 4.0, 256)),
        ("extend_method: PI\n    pretrain_seqlen: 512", ("linear", 2.0, 512)),
        ("extend_method: PI\n    pretrain_seqlen: 2048", None),
        (
            "extend_method: LLAMA3\n    scaling_factor: {factor: 8.0, low_freq_factor: 1.0,"
            " high_freq_factor: 4.0, original_max_position_embeddings: 512}",
            ("llama3", 8.0, 512),
        ),
        (
            "extend_method: YARN\n    scaling_factor: {factor: 2.0, beta_fast: 32.0,"
            " beta_slow: 1.0, original_max_position_embeddings: 512}",
            ("yarn", 2.0, 512),
        ),
    ],
)
def test_longer_contexts_of_mindformers(
    resolve: Resolve, file: Callable[..., str], lines: str, expected: tuple[str, float, int] | None
) -> None:
    path = file('extend_method: "None"', lines)
    model = resolve("--config", path, "--predict_data", "hi").model_config()
    assert model is not None
    rope = model.rotary.scaling
    assert (rope and (rope.type, rope.factor, rope.original_seq_length)) == expected


@pytest.mark.parametrize(
    ("mscales", "expected"),
    [
        ("mscale: 0.0, mscale_all_dim: 1.0", 1 / (0.1 * math.log(2) + 1)),
        ("mscale: 0.7, mscale_all_dim: 0.0", 0.07 * math.log(2) + 1),
        ("mscale: 1.0, mscale_all_dim: 1.0", 1.0),
    ],
)
def test_yarn_of_mindformers_scales_by_the_quotient_of_mscales(
    resolve: Resolve, file: Callable[..., str], mscales: str, expected: float
) -> None:
    """FreqsMgr of MindFormers 1.3.2 to 1.9 divides even where one of them is 0."""
    yarn = (
        "extend_method: YARN\n    scaling_factor: {factor: 2.0, beta_fast: 32.0, beta_slow: 1.0,"
        f" original_max_position_embeddings: 512, {mscales}}}"
    )
    path = file('extend_method: "None"', yarn)
    model = resolve("--config", path, "--predict_data", "hi").model_config()
    assert model is not None and model.rotary.scaling is not None
    assert model.rotary.scaling.attention_factor == pytest.approx(expected, rel=1e-12)


def test_ntk_of_mindformers_widens_the_base(resolve: Resolve, file: Callable[..., str]) -> None:
    path = file('extend_method: "None"', "extend_method: NTK\n    scaling_factor: 2.0")
    model = resolve("--config", path, "--predict_data", "hi").model_config()
    assert model is not None and model.rotary == Rotary(20000.0)


@pytest.mark.parametrize(
    ("hidden", "multiple", "multiplier", "expected"),
    [(4096, 256, None, 11008), (5120, 256, None, 13824), (8192, 4096, 1.3, 28672)],
)
def test_feed_forward_widths_of_llama2(
    hidden: int, multiple: int, multiplier: float | None, expected: int
) -> None:
    assert feed_forward_width(hidden, multiple, multiplier) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file"),
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"a: [1, 2", "broken yaml"),
        (b"\xff\xfe\xff", "broken yaml"),
        (b"- 1\n", "got a list, expected sections"),
        (b"text", "got a str, expected sections"),
        (b"a: 1\na: 2\n", "the key 'a' is given twice"),
        (b"a: !!python/object/apply:os.system [ls]", "broken yaml"),
        (b"a: " + b"[" * 10**6, "nested too deeply"),
        (b"a: 2024-99-99", "broken yaml"),
        (b"x: '" + b"a" * (1 << 20) + b"'", "not a config"),
    ],
)
def test_a_yaml_that_is_no_config_is_refused(
    tmp_path: Path,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    expected: str,
) -> None:
    monkeypatch.setattr(yaml_file, "MAX_CONFIG_BYTES", 1 << 20)
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        read_yaml(path)
    message = faults("--config", str(path), "model=tiny_llama", "foo=1", "--predict_data", "x")
    assert expected in message and "foo=1: no such key" in message


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([{}])


@given(data=st.data())
def test_any_change_to_a_file_is_read_or_refused(resolve: Resolve, data: st.DataObject) -> None:
    raw = yaml.safe_load(LLAMA)
    section = raw
    while True:
        name = data.draw(st.sampled_from(sorted(section)))
        if not isinstance(section[name], dict) or data.draw(st.booleans()):
            break
        section = section[name]
    section[name] = data.draw(SCALARS | st.dictionaries(st.text(), SCALARS))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(raw, file, allow_unicode=True)
        file.flush()
        with contextlib.suppress(ConfigError):
            assert resolve("--config", file.name, "--predict_data", "x").run_mode == "predict"


def test_small_things_of_yaml(resolve: Resolve, file: Callable[..., str]) -> None:
    path = file("load_checkpoint: ''", "load_checkpoint:", "1.0e-5", "1e-6")
    config = resolve("--config", path, "--predict_data", "x")
    model = config.model_config()
    assert config.load_checkpoint == "" and model is not None and model.norm_eps == 1e-6


def test_an_output_folders_config_runs_again(resolve: Resolve, tmp_path: Path) -> None:
    config = resolve("model=tiny_qwen2", "predict_data=['${x}','b']", "seed=4", "stop=a")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.to_dict(), allow_unicode=True), encoding="utf-8")
    assert resolve("--config", str(path)) == config


@pytest.mark.parametrize(
    "line",
    [
        *("use_kvcache_op: True", "is_flexible_shape: True", "use_prompt_flash_attention: True"),
        *("mlp_concat: True", "max_position_embeddings: 4096", "embedding_dropout_prob: 0.1"),
        *("params_dtype: bfloat16", "layernorm_compute_dtype: float32", "rotary_dtype: float16"),
    ],
)
def test_keys_without_effect_are_taken_and_listed(
    notes: Notes, file: Callable[..., str], line: str
) -> None:
    [note] = notes("--config", file("use_past: False", line), "--predict_data", "hi")
    name = line.partition(":")[0]
    assert name in note or name == "max_position_embeddings"  # of gpt2 it means something


def test_the_activations_that_a_network_has(resolve: Resolve, faults: Faults) -> None:
    flags = ["--model", "gpt2", "--predict_data", "hi", "--model.model_config.hidden_act"]
    for name, expected in (("gelu", None), ("fast_gelu", "quick_gelu"), ("relu", "relu")):
        model = resolve(*flags, name).model_config()
        assert model is not None and model.feed_forward.activation == expected
    assert "got 'silu', expected one of gelu, fast_gelu" in faults(*flags, "silu")


@pytest.mark.parametrize("kind", ["LlamaProcessor", "LLaMATokenizer", "LlamaTokenizerFast"])
def test_names_of_tokenizers(resolve: Resolve, file: Callable[..., str], kind: str) -> None:
    path = file("tokenizer: {type: LlamaTokenizer", f"tokenizer: {{type: {kind}")
    config = resolve("--config", path, "--predict_data", "hi")
    assert config.processor.tokenizer.type.startswith("LlamaTokenizer")


def test_an_empty_vocab_file_is_none(resolve: Resolve, file: Callable[..., str]) -> None:
    path = file("/t/tokenizer.model", "''")
    config = resolve("--config", path, "--predict_data", "hi")
    assert config.processor.tokenizer.tokenizer_file is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["hidden_size: 4096", "hidden_size: 2048"], 5632),
        (["hidden_size: 4096", "hidden_size: 2048\n    multiple_of: 512"], 5632),
        (["hidden_size: 4096", "hidden_size: 2048\n    multiple_of: null"], 5632),
        (["hidden_size: 4096", "hidden_size: 2048\n    ffn_dim_multiplier: 1.3"], 7168),
        (["hidden_size: 4096", "hidden_size: 4096"], 11008),
        (["'llama2_7b'", "mine", "hidden_size: 4096", "hidden_size: 2048"], 5632),
    ],
)
def test_the_feed_forward_width_that_a_file_leaves_out(
    resolve: Resolve, file: Callable[..., str], changed: list[str], expected: int
) -> None:
    path = file("    multiple_of: 256\n", "", *changed)
    model = resolve("--config", path, "--predict_data", "hi").model_config()
    assert model is not None and model.intermediate_size == expected


def test_gpt2_has_the_declared_number_of_positions(resolve: Resolve, faults: Faults) -> None:
    flags = ["--model", "gpt2", "--predict_data", "hi"]
    key = "--model.model_config.max_position_embeddings"
    assert resolve(*flags, key, "1024").model_name == "gpt2"
    assert "got 2048, expected the seq_length of 1024" in faults(*flags, key, "2048")


def test_a_models_name_as_load_checkpoint_is_its_usual_weights(
    resolve: Resolve, file: Callable[..., str]
) -> None:
    flags = ["--predict_data", "hi", "--load_checkpoint"]
    assert resolve("--config", file(), *flags, "llama2_13b").load_checkpoint.startswith("hf://")
    assert resolve("model=gpt2", *flags, "gpt2").load_checkpoint.startswith("hf://")
    assert resolve("model=gpt2", *flags, "gpt2.ckpt").load_checkpoint == "gpt2.ckpt"


def test_parallel_settings_by_name(resolve: Resolve, file: Callable[..., str]) -> None:
    path = file(
        *("use_parallel: False", "use_parallel: True"),
        *("parallel_mode: 1", "parallel_mode: MANUAL_PARALLEL"),
        *("data_parallel: 8", "data_parallel: 1"),
    )
    config = resolve("--config", path, "--predict_data", "hi", "--device_target", "CPU")
    assert (config.parallel.parallel_mode, config.parallel_config.model_parallel) == (1, 2)


def test_keys_of_the_command_line_may_be_wrong_in_the_file(
    resolve: Resolve, file: Callable[..., str]
) -> None:
    path = file("use_parallel: False", "use_parallel: Flase")
    flags = ["--predict_data", "hi", "--use_parallel", "False"]
    assert not resolve("--config", path, *flags).use_parallel


def test_lora_in_the_weights_is_passed_on(resolve: Resolve, file: Callable[..., str]) -> None:
    section = "{pet_type: lora, lora_rank: 4, lora_dropout: 0.1, target_modules: '.*wq'}"
    path = file("use_past: False", f"pet_config: {section}")
    config = resolve("--config", path, "--predict_data", "hi")
    pet = config.model.model_config.pet_config
    assert config.merges_adapter and pet is not None
    assert (pet.lora_rank, pet.lora_alpha, pet.target_modules) == (4, 16.0, ".*wq")


def test_keys_are_listed_by_section() -> None:
    assert format_keys(["b", "a.y", "a.x", "a.x"]) == "b, a (x, y)"


QWEN3 = """
trainer: {type: CausalLanguageModelingTrainer, model_name: 'my_qwen3'}
use_parallel: False
model:
  model_config:
    type: Qwen3Config
    model_type: qwen3
    architectures: [Qwen3ForCausalLM]
    vocab_size: 1024
    hidden_size: 64
    intermediate_size: 128
    num_hidden_layers: 3
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 32
    hidden_act: swiglu
    max_position_embeddings: 4096
    seq_length: 2048
    rms_norm_eps: 1.0e-5
    rope_theta: 5000000.0
    rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 512}
    attention_bias: True
    untie_embeddings_and_output_weights: True
    use_sliding_window: False
    sliding_window: 4096
    max_window_layers: 28
    normalization: RMSNorm
    qk_layernorm: True
    add_bias_linear: False
    gated_linear_unit: True
    position_embedding_type: rope
    qkv_concat: True
    params_dtype: float32
    layernorm_compute_dtype: float32
    block_size: 32
    bos_token_id: 1
    eos_token_id: 2
    pad_token_id: 3
  arch: {type: Qwen3ForCausalLM}
"""


def test_qwen3_by_its_names_in_mindformers(
    resolve: Resolve, faults: Faults, tmp_path: Path
) -> None:
    path = tmp_path / "qwen3.yaml"
    path.write_text(QWEN3, encoding="utf-8")
    line = ("--config", str(path), "--predict_data", "hi", "--load_checkpoint", "random")
    model = resolve(*line).model_config()
    assert model is not None
    assert (model.architecture, model.num_layers, model.num_heads) == ("qwen3", 3, 4)
    assert (model.n_kv_heads, model.head_dim, model.seq_length) == (2, 32, 2048)
    assert model.rotary == Rotary(5e6, RopeScaling("yarn", 4.0, 512))
    attention = model.attention
    assert attention.qkv_bias and attention.out_bias and attention.qk_norm == Norm("rms", 1e-5)
    assert not model.tie_word_embeddings and set(model.windows) == {None}

    path.write_text(QWEN3.replace("use_sliding_window: False", "use_sliding_window: True"))
    assert set(resolve(*line).model_config().windows) == {None}  # the first 28 layers have none
    path.write_text(
        QWEN3.replace("sliding_window: False", "sliding_window: True")
        .replace("sliding_window: 4096", "sliding_window: 9")
        .replace("max_window_layers: 28", "max_window_layers: 1")
    )
    assert resolve(*line).model_config().windows == (None, 9, 9)

    path.write_text(
        QWEN3.replace("qk_layernorm: True", "qk_layernorm: False")
        .replace("normalization: RMSNorm", "normalization: LayerNorm")
        .replace("hidden_act: swiglu", "hidden_act: relu")
        .replace("    num_hidden_layers: 3\n", "")
    )
    text = faults(*line)
    for name in ("qk_layernorm", "normalization", "hidden_act", "num_layers"):
        assert f"model.model_config.{name}:" in text
