"""`python -m lite_runner.mindformers SCRIPT.py`: as `python SCRIPT.py`, with our names."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.paths import ROOT

Run = Callable[..., "subprocess.CompletedProcess[str]"]

AS_PYTHON = """
import os, pickle, sys

def function():
    return None

if __name__ == "__main__":
    print(sys.argv, sys.path[0], __file__, __name__, __package__, __spec__)
    print(sys.modules["__main__"].function is pickle.loads(pickle.dumps(function)))
    print(sorted(os.listdir(os.path.dirname(__file__))), os.getcwd())
    print("told", file=sys.stderr)
    sys.exit(len(sys.argv))
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(*arguments)` is `python *arguments` in a new folder."""
    (tmp_path / "here").mkdir()

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path / "here",
            env={**os.environ, "GLOG_v": "3", **env},
            timeout=120,
            capture_output=True,
            encoding="utf-8",
        )

    return run


def test_a_script_sees_what_python_shows_it(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "one.py").write_text(AS_PYTHON)
    arguments = ["../scripts/one.py", "--device_target", "x", "-h"]
    plain = run(*arguments)
    ours = run("-m", "lite_runner.mindformers", *arguments)
    assert (ours.returncode, ours.stdout, ours.stderr) == (4, plain.stdout, "told\n")
    assert (
        plain.returncode == 4
        and "one.py', '--device_target'" in ours.stdout
        and "\nTrue\n" in ours.stdout
    )


def test_its_mindformers_is_ours_even_where_another_lies_beside_it(
    run: Run, tmp_path: Path
) -> None:
    other = tmp_path / "mindformers"
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError('not this one')")
    (tmp_path / "helper.py").write_text("from mindformers.tools import logger\n")
    (tmp_path / "script.py").write_text(
        "import helper, mindformers, mindformers.models.bloom as bloom\n"
        "from mindformers.tools.utils import str2bool\n"
        "from mindformers import *\n"
        "import lite_runner\n"
        "assert AutoModel is lite_runner.AutoModel and bloom.BloomConfig is BloomConfig\n"
        "assert mindformers.models.bloom is bloom and str2bool('yes')\n"
        "helper.logger.info('ckpt path: %s', 'a.ckpt')\n"
        "from mindformers import AutoModl\n"
    )
    done = run("-m", "lite_runner.mindformers", str(tmp_path / "script.py"))
    assert (done.returncode, done.stdout) == (1, "")
    first, *trace, last = done.stderr.splitlines()
    assert first == "ckpt path: a.ckpt"
    assert trace[:2] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "script.py"}", line 8, in <module>',
    ]
    assert "has no AutoModl; did you mean AutoModel?" in last


ON_ASCEND = """
import mindspore as ms
from mindformers import AutoModel, ContextConfig, init_context
init_context(use_parallel=False, context_config=ContextConfig(device_target="Ascend"))
ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend", device_id=0)
ms.context.set_context(device_target="Ascend")
ms.set_device("Ascend", 0)
model = AutoModel.from_pretrained("tiny_llama")
print(len(model.generate([1, 2], max_new_tokens=2, eos_token_id=[])[0]))
"""


def test_a_script_for_ascend_runs_on_the_cpu_on_request(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ON_ASCEND)
    script = str(tmp_path / "script.py")
    done = run("-m", "lite_runner.mindformers", "--device_target", "CPU", script)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    lines = ON_ASCEND.splitlines()
    (tmp_path / "script.py").write_text("\n".join([*lines[:4], *lines[7:]]))
    done = run("-m", "lite_runner.mindformers", script)
    assert done.returncode == 1 and "shows no Ascend device" in done.stderr
    assert "-> python -m lite_runner.mindformers --device_target CPU SCRIPT.py" in done.stderr


def test_the_scripts_of_mindformers_are_ours_where_there_are_none(run: Run, tmp_path: Path) -> None:
    runner = ("-m", "lite_runner.mindformers")
    version = run(*runner, "run_mindformer.py", "--version")
    assert (version.returncode, version.stdout[:12]) == (0, "lite-runner ")
    table = run(*runner, "./mindformers/tools/hccl_tools.py", "--help")
    assert table.returncode == 0 and "--device_num" in table.stdout
    missing = run(*runner, "mine.py")
    assert missing.returncode == 2 and "error: mine.py: no such file" in missing.stderr
    wrong = run(*runner, "--device_target", "GPU", "mine.py")
    assert wrong.returncode == 2 and "invalid choice: 'GPU'" in wrong.stderr
    ours = run(*runner, "scripts/examples/distribute_generate/generate_custom.py", "--help")
    assert ours.returncode == 0 and "--model_parallel" in ours.stdout
    data = run(*runner, "mindformers/tools/dataset_preprocess/bloom/make_mindrecord.py", "--help")
    assert data.returncode == 0 and "--input_dataset_file" in data.stdout
    (tmp_path / "here/export.py").write_text("print('mine')")
    assert run(*runner, "export.py").stdout == "mine\n"


def test_run_mindformer_answers_as_mindformers_does(run: Run, tmp_path: Path) -> None:
    """Its texts with their prompts, on the screen and in the current folder, once per prompt."""
    prompts, two = ["model=tiny_llama", "--predict_data", "ab", "c"], "num_return_sequences=2"
    rows = ["do_sample=true", "seed=1", "max_new_tokens=3", two]
    script = str(ROOT / "run_mindformer.py")
    done = run(script, *prompts, *rows)
    assert done.returncode == 0, done.stderr
    answers = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert [len(one["text_generation_text"]) for one in answers] == [2, 2]
    assert all(text[:1] == "a" for text in answers[0]["text_generation_text"])
    found = tmp_path / "here/text_generation_result.txt"
    assert ast.literal_eval(found.read_text("utf-8")) == answers
    latest = tmp_path / "here/outputs/latest/text_generation_result.txt"
    assert latest.read_text("utf-8") == found.read_text("utf-8")

    found.unlink()
    found.mkdir()
    again = run("-m", "lite_runner.mindformers", "run_mindformers.py", *prompts, *rows)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "Is a directory; the texts are in " in again.stderr
    plain = run(script, *prompts, "output_format=jsonl", "max_new_tokens=2")
    assert plain.stdout.startswith('{"id": 0')


def test_run_mindformer_has_defaults_where_they_apply(run: Run) -> None:
    script = str(ROOT / "run_mindformer.py")
    for arguments in (["run_mode=doctor"], ["run_mode=export"], ["use_parallel=true"]):
        done = run(script, "model=tiny_llama", "predict_data=", *arguments, "--cfg", "job")
        config = yaml.safe_load(done.stdout)
        formats = {"run_mode=doctor": "text", "run_mode=export": None}
        assert config.get("output_format") == formats.get(arguments[0], "mindformers")
        logs = "output/msrun_log" if arguments == ["use_parallel=true"] else ""
        assert config["parallel"]["log_dir"] == logs
