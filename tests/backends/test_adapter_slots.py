"""Adapters in slots: loading, eviction, memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from lite_runner.app import main
from lite_runner.backends.adapter_slots import AdapterSlots
from lite_runner.backends.mindspore.backend import CellPools
from lite_runner.backends.mindspore.device import set_device
from lite_runner.errors import ConfigError
from lite_runner.networks.lora import EmbeddingLora, Lora
from lite_runner.weights import LazyTensor
from lite_runner.weights.lora.adapter import Adapter, LoraPair, LoraSize, pool_size
from tests.doc_folder import write_adapter

set_device("CPU", 0)  # before the first operator: later tests of the process want to do it again

LAYERS = {"q": (6, 4), "k": (6, 2)}  # name -> [in, out]
TABLE, VOCABULARY, HIDDEN = "table", 5, 3


class Network(nn.Cell):
    def __init__(self, size: LoraSize) -> None:
        super().__init__()
        dtype = Tensor(np.zeros(1, np.float32)).dtype
        self.lora = Lora(size, LAYERS, dtype)
        self.embedding = EmbeddingLora(size, TABLE, (VOCABULARY, HIDDEN), dtype)


def adapter(number: int, rank: int, *names: str) -> Adapter:
    """A is full of `number`, B of 10 * `number`; the scale is 0.5."""

    def filled(value: float, *shape: int) -> LazyTensor:
        return LazyTensor(shape, "F32", lambda: np.full(shape, value, np.float32))

    widths = LAYERS | {TABLE: (VOCABULARY, HIDDEN)}
    pairs = {
        name: LoraPair(
            filled(number, rank, widths[name][0]), filled(10 * number, widths[name][1], rank), 0.5
        )
        for name in names
    }
    return Adapter(f"a{number}", Path(), pairs)


def slots_of(adapters: list[Adapter], count: int) -> tuple[AdapterSlots, Network]:
    size = pool_size(adapters, count)
    network = Network(size)
    return AdapterSlots(CellPools(network, size), adapters, size), network


def values(parameter: Parameter) -> np.ndarray:
    """[.., 2 slots, R = 4, width]."""
    array = parameter.asnumpy()
    return array.reshape(-1, 2, 4, array.shape[1])


def test_ranks_are_filled_up_and_what_was_there_before_is_gone() -> None:
    adapters = [adapter(1, 4, "q", "k", TABLE), adapter(2, 1, "k"), adapter(3, 2, "q")]
    slots, network = slots_of(adapters, 2)
    assert (slots.pin("a1"), slots.pin("a2")) == (0, 1)
    a, b = network.lora.a, network.lora.b
    assert (values(a)[:, 0] == 1).all() and (values(b[0])[0, 0] == 5).all()
    assert values(a)[:, 1].any(-1).tolist() == [[False] * 4, [True] + [False] * 3]
    slots.unpin("a1")
    assert slots.pin("a3") == 0
    assert values(a)[:, 0].any(-1).tolist() == [[True, True, False, False], [False] * 4]
    assert values(b[0])[0, 0].tolist() == [[15.0] * 4] * 2 + [[0.0] * 4] * 2
    assert not values(b[1])[0, 0].any()
    assert not network.embedding.a.asnumpy().any() and not network.embedding.b.asnumpy().any()


def test_the_least_recently_used_makes_room_unless_it_is_pinned() -> None:
    slots, _ = slots_of([adapter(number, 1, "q") for number in (1, 2, 3, 4)], 2)
    assert [slots.pin(name) for name in ("a1", "a2", "a1")] == [0, 1, 0]
    assert slots.pin("a3") is None and slots.loads == 2
    for name in ("a1", "a2"):
        slots.unpin(name)
    assert slots.pin("a3") == 1 and slots.loads == 3  # in place of 2: 1 is pinned once more
    slots.unpin("a3")
    slots.unpin("a1")  # used until now, so longer than 3
    assert slots.pin("a4") == 1
    assert slots.pin("a1") == 0 and slots.loads == 4
    assert slots.pin("a2") is None


def test_adapters_come_and_go() -> None:
    slots, network = slots_of([adapter(1, 4, "q", "k"), adapter(2, 1, "q")], 2)
    versions = [slots.version("a1"), slots.version("a2")]
    assert slots.pin("a1") == 0
    slots.add(adapter(3, 2, "k"))
    assert slots.pin("a3") == 1
    other = replace(adapter(5, 4, "q"), name="a3")
    with pytest.raises(ConfigError, match="a3 is in use, and stays until"):
        slots.add(other)
    with pytest.raises(ConfigError, match="a3 is in use"):
        slots.remove("a3")
    versions.append(slots.version("a3"))
    slots.unpin("a3")
    slots.add(other)
    versions.append(slots.version("a3"))
    assert slots.pin("a3") == 1 and slots.loads == 3
    assert (values(network.lora.a)[0, 1] == 5).all()
    slots.unpin("a3")
    slots.remove("a3")
    with pytest.raises(ConfigError, match=r"no adapter 'a22'; did you mean a2\?") as caught:
        slots.pin("a22")
    assert caught.value.hint == "known are: a1, a2"
    slots.add(other)
    versions.append(slots.version("a3"))
    assert len(set(versions)) == 5
    for number in range(5):  # nothing is left of those that went, whatever their names
        slots.add(replace(other, name=(name := f"b{number}")))
        slots.digest(name)
        slots.pin(name)
        slots.unpin(name)
        slots.remove(name)
    assert not slots._digests and slots._pins.keys() == {"a1"}
    assert slots.pin("a2") == 1  # the slot of the one that went is free
    assert slots.pin("a1") == 0 and slots.loads == 9


def test_adapters_that_do_not_fit_are_refused_and_change_nothing() -> None:
    slots, _ = slots_of([adapter(1, 4, "q")], 1)
    version = slots.version("a1")
    with pytest.raises(ConfigError, match=r"a1: .*: got rank 5, expected at most 4"):
        slots.add(adapter(1, 5, "q"))
    with pytest.raises(ConfigError, match=r"a2: .*: got 2 weights that .* as k\n") as caught:
        slots.add(adapter(2, 4, "q", "k", TABLE))
    assert "load the model again" in caught.value.hint
    assert slots.version("a1") == version
    with pytest.raises(ConfigError, match="no adapter 'a2'"):
        slots.version("a2")


def test_none_is_known_at_the_start() -> None:
    size = LoraSize(1, 4, frozenset({"q", TABLE}))
    slots = AdapterSlots(CellPools(Network(size), size), [], size)
    with pytest.raises(ConfigError, match="no adapter 'a1'") as caught:
        slots.pin("a1")
    assert "there is none so far" in caught.value.hint
    slots.add(adapter(1, 3, TABLE))
    assert slots.pin("a1") == 0
    with pytest.raises(ConfigError, match="got rank 5, expected at most 4; got 1 weights that"):
        LoraSize(1, 4, frozenset({"q"})).check(adapter(1, 5, "k"))


@pytest.mark.parametrize("count", [1, 16, 256])
def test_memory_grows_with_the_slots_and_not_with_the_adapters(count: int) -> None:
    adapters = [adapter(number, 4, "q", "k", TABLE) for number in range(1, count + 1)]
    slots, _ = slots_of(adapters, 8)
    per_slot = 4 * 4 * (6 + 4 + 6 + 2 + VOCABULARY + HIDDEN)  # bytes, rank, in and out
    assert slots.nbytes == 8 * per_slot
    for number in range(1, count + 1):
        slots.pin(f"a{number}")
        slots.unpin(f"a{number}")
    assert slots.loads == count and slots.nbytes == 8 * per_slot


def test_rounded_adapters_take_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(tmp_path / "one", 1)
    (tmp_path / "adapters.json").write_text(json.dumps({"one": "one"}))
    line = ["run_mode=slora", "model=tiny_llama", "load_checkpoint=random", "predict_data=hi"]
    line += [
        f"model.model_config.{size}" for size in ("hidden_size=32", "head_dim=8", "num_layers=1")
    ]
    line += [f"adapter_path={tmp_path / 'adapters.json'}", "adapter_id=one", "dry_run=true"]
    sizes = []
    for dtype in ("auto", "bf16"):
        assert main([*line, f"adapter_dtype={dtype}"]) == 0
        out = capsys.readouterr().out
        found = re.search(r"^adapters +([\d.]+) k?B for", out, re.MULTILINE)
        assert found, out
        sizes.append(float(found[1]))
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.02)
