"""The API of lite-runner under MindFormers' module names.

    from lite_runner.mindformers.models.bloom import BloomConfig, BloomLMHeadModel

and `python -m lite_runner.mindformers SCRIPT.py ARGS` runs a script that imports `mindformers`.
"""

from __future__ import annotations

from typing import Any

from lite_runner.mindformers import tree

__all__ = list(tree.MODULES[""])

tree.install()


def __getattr__(name: str) -> Any:
    return tree.attribute("", name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
