from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from lite_runner import __version__, app, run_modes
from lite_runner.config import Note
from lite_runner.config.argv import parse
from lite_runner.config.prompts import read_prompts
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, EnvironmentFault, RunnerError
from lite_runner.system import user_cache
from tests.paths import ROOT
from tests.refusals import refused

TINY = "model=tiny_llama"


class Launched:
    """Stands in for lite_runner.launch: notes the configs, and does as told."""

    def __init__(self) -> None:
        self.configs: list[RunConfig] = []
        self.notes: list[Note] = []
        self.effect: Callable[[RunConfig], int] = lambda _config: 0

    def launch(self, config: RunConfig, notes: Sequence[Note], plugins: Sequence[str]) -> int:
        self.configs.append(config)
        self.notes += notes
        return self.effect(config)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    stand_in = Launched()
    module = types.ModuleType("lite_runner.launch")
    module.launch = stand_in.launch  # type: ignore[attr-defined]
    monkeypatch.setattr(user_cache, "trim", lambda *_: {})
    monkeypatch.setitem(sys.modules, "lite_runner.launch", module)
    return stand_in


@pytest.mark.parametrize(
    "argv",
    [
        ["run_mode=predict", TINY, "predict_data=I love Beijing, because"],
        [
            "--model",
            "tiny_llama",
            "--run_mode=predict",
            "--predict_data",
            "I love Beijing, because",
        ],
        ["--predict_data=I love Beijing, because", TINY],
    ],
)
def test_both_styles_start_the_same_run(launched: Launched, argv: list[str]) -> None:
    assert app.main(argv) == 0
    [config] = launched.configs
    assert read_prompts(config) == ["I love Beijing, because"]
    assert config.model_name == "tiny_llama"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["model=bloom_560"], "did you mean bloom_560m?"),
        (["max_new_tokns=3"], "did you mean max_new_tokens?"),
        (["+max_new_tokns=3"], "did you mean max_new_tokens?"),
        (["seed=abc"], "expected an integer"),
        (["top_p=2"], "top_p: got 2"),
        (["temperature=nan", "do_sample=true"], "temperature: got nan"),
        (["--config", "missing.yaml"], "--config missing.yaml: No such file"),
        (["--config", "configs/llama2/predict_llama2_7b.yaml"], "the file: model=llama2_7b\n"),
        (["--config", "run_bloom_7.1b_910b.yaml"], "without the file: model=bloom_7.1b\n"),
        (["--config", "broken.yaml"], "broken yaml"),
        (["--config", "empty.yaml"], "the file is empty"),
        (["predict_data="], "predict_data is empty"),
        (["predict_data=", "chat=true"], "predict_data is empty"),
        (["predict_data=['a','']"], "predict_data[1]: an empty prompt"),
        (["predict_data=['']", "chat=true"], "predict_data[0]: an empty prompt"),
        ([], "predict_data is empty"),
        (["run_mode=slora"], "needs adapter_path="),
        (["predict_data=gone.txt"], "no file gone.txt"),
    ],
)
def test_bad_input_ends_in_2_and_starts_nothing(
    launched: Launched,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    expected: str,
) -> None:
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "empty.yaml").touch()
    refused(argv, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and expected in captured.err
    assert launched.configs == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.yaml", "empty.yaml"]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\n\n"])
def test_a_bad_prompt_file_ends_in_2(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    launched.effect = lambda config: len(read_prompts(config))
    (tmp_path / "p.txt").write_bytes(content)
    refused([TINY, f"predict_data={tmp_path}/p.txt"], 2)
    assert "predict_data: " in capsys.readouterr().err


def raising(error: BaseException) -> Callable[[RunConfig], int]:
    def effect(_config: RunConfig) -> int:
        raise error

    return effect


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (RunnerError("it failed", "try again"), 1, "error: it failed\n  -> try again\n"),
        (EnvironmentFault("no disk"), 3, "error: no disk\n"),
        (ArtifactError("no weights"), 4, "error: no weights\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (app.Terminated(), 143, "terminated\n"),
    ],
)
def test_exit_codes_of_runs(
    launched: Launched,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    expected: str,
) -> None:
    launched.effect = raising(error)
    assert app.main([TINY, "predict_data=x"]) == code
    assert capsys.readouterr().err == expected


def test_the_exit_code_of_launch_is_passed_on(launched: Launched) -> None:
    launched.effect = lambda _config: 130
    assert app.main([TINY, "predict_data=x"]) == 130


def test_a_surprise_shows_its_traceback(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    launched.effect = raising(ZeroDivisionError("oh"))
    assert app.main([TINY, "predict_data=x"]) == 1
    assert "ZeroDivisionError: oh" in capsys.readouterr().err


def test_sigterm_ends_a_run_and_the_handler_is_put_back(launched: Launched) -> None:
    def terminate(_config: RunConfig) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    launched.effect = terminate
    assert app.main([TINY, "predict_data=x"]) == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_notes_are_a_line_and_the_rest_is_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_text("optimizer: {lr: 1}\ncallbacks: []\n", encoding="utf-8")
    argv = ["--config", "f.yaml", TINY, "predict_data=x", "max_new_tokens=1", "stream=false"]
    where = "(listed in run.log, and with verbosity=2)"
    note = f"note: 2 keys of f.yaml have no effect here {where}"
    listed = "no effect here, of f.yaml: callbacks, optimizer"
    for more, expected in (("0", (0, 0)), ("1", (1, 0)), ("2", (1, 1))):
        assert app.main([*argv, f"verbosity={more}"]) == 0
        stderr = capsys.readouterr().err.splitlines()
        assert (sum(line.startswith(note) for line in stderr), stderr.count(listed)) == expected
        assert listed in Path("outputs/latest/run.log").read_text(encoding="utf-8")
    assert app.main([*argv, "verbosity=2", "dry_run=true"]) == 0
    assert listed in capsys.readouterr().err


def test_version_and_help_win_over_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lite-runner {__version__}\n"
    assert app.main(["nonsense", "--help"]) == 0
    out = capsys.readouterr().out
    for part in ("smollm2_135m", "run_mode", "max_new_tokens=null", "--multirun", "--config FILE"):
        assert part in out
    assert max(len(line) for line in out.splitlines()) <= 120


def test_cfg_job_prints_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert app.main(["--cfg", "job", "model=tiny_gpt2", "predict_data=${x}: 我", "seed=3"]) == 0
    raw = yaml.safe_load(capsys.readouterr().out)
    assert (raw["predict_data"], raw["seed"]) == ("${x}: 我", 3)
    assert run_modes.from_dict(raw).model_name == "tiny_gpt2"
    refused(["--cfg", "job", "sed=3"], 2)


def test_info_and_the_other_parts_of_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    own = ["--config-dir", str(tmp_path)]
    assert app.main(["--info", "all", *own, "model=tiny_gpt2"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["option", "model=tiny_gpt2"] in rows and ["option", "backend=auto"] in rows
    assert ["hydra-core", importlib.metadata.version("hydra-core")] in rows
    assert any(str(tmp_path) in row[1] for row in rows)
    assert app.main(["--cfg", "hydra", *own]) == 0
    assert capsys.readouterr().out == f"hydra:\n  searchpath:\n  - {tmp_path}\n"
    assert app.main(["--cfg", "all", TINY]) == 0
    assert capsys.readouterr().out.endswith("hydra:\n  searchpath: []\n")


def test_multirun_runs_every_job_and_returns_the_worst(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int] = []

    def run(job: partial[int]) -> int:
        seeds.append(int(job.args[0].last("seed")))
        return {1: 0, 2: 4, 3: 1}[seeds[-1]]

    monkeypatch.setattr(app, "run_apart", run)
    assert app.main(["-m", TINY, "predict_data=a, b", "seed=1,2,3"]) == 4
    assert seeds == [1, 2, 3]
    assert "job 2 of 3: seed=2" in capsys.readouterr().err


def test_a_sweep_into_the_folder_of_another(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(app, "run_apart", lambda job: job())
    for name in ("first", "second"):
        newest = types.SimpleNamespace(newest=tmp_path / name)
        newest.newest.mkdir()
        monkeypatch.setattr("lite_runner.output.RunFolder", newest)
        line = parse([TINY, "predict_data=a", "dry_run=true"], ())
        assert app._job(line, tmp_path / "run") == 0
        assert (tmp_path / "run").resolve() == newest.newest


def test_multirun_stops_when_interrupted(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def run(job: partial[int]) -> int:
        seeds.append(int(job.args[0].last("seed")))
        return 130

    monkeypatch.setattr(app, "run_apart", run)
    assert app.main(["-m", TINY, "predict_data=x", "seed=1,2,3"]) == 130
    assert seeds == [1]


def test_multirun_checks_all_jobs_first(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["-m", TINY, "predict_data=x", "seed=1,x"], 2)
    assert "seed=x: seed: got 'x'" in capsys.readouterr().err
    assert launched.configs == []


NO_MINDSPORE = "raise ImportError('mindspore was imported')\n"


def run_process(
    *args: str, cwd: Path, stub: str = NO_MINDSPORE, absent: tuple[str, ...] = ("mindspore",)
) -> subprocess.CompletedProcess[str]:
    """run_lite.py in a process where importing mindspore, or others, fails."""
    for name in absent:
        (cwd / "stubs" / name).mkdir(parents=True, exist_ok=True)
        (cwd / "stubs" / name / "__init__.py").write_text(stub, encoding="utf-8")
    (cwd / "empty").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(ROOT / "run_lite.py"), *args],
        cwd=cwd / "empty",
        env={**os.environ, "PYTHONPATH": str(cwd / "stubs")},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["--help"], 0, "usage: run_lite.py"),
        (["--version"], 0, "lite-runner"),
        (["--cfg", "job", TINY], 0, "model_name: tiny_llama"),
        ([TINY, "sed=1"], 2, "did you mean seed?"),
    ],
)
def test_the_program_needs_no_mindspore_to_answer(
    tmp_path: Path, args: list[str], code: int, expected: str
) -> None:
    light = ("mindspore", "numpy") if args[0] in ("--help", "--version") else ("mindspore",)
    done = run_process(*args, cwd=tmp_path, absent=light)
    assert done.returncode == code, done.stderr
    assert expected in done.stdout + done.stderr
    assert list((tmp_path / "empty").iterdir()) == []


def test_help_into_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    command = f"'{sys.executable}' '{ROOT / 'run_lite.py'}' --help | true"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


def test_shell_completion_in_a_real_shell(tmp_path: Path) -> None:
    (tmp_path / "run_lite.py").symlink_to(ROOT / "run_lite.py")
    script = f"""
        PATH='{Path(sys.executable).parent}':$PATH
        eval "$(python run_lite.py -sc install=bash)"
        COMP_LINE='python run_lite.py model=tiny_' COMP_POINT=33
        COMP_WORDS=(python run_lite.py model=tiny_) COMP_CWORD=2
        hydra_bash_completion
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    names = [f"model=tiny_{name}" for name in ("bloom", "gpt2", "llama", "qwen2")]
    assert done.stdout.split() == names, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run_lite.py"]


@pytest.mark.parametrize(
    ("words", "code"),
    [("--version >&-", 0), ("--version 2>&-", 0), (f"{TINY} predict_data=- <&-", 2)],
)
def test_closed_standard_streams(words: str, code: int, tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT / 'run_lite.py'} {words}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=tmp_path)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr and b"Error" not in done.stderr
    assert code == 0 or b"standard input is empty" in done.stderr


def test_a_job_of_a_sweep_is_a_process_whose_exit_code_counts(tmp_path: Path) -> None:
    """The stand-in for launch reaches the job's own process through the import path."""
    hook = tmp_path / "stubs" / "sitecustomize.py"
    hook.parent.mkdir()
    hook.write_text(
        "import os, sys, types\n"
        "module = types.ModuleType('lite_runner.launch')\n"
        "def launch(config, notes, plugins):\n"
        "    print(os.getpid(), config.predict_data, config.seed, flush=True)\n"
        "    if config.seed == 3: os.kill(os.getpid(), 9)\n"
        "    return config.seed\n"
        "module.launch = launch\n"
        "sys.modules['lite_runner.launch'] = module\n",
        encoding="utf-8",
    )
    args = ("-m", TINY, "predict_data=a, b", "seed=0,3,1")
    done = run_process(*args, cwd=tmp_path, stub="")
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [row[1] for row in rows] == ["a, b 0", "a, b 3", "a, b 1"], done.stderr
    assert len({row[0] for row in rows}) == 3
    assert done.returncode == 137


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--cfg", "job"], ["dry_run=true"], ["predict_data=a", "stream=true"]]
)
def test_a_reader_that_has_gone_ends_it_quietly(tmp_path: Path, arguments: list[str]) -> None:
    """As `| head` is known to: SIGPIPE's exit code, and no word."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "run_lite.py", "model=tiny_llama", "verbosity=0", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
