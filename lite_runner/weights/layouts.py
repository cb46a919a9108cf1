"""Tensors held against those that a model asks for."""

from __future__ import annotations

from collections.abc import Mapping

from lite_runner.architectures import Parameter as Parameter  # users' code has it from here
from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError


def expected_tensors(config: Decoder) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the model needs."""
    return {parameter.name: parameter.shape for parameter in parameters(config)}


def check_tensors(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise one ArtifactError with all missing, unexpected and wrongly shaped tensors."""
    missing = [f"{name} {_text(expected[name])}" for name in expected if name not in found]
    unexpected = [f"{name} {_text(found[name])}" for name in found if name not in expected]
    misshapen = [
        f"{name}: got {_text(found[name])}, expected {_text(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    faults = [
        f"{len(names)} {kind}: " + "; ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of the wrong shape", misshapen),
        )
        if names
    ]
    if faults:
        raise ArtifactError(
            f"{where}: the tensors are not those of the model ({len(expected)} expected, "
            f"{len(found)} found)\n  - " + "\n  - ".join(faults),
            "check that model= and load_checkpoint= belong together, or use model=auto",
        )


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
