"""DeepSeek's config.json; its logits are compared with those of all families."""

from __future__ import annotations

import json

import pytest

from lite_runner.errors import ArtifactError
from lite_runner.weights.formats import model_config_from_hf
from tests.paths import REFERENCE


def test_groups_count_only_where_experts_are_chosen_by_groups() -> None:
    raw = json.loads((REFERENCE / "deepseek_v2/config.json").read_text())
    for method, groups in (("group_limited_greedy", 4), ("greedy", 1)):
        model = model_config_from_hf(raw | {"topk_method": method}, "config.json")
        assert model.sparse is not None and model.sparse.experts is not None
        assert model.sparse.experts.groups == groups


def test_normed_probabilities_of_v2_are_refused() -> None:
    """The published code leaves out the scale with them; transformers does not norm them at all."""
    raw = json.loads((REFERENCE / "deepseek_v2/config.json").read_text())
    with pytest.raises(ArtifactError, match="norm_topk_prob=true is not supported"):
        model_config_from_hf(raw | {"norm_topk_prob": True}, "config.json")
