"""The adapter that a config merges into its model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lite_runner.config.schema import AdapterOptions, RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.adapters import adapters_of, with_adapter
from lite_runner.model.locate import locate
from tests.paths import FIXTURES, REFERENCE

Configure = Callable[..., RunConfig]
MERGE = ["run_mode=convert", "convert_output=x.safetensors", "merge=true"]
LLAMA = ["model=auto", f"load_checkpoint={REFERENCE / 'llama'}"]
ADAPTERS = f"adapter_path={FIXTURES / 'adapters/llama'}"


def of(config: RunConfig) -> AdapterOptions:
    assert isinstance(config, AdapterOptions)
    return config


def test_one_adapter_is_merged_once(configure: Configure) -> None:
    config = of(configure(*MERGE, *LLAMA, f"{ADAPTERS}/ends"))
    plain = locate(config.source)
    files = with_adapter(plain, config.adapters)
    assert files.base == plain.model and files.adapter is not None
    assert with_adapter(files, config.adapters) is files
    changed = {
        name
        for name, tensor in files.whole().items()
        if not np.array_equal(tensor.float32(), plain.whole()[name].float32())
    }
    assert changed == files.adapter.pairs.keys()


def test_without_adapter_path_nothing_is_merged(configure: Configure) -> None:
    config = of(configure(*LLAMA))
    assert with_adapter(locate(config.source), config.adapters).adapter is None


def test_of_several_one_is_to_be_named(configure: Configure) -> None:
    config = of(configure(*MERGE, *LLAMA, ADAPTERS))
    names = list(adapters_of(config.adapters, locate(config.source).model))
    with pytest.raises(ConfigError, match=f"lists {len(names)} adapters, one can be merged"):
        with_adapter(locate(config.source), config.adapters)
    one = of(configure(*MERGE, *LLAMA, ADAPTERS, f"adapter_id={names[1]}"))
    assert list(adapters_of(one.adapters, locate(one.source).model)) == names[1:2]
    assert list(adapters_of(one.adapters, locate(one.source).model, names[:1])) == names[:1]


def test_pet_type_lora_needs_lora_weights(configure: Configure) -> None:
    pet = "{pet_type: lora, lora_rank: 8, lora_alpha: 16, target_modules: .*wq}"
    with pytest.raises(ArtifactError, match="holds no LoRA weights"):
        locate(configure(*LLAMA, f"model.model_config.pet_config={pet}").source)
