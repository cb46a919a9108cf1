"""Models that the native kernels support, and the imports of packing.
Logits: tests/backends/native/test_backend.py."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from lite_runner.architectures import KNOWN, Architecture, CustomNetwork
from lite_runner.architectures.spec import Attention, Block, Decoder, FeedForward, Norm, Rotary
from lite_runner.native.model import unsupported


def decoder(*attentions: Attention, architecture: str = "llama") -> Decoder:
    """A layer for each attention."""
    norm = Norm("rms", 1e-5)
    blocks = tuple(Block(norm, one, FeedForward(64, True, False)) for one in attentions)
    return Decoder(architecture, 96, 32, 64, blocks, norm, tie_word_embeddings=True)


PLAIN = Attention(4, 2, 8, Rotary())


@pytest.mark.parametrize(
    "other",
    [PLAIN, replace(PLAIN, window=8, qk_norm=Norm("rms", 1e-6)), replace(PLAIN, out_bias=True)],
)
def test_layers_may_differ_in_what_each_says_for_itself(other: Attention) -> None:
    assert unsupported(decoder(PLAIN, other)) == unsupported(decoder(other, PLAIN)) == []


@pytest.mark.parametrize(
    ("attentions", "reason"),
    [
        (
            (PLAIN, replace(PLAIN, head_dim=16, rotary=PLAIN.rotary)),
            "heads of different sizes share rotary positions",
        ),
        ((PLAIN, replace(PLAIN, rotary=None, alibi=True)), "positions differ between its layers"),
        ((replace(PLAIN, head_dim=7),), "rotary positions need an even head_dim, got 7"),
        ((replace(PLAIN, head_dim=1026),), "head_dim is 1026, above 1024"),
    ],
)
def test_models_that_they_cannot_compute(attentions: tuple[Attention, ...], reason: str) -> None:
    assert unsupported(decoder(*attentions)) == [reason]


def test_custom_networks_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    own = CustomNetwork(network=lambda: None, tensors=lambda model: (), code="")
    monkeypatch.setitem(
        KNOWN, "toy", Architecture("toy", lambda fields: decoder(PLAIN), custom=own)
    )
    assert unsupported(decoder(PLAIN, architecture="toy")) == ["toy has a custom network"]


def test_packing_needs_no_mindspore() -> None:
    """It takes most of a second to import, and is not everywhere that packs."""
    script = "import lite_runner.native.packed_model, sys; print('mindspore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
