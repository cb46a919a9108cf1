"""Adapters of model objects: named in a call, for each prompt, as the command line has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest

from lite_runner import AutoConfig, AutoModel, AutoTokenizer, pipeline
from lite_runner.api import loaded_model
from lite_runner.api.network import Network
from lite_runner.app import main
from lite_runner.backends import Backend
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.plan.resources import open_backend
from tests.paths import FIXTURES

ADAPTERS = FIXTURES / "adapters/llama"
CASE = FIXTURES / "reference/llama"
pytestmark = pytest.mark.usefixtures("float32_cache")


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lora_adapter.json as MindFormers documents it: absolute paths. One of them is broken."""
    file = tmp_path_factory.mktemp("lists") / "lora_adapter.json"
    names = [*json.loads((ADAPTERS / "lora_adapter.json").read_text()), "broken"]
    file.write_text(json.dumps({name: str(ADAPTERS / name) for name in names}))
    return file


@pytest.fixture(scope="module")
def model(listing: Path) -> Network:
    return network(listing)


def network(listing: Path) -> Network:
    config = AutoConfig.from_pretrained(CASE)
    config.pet_config = {"pet_type": "slora", "adapter_path": str(listing)}
    return AutoModel.from_config(config)


GREEDY = {"max_new_tokens": 3, "eos_token_id": []}


def test_each_adapter_and_one_for_each_prompt_equal_peft(model: Network) -> None:
    expected = dict(np.load(ADAPTERS / "expected.npz"))
    prompts = expected["prompts"].tolist()
    names = [None, *json.loads((ADAPTERS / "lora_adapter.json").read_text())]
    wanted = [(name, expected["logits"][number, :, 0]) for number, name in enumerate(names)]
    for numbers, logits in zip(expected["mixed_adapters"], expected["mixed_logits"], strict=True):
        wanted.append(([names[number] for number in numbers], logits[:, 0]))
    options = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": -1}
    for adapter_id, logits in wanted:
        (got,) = model.generate(
            prompts, adapter_id=adapter_id, max_new_tokens=1, eos_token_id=[], **options
        )["logits"]
        assert np.abs(got - logits).max() < 2e-5 * np.abs(logits).max(), adapter_id


def test_the_only_adapter_is_meant_without_a_name() -> None:
    name = next(iter(json.loads((ADAPTERS / "lora_adapter.json").read_text())))
    alone = AutoModel.from_pretrained(CASE, adapter_path=str(ADAPTERS / name))
    found = alone.generate([5, 6, 7], **GREEDY)
    assert found == alone.generate([5, 6, 7], adapter_id=name, **GREEDY)
    assert alone.generate([5, 6, 7], adapter_id="base", **GREEDY) == AutoModel.from_pretrained(
        CASE
    ).generate([5, 6, 7], **GREEDY)


def test_the_base_and_what_is_unknown(model: Network) -> None:
    plain = AutoModel.from_pretrained(CASE)
    prompt = [5, 6, 7]
    base = plain.generate(prompt, **GREEDY)
    for none in (None, "None", "none", "", ["null"]):
        assert model.generate(prompt, adapter_id=none, **GREEDY) == base
    assert plain.generate(prompt, adapter_id="None", **GREEDY) == base
    assert model.generate(prompt, adapter_id="all", **GREEDY) != base
    with pytest.raises(ArtifactError, match="no adapter 'al'; did you mean all"):
        model.generate(prompt, adapter_id="al")
    with pytest.raises(ArtifactError, match=r"adapter broken: .*: no such folder"):
        model.generate(prompt, adapter_id="broken")
    with pytest.raises(ConfigError, match="got 2 for 1 prompt"):
        model.generate(prompt, adapter_id=["all", None])
    with pytest.raises(ConfigError, match="adapter_id=all needs adapter_path="):
        plain.generate(prompt, adapter_id="all")


@pytest.fixture
def has_loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """True if weights were loaded since the last call."""
    loads: list[ModelFiles] = []

    def counted(files: ModelFiles, *options: Any) -> Backend:
        loads.append(files)
        return open_backend(files, *options)

    def since() -> bool:
        found = bool(loads)
        loads.clear()
        return found

    monkeypatch.setattr(loaded_model, "open_backend", counted)
    return since


def test_all_are_loaded_at_once(listing: Path, has_loaded: Callable[[], bool]) -> None:
    model = network(listing)
    model.generate([5, 6, 7], adapter_id="patterns", **GREEDY)
    assert has_loaded()
    for name in (None, "rank_64", "all"):
        model.generate([5, 6, 7], adapter_id=name, **GREEDY)
    assert not has_loaded()


def test_adapters_listed_later_need_no_reload(
    tmp_path: Path, has_loaded: Callable[[], bool]
) -> None:
    listing = tmp_path / "lora_adapter.json"

    def list_(**folders: str) -> None:
        listing.write_text(json.dumps({name: str(ADAPTERS / of) for name, of in folders.items()}))

    list_(large="all")
    model = AutoModel.from_pretrained(CASE, adapter_path=str(listing))
    base = model.generate([5, 6, 7], adapter_id="base", **GREEDY)
    large = model.generate([5, 6, 7], adapter_id="large", **GREEDY)
    assert has_loaded()
    list_(large="all", part="patterns")
    known = AutoModel.from_pretrained(CASE, adapter_path=str(listing))
    part = known.generate([5, 6, 7], adapter_id="part", **GREEDY)
    assert has_loaded()
    assert model.generate([5, 6, 7], adapter_id="part", **GREEDY) == part
    list_(large="patterns", part="patterns", again="all")  # another one of its name
    assert model.generate([5, 6, 7], adapter_id="again", **GREEDY) == large
    assert model.generate([5, 6, 7], adapter_id="large", **GREEDY) == part
    assert model.generate([5, 6, 7], **GREEDY) == base
    assert not has_loaded()
    list_(large="all", wide="rank_64")  # which finds no room
    assert model.generate([5, 6, 7], adapter_id="wide", **GREEDY) not in (base, part, large)
    assert model.generate([5, 6, 7], adapter_id="large", **GREEDY) == large
    assert has_loaded()


def test_in_a_pipeline(tmp_path: Path) -> None:
    byte = AutoModel.from_pretrained("tiny_llama")  # has a tokenizer
    with pytest.raises(ConfigError, match="adapter_id=en needs adapter_path="):
        pipeline("text_generation", byte, adapter_id="en")("ab")
    assert pipeline("text_generation", byte)("ab", adapter_id=None, **GREEDY) == pipeline(
        "text_generation", byte
    )("ab", adapter_id=["None"], **GREEDY)


def test_some_may_be_loaded_at_a_time(listing: Path) -> None:
    settings = {"adapter_path": str(listing), "max_loaded_adapters": 1, "adapter_dtype": "bf16"}
    model = AutoModel.from_pretrained(CASE, **settings)
    prompts = [[5, 6, 7]] * 3
    together = model.generate(prompts, adapter_id=["all", None, "rank_64"], **GREEDY)
    alone = [model.generate([5, 6, 7], adapter_id=n, **GREEDY)[0] for n in ("all", "", "rank_64")]
    assert together == alone
    assert model.config.max_loaded_adapters == 1


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as MindFormers 1.0.2 saves a network with pet_type=lora: one file with both."""
    folder = tmp_path_factory.mktemp("lora")
    settings = ["run_mode=convert", "model=auto", f"load_checkpoint={CASE}", "verbosity=0"]
    assert main([*settings, "convert_format=ckpt", f"convert_output={folder}/base.ckpt"]) == 0
    one = [f"adapter_path={ADAPTERS}", "adapter_id=all", "convert_format=mindformers"]
    assert main([*settings, *one, f"convert_output={folder}/all"]) == 0
    weights = ms.load_checkpoint(str(folder / "base.ckpt"))
    for name, value in ms.load_checkpoint(str(folder / "all/adapter_model.ckpt")).items():
        renamed = name.replace(".lora_", ".mindpet_delta_lora_")
        weights[renamed.replace("delta_mindpet_delta_", "delta_")] = value
    (folder / "both").mkdir()
    ms.save_checkpoint(
        [{"name": name, "data": value} for name, value in weights.items()],
        str(folder / "both/lora.ckpt"),
    )
    (folder / "both/config.json").write_text((CASE / "config.json").read_text())
    return folder


LORA = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.05}


def test_lora_in_the_checkpoint_equals_peft(finetuned: Path) -> None:
    expected = dict(np.load(ADAPTERS / "expected.npz"))
    prompts = expected["prompts"].astype(np.int32)
    modules = ".*wq|.*wk|.*wv|.*wo|.*w1|.*w2|.*w3"
    pet = {**LORA, "target_modules": modules}
    own = AutoConfig.from_pretrained(finetuned / "both", pet_config=pet)
    path = str(finetuned / "all")
    beside = AutoConfig.from_pretrained(CASE, pet_config=pet, adapter_path=path)
    wanted = expected["logits"][1, :, 0]
    for config in (own, beside):
        model = AutoModel.from_config(config)
        got = model(prompts).asnumpy()[:, -1]
        assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max()
        with pytest.raises(ConfigError, match="merges one adapter for all prompts"):
            model.generate([5, 6], adapter_id="all")


def test_lora_weights_that_are_loaded_later(finetuned: Path, tmp_path: Path) -> None:
    """As the documents' distributed way: the network is made without weights, with pet_config."""
    expected = dict(np.load(ADAPTERS / "expected.npz"))
    prompts = expected["prompts"].astype(np.int32)
    pet = {**LORA, "target_modules": ".*wq|.*wk|.*wv|.*wo|.*w1|.*w2|.*w3"}
    config = AutoConfig.from_pretrained(finetuned / "both", pet_config=pet)
    config.checkpoint_name_or_path = None
    network = AutoModel.from_config(config)
    plain = network(prompts).asnumpy()
    held = network.parameters_dict()
    assert held["model.layers.0.attention.wq.mindpet_delta_lora_a"].shape[0] == 8
    assert np.array_equal(network(prompts).asnumpy(), plain)  # B is zero
    both = ms.load_checkpoint(str(finetuned / "both/lora.ckpt"))
    assert ms.load_param_into_net(network, both) == ([], [])
    wanted = expected["logits"][1, :, 0]
    got = network(prompts).asnumpy()[:, -1]
    assert np.abs(got - wanted).max() < 2e-5 * np.abs(wanted).max()
    own = AutoModel.from_pretrained(finetuned / "both", pet_config=pet).parameters_dict()
    assert own.keys() == held.keys()
    for name, value in own.items():
        assert np.array_equal(value.asnumpy(), both[name].asnumpy()), name
    path = str(tmp_path / "again.ckpt")
    ms.save_checkpoint(network.parameters_dict(), path)
    again = AutoModel.from_pretrained(CASE, pet_config=pet, checkpoint_name_or_path=path)
    assert np.array_equal(again(prompts).asnumpy()[:, -1], got)
    config.pet_config = {**LORA, "target_modules": ".*query"}
    with pytest.raises(ArtifactError, match=r"pet_config: target_modules '.*query' matches no"):
        AutoModel.from_config(config)


def test_a_pipeline_takes_a_pet_config(finetuned: Path) -> None:
    """pipeline(..., config=PetConfig), an object with MindFormers' to_dict."""
    pet = {**LORA, "target_modules": ".*wq|.*wk|.*wv|.*wo|.*w1|.*w2|.*w3"}

    class PetConfig:
        def to_dict(self) -> dict[str, object]:
            return pet

    tokenizer = AutoTokenizer.from_pretrained("tiny_llama")
    options = {**GREEDY, "add_special_tokens": False}
    folder = finetuned / "both"
    answers = pipeline("text_generation", folder, tokenizer, config=PetConfig())("AB", **options)
    model = AutoModel.from_pretrained(folder, pet_config=pet)
    assert answers == pipeline("text_generation", model, tokenizer)("AB", **options)
    base = AutoModel.from_pretrained(CASE)
    assert answers != pipeline("text_generation", base, tokenizer)("AB", **options)
    with pytest.raises(ConfigError, match="config= cannot be given with a model object"):
        pipeline("text_generation", model, tokenizer, config=PetConfig())


def test_lora_weights_that_are_missing_or_not_told_of(finetuned: Path) -> None:
    bare = AutoModel.from_pretrained(finetuned / "both")
    with pytest.raises(ArtifactError, match="holds LoRA weights beside the model's, such as"):
        bare.generate([5, 6], **GREEDY)
    none = AutoConfig.from_pretrained(CASE, pet_config={**LORA, "target_modules": ".*wq"})
    with pytest.raises(ArtifactError, match="the checkpoint holds no LoRA weights"):
        AutoModel.from_config(none)
    few = {**LORA, "target_modules": ".*wq"}
    with pytest.raises(ArtifactError, match=r"does not fit the model and lora.ckpt"):
        AutoModel.from_pretrained(finetuned / "both/lora.ckpt", pet_config=few)
    wide = {**LORA, "lora_rank": 4, "target_modules": ".*wq|.*wk|.*wv|.*wo|.*w1|.*w2|.*w3"}
    with pytest.raises(ArtifactError, match="r is 4"):
        AutoModel.from_pretrained(finetuned / "both", pet_config=wide)


def test_a_run_needs_the_lora_weights_of_pet_config(capsys: pytest.CaptureFixture[str]) -> None:
    pet = "{pet_type: lora, target_modules: .*wq}"
    line = ["model=tiny_llama", "predict_data=x", f"model.model_config.pet_config={pet}"]
    assert main(line) == 2
    assert "random weights have no LoRA weights" in capsys.readouterr().err
