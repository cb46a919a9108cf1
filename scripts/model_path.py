"""Prints where a model's own checkpoint is, downloaded if it is not yet: model_path.py NAME."""

from __future__ import annotations

import sys

from lite_runner.config.groups import own_source
from lite_runner.weights.source import fetch


def main() -> None:
    print(fetch(own_source(sys.argv[1])))


if __name__ == "__main__":
    main()
