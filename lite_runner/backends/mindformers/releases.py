"""The release of MindFormers that computes a model."""

from __future__ import annotations

from collections.abc import Mapping

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.mindformers.release import MindFormersRelease
from lite_runner.backends.mindformers.release_1_0 import V1_0_2
from lite_runner.backends.mindformers.release_1_9 import V1_9_0
from lite_runner.errors import ConfigError

RELEASES: Mapping[str, MindFormersRelease] = {"1.0.2": V1_0_2, "1.9.0": V1_9_0}


def choose_release(
    model: Decoder,
    name: str,
    *,
    wanted: str | None,
    use_past: bool,
    beams: int = 1,
    export: bool = False,
) -> MindFormersRelease:
    """The release that is `wanted`; None: the first that computes the
    model, `name` in messages, or exports it.

    Raises ConfigError where none does.
    """
    reasons = []
    for release in [RELEASES[wanted]] if wanted else _in_order(model):
        found = release.unsupported(model, use_past=use_past, beams=beams, export=export)
        if not found:
            return release
        reasons.append(f"MindFormers {release.name} cannot compute {name}: {', '.join(found)}")
    raise ConfigError(f"backend=mindformers: {'; '.join(reasons)}", "backend=ms")


def _in_order(model: Decoder) -> list[MindFormersRelease]:
    """1.0.2 is older than Qwen2, a Llama with biases."""
    return [V1_9_0, V1_0_2] if model.attention.qkv_bias else [V1_0_2, V1_9_0]
