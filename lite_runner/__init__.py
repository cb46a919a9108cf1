"""lite-runner: YAML-driven jobs for large language models on MindSpore."""

__version__ = "0.1.0"
