"""Ascend processors, and those of them with the operators that we fuse to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import pytest

from lite_runner import progress
from lite_runner.backends.mindspore import device
from lite_runner.errors import EnvironmentFault
from lite_runner.system import environment
from tests.each import each

WHEEL = Path(ms.__file__).resolve().parent
# By mindspore 2.10.0, lib/plugin/libmindspore_ascend.so.2: the names of aclrtGetSocName and the
# kind that MindSpore makes of each. CANN 8.5 has aclnnFlashAttentionScore,
# aclnnWeightQuantBatchMatmulV2 and aclnnQuantMatmulV4 for Atlas A2 and A3, and MindSpore's own
# kernels, ReshapeAndCache and PagedAttention, are for ascend910b (A2 and A3) and ascend310p.
PROCESSORS = {
    "ascend910": "Ascend910A Ascend910B Ascend910PremiumA Ascend910ProA Ascend910ProB",
    "ascend910b": "Ascend910B1 Ascend910B2 Ascend910B2C Ascend910B3 Ascend910B4 Ascend910B4-1",
    "ascend910_93": "Ascend910_9391 Ascend910_9392 Ascend910_9381 Ascend910_9382 Ascend910_9372"
    " Ascend910_9361 Ascend910_9362",
    "ascend310p": "Ascend310P Ascend310P3",
    "ascend310b": "Ascend310B4 Ascend310B1",
    "ascend310": "Ascend310",
    "ascend950": "Ascend950PR_9599 Ascend950DT_9591",
}
FUSED = {"ascend910b", "ascend910_93"}
OWN_KERNELS = "lib/plugin/ascend/ms_kernels_internal/internal_kernel/op_kernels"
NAMED = [(name, kind) for kind, names in PROCESSORS.items() for name in names.split()]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    asked = environment.ascend_soc
    asked.cache_clear()
    yield
    asked.cache_clear()


def test_mindspore_knows_the_processors() -> None:
    library = (WHEEL / "lib/plugin/libmindspore_ascend.so.2").read_bytes()
    assert not [name for name, _ in NAMED if name.encode() + b"\0" not in library]
    assert {path.name for path in (WHEEL / OWN_KERNELS).iterdir()} == {"ascend910b", "ascend310p"}


def cann(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], bytes | None]) -> None:
    """CANN's library, of which this is what aclrtGetSocName answers."""

    def load(name: str) -> SimpleNamespace:
        assert name == "libascendcl.so"
        return SimpleNamespace(aclrtGetSocName=answer)

    monkeypatch.setattr(ctypes, "CDLL", load)


@each(("name", "kind"), NAMED)
def test_fused_operators_where_there_are_some(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.ascend_soc.cache_clear()
    cann(monkeypatch, lambda: name.encode())
    assert environment.ascend_soc() == name
    assert environment.has_fused_operators("Ascend") == (kind in FUSED)


def test_a_processor_is_asked_for_on_ascend_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail(f"loads {name}"))
    assert not environment.has_fused_operators("CPU")


def test_without_cann() -> None:
    with pytest.raises(EnvironmentFault, match="CANN cannot be loaded: libascendcl") as caught:
        environment.ascend_soc()
    assert "set_env.sh" in caught.value.hint


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    cann(monkeypatch, lambda: None)
    with pytest.raises(EnvironmentFault, match="aclrtGetSocName"):
        environment.ascend_soc()


@pytest.mark.parametrize(
    ("name", "pynative", "boost"),
    [("Ascend910A", False, None), ("Ascend910B3", False, "on"), ("Ascend910B3", True, None)],
)
def test_kernels_for_inference_where_there_are_some(
    name: str, pynative: bool, boost: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jit_config infer_boost, of mindspore 2.10.0, context.py."""
    settings_set: dict[str, object] = {}
    monkeypatch.setattr(environment, "ascend_soc", lambda: name)
    monkeypatch.setattr(ms, "set_context", lambda **settings: settings_set.update(settings))
    monkeypatch.setattr(ms, "set_device", lambda *_: None)
    device.set_device("Ascend", 0, pynative=pynative)
    assert settings_set["mode"] == (ms.PYNATIVE_MODE if pynative else ms.GRAPH_MODE)
    config = settings_set["jit_config"]
    assert isinstance(config, dict)
    assert config["jit_level"] == "O0"
    assert config.get("infer_boost") == boost


# mindspore 2.10, ops/kernel/ascend/internal/internal_kernel_build.cc, IsEnableInternalNode: names
# with commas between, of the operators that CANN's kernels compute.
LIST = "MS_DISABLE_INTERNAL_KERNELS_LIST"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, "FlashAttentionScore", 0),
        ("FlashAttentionScore", "FlashAttentionScore", 0),
        ("RmsNorm,FlashAttentionScore", "RmsNorm,FlashAttentionScore", 0),
        ("RmsNorm", "RmsNorm", 1),
        ("", "", 1),
    ],
)
def test_attention_of_prompts_by_cann(
    before: str | None, after: str, message: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    monkeypatch.setenv(LIST, before or "")
    if before is None:
        monkeypatch.delenv(LIST)
    device.choose_attention()
    assert device.os.environ[LIST] == after
    assert len(notes) == message
    assert all(f"{LIST}={before} is kept" in note for note in notes)


def test_the_list_is_one_that_mindspore_reads() -> None:
    assert device.CANN_KERNELS == LIST
    assert LIST.encode() in (WHEEL / "lib/plugin/libmindspore_ascend.so.2").read_bytes()
