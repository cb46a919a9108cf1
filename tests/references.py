"""Names of the tiny models of tests/fixtures/reference: every way to run is held to all of them."""

from __future__ import annotations

from tests.paths import REFERENCE


def every() -> list[str]:
    return sorted(path.parent.name for path in REFERENCE.glob("*/model.safetensors"))
