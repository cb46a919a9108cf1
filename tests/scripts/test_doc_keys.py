"""The tables of keys at the end of the pages in docs/."""

from __future__ import annotations

import pytest

from lite_runner.config.help import keys_in
from scripts.doc_keys import keys_of, with_tables
from tests.paths import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_a_page_ends_with_the_keys_that_conf_lists(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page=page.stem):
            text = page.read_text(encoding="utf-8")
            assert with_tables(text) == text, "python scripts/doc_keys.py writes it anew"
            if keys_of(text):
                assert text.rstrip().splitlines()[-1].startswith("| `"), "the keys are not the end"


def test_every_key_is_in_a_table() -> None:
    shown = {key for page in PAGES for key in keys_of(page.read_text(encoding="utf-8"))}
    files = [ROOT / "conf/config.yaml", *ROOT.glob("conf/keys/*"), *ROOT.glob("conf/run_mode/*")]
    listed = {key for path in files for key in keys_in(path) if key.name != "run_mode"}
    assert not listed - shown
