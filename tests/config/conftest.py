"""Shared by the tests of the config: command lines in, configs or faults out."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

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


@pytest.fixture(scope="session", autouse=True)
def conf_is_parsed_once() -> Iterator[None]:
    """Hydra composes each choice of options from the same files, and reads and parses them anew,
    which takes two fifths of its time: what it has loaded of one state of conf/ is kept here."""
    from hydra._internal.config_repository import ConfigRepository

    compose, load = groups._composed, ConfigRepository.load_config
    kept: dict[tuple[str, str], object] = {}

    def composed(conf: Path, others: Sequence[Path], choices: Mapping[str, str]) -> dict[str, Any]:
        state = groups._state(conf)

        def loaded(repository: ConfigRepository, config_path: str) -> object:
            if (state, config_path) not in kept:
                kept[state, config_path] = load(repository, config_path)
            return copy.deepcopy(kept[state, config_path])  # whoever composes changes it

        if others:  # whose files may change
            return compose(conf, others, choices)
        with mock.patch.object(ConfigRepository, "load_config", loaded):
            return compose(conf, others, choices)

    with mock.patch.object(groups, "_composed", composed):
        yield
