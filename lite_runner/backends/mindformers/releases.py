"""The release of MindFormers that computes a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.mindformers.release import MindFormersRelease
from lite_runner.backends.mindformers.release_1_0 import V1_0_2
from lite_runner.backends.mindformers.release_1_9 import V1_9_0, V1_9_0_ASCEND
from lite_runner.errors import ConfigError, EnvironmentFault

RELEASES: Mapping[str, MindFormersRelease] = {"1.0.2": V1_0_2, "1.9.0": V1_9_0}
ON_ASCEND: Mapping[str, MindFormersRelease] = {"1.0.2": V1_0_2, "1.9.0": V1_9_0_ASCEND}


def installed_release() -> str | None:
    """The release of MindFormers in this process's Python; None: there is none."""
    try:
        return version("mindformers")
    except PackageNotFoundError:
        return None


def choose_release(
    model: Decoder,
    name: str,
    *,
    wanted: str | None,
    use_past: bool,
    beams: int = 1,
    export: bool = False,
    device: str = "CPU",
) -> MindFormersRelease:
    """The release that is `wanted`; None: the first that computes the model, `name` in messages, or
    exports it. On Ascend it is that of this Python, where one is installed here.

    Raises ConfigError where none does, EnvironmentFault where another one is installed.
    """
    known = RELEASES if device == "CPU" else ON_ASCEND
    here = None if device == "CPU" else installed_release()
    if here is not None and (here not in known or wanted not in (None, here)):
        raise EnvironmentFault(
            f"this Python has mindformers {here}, expected {wanted or ' or '.join(known)}",
            "install that release, or none: then a Python of its own is taken, as on a CPU",
        )
    if (only := wanted or here) is not None:
        candidates = [known[only]]
    else:
        candidates = [known[one.name] for one in _in_order(model)]
    reasons = []
    for release in candidates:
        found = release.unsupported(model, use_past=use_past, beams=beams, export=export)
        if not found:
            return release
        reasons.append(f"MindFormers {release.name} cannot compute {name}: {', '.join(found)}")
    raise ConfigError(f"backend=mindformers: {'; '.join(reasons)}", "backend=ms")


def _in_order(model: Decoder) -> list[MindFormersRelease]:
    """1.0.2 is older than Qwen2, a Llama with biases."""
    return [V1_9_0, V1_0_2] if model.attention.qkv_bias else [V1_0_2, V1_9_0]


def python_for(release: MindFormersRelease, device: str) -> Path:
    """The interpreter that runs a release: this one where it is installed here, with a device, else
    that of the release. Raises EnvironmentFault where there is none."""
    if device != "CPU" and installed_release() == release.name:
        return Path(sys.executable)
    return release.python.find()
