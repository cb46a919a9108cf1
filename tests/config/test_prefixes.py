from __future__ import annotations

import pytest

from lite_runner.architectures.spec import Prefix
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prefixes import check_prefixes, with_ending
from lite_runner.errors import ConfigError

PREFIX = Prefix(124, (121, 120))
PLAIN = GenerationConfig()


def test_prompts_of_other_models_need_nothing() -> None:
    check_prefixes(None, [[5]], [GenerationConfig(prompt_logprobs=0)])


def test_each_prompt_that_lacks_something_is_named() -> None:
    check_prefixes(PREFIX, [[5, 121, 124, 7]], [PLAIN])
    with pytest.raises(ConfigError) as caught:
        check_prefixes(PREFIX, [[5], [5, 121, 124], [5, 124]], [PLAIN] * 3)
    assert "prompt 0 has no token 124 (sop)" in caught.value.message
    assert "prompt 2 has no token 121 or 120" in caught.value.message
    assert "prompt 1" not in caught.value.message
    with pytest.raises(ConfigError, match=r"a\.txt has no token 124"):
        check_prefixes(PREFIX, [[5]], [PLAIN], ["a.txt"])


def test_a_prompt_has_no_likelihood() -> None:
    with pytest.raises(ConfigError, match="prompt_logprobs: each token of a prefix sees"):
        check_prefixes(PREFIX, [[5, 121, 124]], [GenerationConfig(prompt_logprobs=0)])


def test_a_text_is_ended() -> None:
    assert with_ending(PREFIX, [5, 6]) == [5, 6, 121, 124]
    assert with_ending(PREFIX, [5, 121, 124, 6]) == [5, 121, 124, 6]
    assert with_ending(None, [5, 6]) == [5, 6]
