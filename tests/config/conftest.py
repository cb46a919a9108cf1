"""Shared by the tests of the config: command lines in, configs or faults out."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lite_runner.config import compose, groups
from lite_runner.config.argv import parse
from lite_runner.errors import ConfigError

Faults = Callable[..., str]


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Hydra composes each choice of options once: it takes 0.1 s, and there are many tests."""
    real = compose.compose_groups

    @functools.cache
    def cached(
        conf: Path, choices: tuple[tuple[str, str], ...], folders: tuple[Path, ...]
    ) -> dict[str, Any]:
        return real(dict(choices), folders)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compose,
            "compose_groups",
            lambda choices, folders=(): copy.deepcopy(
                cached(groups.conf_dir(), tuple(sorted(choices.items())), folders)
            ),
        )
        yield


@pytest.fixture(scope="session")
def notes() -> Callable[..., list[str]]:
    """The notes for the user of a command line, in full."""

    def run(*args: str) -> list[str]:
        found = compose.resolve(parse(args, compose.heads()))[1]
        return [note.detail or note.text for note in found]

    return run


@pytest.fixture(scope="session")
def faults() -> Faults:
    """The message of a command line that is refused."""

    def run(*args: str) -> str:
        with pytest.raises(ConfigError) as caught:
            compose.resolve(parse(args, compose.heads()))
        assert caught.value.exit_code == 2
        return caught.value.message

    return run
