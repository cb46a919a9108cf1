"""Models as Cells: parameters, loading into them, and logits from ids, against transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

from lite_runner import (
    AutoModel,
    BloomConfig,
    BloomLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)
from lite_runner.api.network import Network
from lite_runner.errors import ConfigError
from tests.paths import REFERENCE

REFERENCES = REFERENCE
PROMPT = list(b"I love Beijing, because")
OPTIONS = {"max_new_tokens": 6, "eos_token_id": []}


@pytest.fixture
def parallel_mode() -> Iterator[None]:
    """Set by init_context(use_parallel=True); MindSpore lays out networks only with it."""
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    yield
    ms.reset_auto_parallel_context()


@pytest.mark.usefixtures("float32_cache")
@pytest.mark.parametrize(
    ("case", "kind"),
    [("llama", LlamaForCausalLM), ("bloom", BloomLMHeadModel), ("gpt2", GPT2LMHeadModel)],
)
def test_logits_are_those_of_transformers(
    case: str,
    kind: type[Network],
    reference: Callable,
    relative_error: Callable[[np.ndarray, np.ndarray], float],
) -> None:
    expected = reference(case)
    model = AutoModel.from_pretrained(REFERENCES / case)
    assert type(model) is kind and isinstance(model, ms.nn.Cell)
    prompts = expected.prompts[:2]
    length = max(map(len, prompts))
    padded = np.zeros((2, length), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    logits = model(ms.Tensor(padded))
    assert logits.shape == (2, length, expected.config.vocab_size)
    for index, prompt in enumerate(prompts):
        found = logits.asnumpy()[index, len(prompt) - 1]
        assert relative_error(found, expected.logits[index, 0]) < 1e-4
    last = model.construct(padded, batch_valid_length=ms.Tensor([len(one) for one in prompts]))
    every = np.stack([logits.asnumpy()[i, len(one) - 1] for i, one in enumerate(prompts)])
    assert last.shape == every.shape and np.array_equal(last.asnumpy(), every)


def test_logits_in_between_change_no_text(reference: Callable) -> None:
    """They overwrite a slot, whose text the next call may not go on from."""
    prompt = [*range(3, 43)]
    model = AutoModel.from_pretrained(REFERENCES / "llama")
    expected = model.generate(prompt, **OPTIONS)
    assert model.generate(prompt, **OPTIONS) == expected
    model(ms.Tensor(np.full((1, 40), 7, np.int32)))
    assert model.generate(prompt, **OPTIONS) == expected


def test_parameters_have_mindformers_names() -> None:
    model = AutoModel.from_pretrained("tiny_llama")
    held = model.parameters_dict()
    assert [name for name, _ in model.parameters_and_names()] == list(held)
    assert [one.name for one in model.get_parameters()] == list(held)
    assert len(model.trainable_params()) == len(held) == 21
    weight = held["model.layers.0.attention.wq.weight"]
    assert weight.dtype == ms.float32 and weight.shape == (96, 64)


def test_generate_uses_loaded_parameters(tmp_path: Path) -> None:
    """As MindFormers' generate_custom.py and its quantization guide load checkpoints."""
    model, other = (AutoModel.from_pretrained("tiny_llama", seed=seed) for seed in (0, 7))
    mine, theirs = model.generate(PROMPT, **OPTIONS), other.generate(PROMPT, **OPTIONS)
    assert mine != theirs
    path = str(tmp_path / "other.ckpt")
    ms.save_checkpoint(other.parameters_dict(), path)
    assert model.generate(PROMPT, **OPTIONS) == mine  # nothing was written yet
    loaded = ms.load_checkpoint(path)
    assert ms.load_param_into_net(model, loaded) == ([], [])
    assert model.generate(PROMPT, **OPTIONS) == theirs
    last = model(np.array([PROMPT], np.int32)).asnumpy()[0, -1]
    assert last.argmax() == theirs[0][len(PROMPT)]
    by_name = AutoModel.from_pretrained("tiny_llama", seed=3)
    ms.load_checkpoint(path, by_name)
    assert by_name.generate(PROMPT, **OPTIONS) == theirs
    missing = loaded.pop("lm_head.weight").name
    assert ms.load_param_into_net(model, {**loaded, "x": loaded["model.norm_out.weight"]}) == (
        [missing],
        ["x"],
    )
    ms.ops.assign(model.parameters_dict()[missing], ms.Tensor(np.zeros((320, 64), np.float32)))
    zero = model(np.array([PROMPT], np.int32)).asnumpy()
    assert not zero.any()  # each way to write is seen


def test_a_layout_is_inferred_before_loading(tmp_path: Path, parallel_mode: None) -> None:
    network = AutoModel.from_pretrained("tiny_bloom").set_train(False)
    model = ms.train.Model(network)
    model.infer_predict_layout(ms.Tensor(np.ones((1, 64)), ms.int32))
    path = str(tmp_path / "rank_0.ckpt")
    ms.save_checkpoint(AutoModel.from_pretrained("tiny_bloom", seed=5).parameters_dict(), path)
    assert ms.load_param_into_net(network, ms.load_checkpoint(path)) == ([], [])


def test_models_made_of_configs() -> None:
    config = BloomConfig(num_layers=1, hidden_size=32, num_heads=2, vocab_size=64, seq_length=32)
    bloom = BloomLMHeadModel(config)
    assert len(bloom.generate([4, 5, 6], max_new_tokens=4, eos_token_id=[])[0]) == 7
    sizes = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    small = GPT2Config(seq_length=32, **sizes, **ids)
    assert isinstance(AutoModel.from_config(small), GPT2LMHeadModel)
    with pytest.raises(
        ConfigError, match="got the config of a BloomLMHeadModel, expected a LlamaForCausalLM"
    ):
        LlamaForCausalLM(config)
    named = LlamaForCausalLM.from_pretrained("tiny_llama")
    assert type(named) is LlamaForCausalLM
    with pytest.raises(ConfigError, match="expected a GPT2LMHeadModel"):
        GPT2LMHeadModel.from_pretrained("tiny_llama")


@pytest.mark.parametrize("ids", [[1, 2], [[400]], [[-1]], [[1.5]], [[]], [[1] * 257]])
def test_ids_that_do_not_fit(ids: list) -> None:
    model = AutoModel.from_pretrained("tiny_llama")
    with pytest.raises(ConfigError, match=r"0 to 319 of shape \[batch, n\], n at most 256"):
        model(np.array(ids))


def test_importing_automodel_does_not_import_mindspore() -> None:
    code = (
        "import sys; from lite_runner import AutoConfig, AutoModel, AutoTokenizer, pipeline;"
        "AutoConfig.from_pretrained('tiny_llama'); print('mindspore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_script_may_have_computed_with_tensors_before(tmp_path: Path) -> None:
    code = (
        "import mindspore as ms; from lite_runner import AutoModel, AutoTokenizer;"
        "ids = AutoTokenizer.from_pretrained('tiny_llama')('ab', return_tensors='ms').input_ids;"
        "print(ids[0] + 1);"
        "print(AutoModel.from_pretrained('tiny_llama', threads=1).generate(ids, max_new_tokens=1))"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("[98 99]\n[[97, 98, "), done.stderr


def test_parameters_of_quantized_weights_are_reported_as_floats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As mindspore.save_checkpoint(model.parameters_dict()) writes them."""
    name = "model.layers.0.feed_forward.w2.weight"
    held = AutoModel.from_pretrained("tiny_llama", quant="a16w8").parameters_dict()
    assert "run_mode=quantize writes the integers" in capsys.readouterr().err
    floats = AutoModel.from_pretrained("tiny_llama").parameters_dict()
    assert "run_mode=quantize" not in capsys.readouterr().err
    assert held[name].dtype == ms.float32
    near, exact = held[name].asnumpy(), floats[name].asnumpy()
    assert 0 < np.abs(near - exact).max() < np.abs(exact).max() / 100
