"""Prints where a model's own checkpoint is, downloaded if it is not yet: model_path.py NAME."""

from __future__ import annotations

import sys

import yaml

from lite_runner.config.compose import conf_dir
from lite_runner.weights.source import fetch


def main() -> None:
    path = conf_dir() / "model" / f"{sys.argv[1]}.yaml"
    model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
    source = model["model_config"]["checkpoint_name_or_path"]
    print(fetch(source, lambda line: print(line, file=sys.stderr)))


if __name__ == "__main__":
    main()
