"""Blocks that differ in the values of their weights alone are compiled as one graph."""

from __future__ import annotations

from types import SimpleNamespace

import mindspore as ms
import pytest

from lite_runner.architectures import by_role
from lite_runner.architectures.spec import Decoder
from lite_runner.networks import decoder
from lite_runner.networks.decoder import DecoderCell, network_of
from lite_runner.networks.layers import BuildOptions, CacheSize
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.lora.adapter import LoraSize
from lite_runner.weights.read_ahead import ReadAhead
from tests.models import reference_model
from tests.sizes import resized

LLAMA = resized(reference_model("llama"), num_layers=3)


def graphs(model: Decoder, lora: LoraSize | None = None) -> list[str | None]:
    """The names of the blocks' graphs; None: its own."""
    options = BuildOptions(CacheSize(2, 16), ms.float32, lora=lora)
    network = network_of(model, ReadAhead(random_checkpoint(model, 0)), options)
    return [getattr(block, "_cell_init_args", None) for block in network.blocks]


def test_blocks_of_one_description_share_a_graph() -> None:
    first, second, third = graphs(LLAMA)
    assert first == second == third
    assert first


def test_blocks_of_other_descriptions_have_other_graphs() -> None:
    windowed, whole = graphs(reference_model("gemma2"))
    assert windowed != whole


def test_blocks_with_other_adapters_have_other_graphs() -> None:
    names = {
        name: by_role(LLAMA)[role, layer, "weight"].name
        for name, role, layer in (("down", "down", 1), ("key", "key", 0), ("value", "value", 1))
    }
    plain, adapted, again = graphs(LLAMA, LoraSize(1, 2, frozenset([names["down"]])))
    assert plain == again != adapted
    # Keys and values are of one shape.
    both = frozenset([names["key"], names["value"]])
    assert len(set(graphs(LLAMA, LoraSize(1, 2, both)))) == 3


def test_blocks_of_users_networks_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be changed after they are built."""
    own = SimpleNamespace(network=DecoderCell)
    monkeypatch.setattr(decoder, "custom_network", lambda model: own)
    assert set(graphs(LLAMA)) == {None}
