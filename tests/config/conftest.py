"""Shared by the tests of the config: command lines in, configs or faults out."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lite_runner.config import compose, groups

REAL = compose.compose_groups


@functools.cache
def composed(
    conf: Path, choices: tuple[tuple[str, str], ...], folders: tuple[Path, ...], device: str
) -> dict[str, Any]:
    return REAL(dict(choices), folders)


@pytest.fixture(scope="module", autouse=True)
def composed_once() -> Iterator[None]:
    """Hydra composes each choice of options once: it takes 0.1 s, and these tests are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compose,
            "compose_groups",
            lambda choices, folders=(): copy.deepcopy(
                composed(
                    groups.conf_dir(),
                    tuple(sorted(choices.items())),
                    folders,
                    os.environ.get("DEVICE_ID", ""),  # which conf/config.yaml reads
                )
            ),
        )
        yield
