"""benchmarks/ours.py over a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"


def test_it_measures_what_the_network_generates(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[5, 6, 7], [8, 9, 10]]")
    command = [sys.executable, str(ROOT / "benchmarks/ours.py"), "--prompts", str(prompts)]
    done = subprocess.run(
        [
            *(*command, "--new-tokens", "4", "--threads", "1"),
            f"model={FIXTURES / 'reference/llama'}",
            f"processor.tokenizer.tokenizer_file={FIXTURES / 'frozen/artifacts/a16w4'}",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["batch"], said["prompt_tokens"], said["new_tokens"]) == (2, 3, 4)
    assert [len(row) for row in said["token_ids"]] == [4, 4]
    assert said["engine"].startswith("lite-runner") and said["decode_tok_s"] > 0
