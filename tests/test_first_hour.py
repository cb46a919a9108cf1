"""The commands of a first hour, in one folder, one after the other: first_hour.yaml."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner import app
from lite_runner.config.groups import conf_dir
from tests.tiny_gguf import write_tiny_gguf

COMMANDS = Path(__file__).with_name("first_hour.yaml")
MINDFORMERS = """
run_mode: predict
use_parallel: True
load_checkpoint: ''
context: {mode: 0, device_target: Ascend, max_device_memory: 30GB}
parallel_config: {data_parallel: 1, model_parallel: 2, pipeline_stage: 1}
trainer: {type: CausalLanguageModelingTrainer, model_name: llama_tiny}
optimizer: {type: FP32StateAdamWeightDecay}
processor: {tokenizer: {type: ByteTokenizer}}
model:
  arch: {type: LlamaForCausalLM}
  model_config:
    type: LlamaConfig
    seq_length: 64
    hidden_size: 32
    num_layers: 2
    num_heads: 4
    vocab_size: 320
    multiple_of: 16
    rms_norm_eps: 1.0e-5
    bos_token_id: 256
    eos_token_id: 257
    pad_token_id: 258
    use_past: True
    compute_dtype: float16
    max_decode_length: 512
"""


def complaints(command: dict[str, Any], code: int, out: str, err: str) -> list[str]:
    """The differences from the command's entry."""
    found = []
    if code != command.get("exit", 0):
        found.append(f"exit {code}, expected {command.get('exit', 0)}")
    found += [
        f"no {text!r} in standard output" for text in command.get("out", []) if text not in out
    ]
    found += [
        f"no {text!r} in standard error" for text in command.get("err", []) if text not in err
    ]
    found += [f"{text!r} in standard error" for text in command.get("not_err", []) if text in err]
    if "Traceback" in err:
        found.append("a Traceback")
    return found


def test_the_first_hour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out()
    commands = yaml.safe_load(COMMANDS.read_text(encoding="utf-8"))
    assert len(commands) >= 40
    wrong = []
    for command in commands:
        given = io.BytesIO(command.get("stdin", "").encode())
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(given))
        code = app.main(shlex.split(command["run"]))
        out, err = capsys.readouterr()
        if faults := complaints(command, code, out, err):
            wrong.append("\n  - ".join([f"run_lite.py {command['run']}", *faults, f"{out}{err}"]))
    assert not wrong, "\n".join(wrong)


def lay_out() -> None:
    """Write the files that the three users have in their folder."""
    write_tiny_gguf(Path("tiny.gguf"))
    Path("predict_llama.yaml").write_text(MINDFORMERS, encoding="utf-8")
    Path("prompts.txt").write_text("One, two,\nThe end\n", encoding="utf-8")
    lines = [
        {"id": "first", "prompt": "One, two,"},
        {"id": "second", "prompt": "The end", "seed": 3},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path("prompts.jsonl").write_text(text, encoding="utf-8")
    Path("prompts.csv").write_text('name,prompt\na,"One, two,"\nb,The end\n', encoding="utf-8")
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "the end"}]}\n')
    Path("report.docx").write_bytes(b"PK\x03\x04")
    convert = "run_mode=convert model=auto load_checkpoint=tiny.gguf convert_format=huggingface"
    assert app.main([*convert.split(), "convert_output=folder", "verbosity=0"]) == 0
    mine = Path("settings/model/mine.yaml")
    mine.parent.mkdir(parents=True)
    tiny = (conf_dir() / "model" / "tiny_llama.yaml").read_text(encoding="utf-8")
    mine.write_text(tiny.replace("tiny_llama", "mine"), encoding="utf-8")
