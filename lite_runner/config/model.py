"""Where users' code imports ModelConfig from: see docs/python-api.md."""

from lite_runner.architectures.flat import ModelConfig as ModelConfig
