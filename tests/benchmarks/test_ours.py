"""benchmarks/ours.py over a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def test_it_measures_what_the_network_generates(
    tmp_path: Path, measured: Callable[..., str]
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[5, 6, 7], [8, 9, 10]]")
    sizes = ("--prompts", str(prompts), "--new-tokens", "4", "--threads", "1")
    printed = measured("ours.py", *sizes)
    figures = json.loads(printed.splitlines()[-1])
    assert (figures["batch"], figures["prompt_tokens"], figures["new_tokens"]) == (2, 3, 4)
    assert [len(row) for row in figures["token_ids"]] == [4, 4]
    assert figures["engine"].startswith("lite-runner") and figures["decode_tok_s"] > 0
