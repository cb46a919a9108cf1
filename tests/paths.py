"""Paths of folders and files for tests."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests/fixtures"
REFERENCE = FIXTURES / "reference"
# conftest.py and what it imports, for tests of a folder of tests.
CONFTEST = ("conftest.py", "left_behind.py", "light_msrun.py", "paths.py")
