"""Where users' code imports Fields from: see docs/python-api.md."""

from lite_runner.architectures.fields import Fields as Fields
