"""What setup.cfg cannot say: the top-level conf/ is installed as lite_runner/conf."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lite_runner", "lite_runner.*"]), "lite_runner.conf"],
    package_dir={"lite_runner.conf": "conf"},
    package_data={"lite_runner": ["py.typed"], "lite_runner.conf": ["**/*.yaml"]},
)
