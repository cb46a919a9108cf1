"""Verifying a run: computed again from its folder, and compared to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.output import RESULT
from lite_runner.output.comparison import PROGRAM, aligned
from lite_runner.system import own_process
from lite_runner.system.files import parse_json, read_json_object, temporary_folder, user_path
from lite_runner.system.yaml_file import read_yaml

SAMPLES = "samples.jsonl"  # of an evaluation over tasks
VERIFIABLE = ("predict", "slora", "eval")
HINT = "run_lite.py verify outputs/latest"
# Of a row of texts, and of a sample, what has to be the same.
_OF_ROWS = ("token_ids", "finish_reason", "logprobs", "prompt_logprobs")
_OF_SAMPLES = ("likelihoods", "response")


def verify(words: Sequence[str]) -> int:
    """Recompute the run in the given folder, and print what is identical; returns 0.

    Raises RunnerError, also where what was computed differs.
    """
    if len(words) != 1 or words[0].startswith("-"):
        got = words[0] if len(words) == 1 else f"{len(words)} words"
        raise ConfigError(f"verify: got {got}, expected the folder of a run", HINT)
    folder = user_path(words[0], "verify").resolve()
    before = read_json_object(folder / RESULT, "the result of a run")
    config = read_yaml(folder / "config.yaml", f"verify: {folder / 'config.yaml'}")
    mode = config.get("run_mode")
    if mode not in VERIFIABLE:
        raise ConfigError(
            f"verify: {folder} is a run of run_mode={mode}, which computes no tokens;"
            f" expected one of {', '.join(VERIFIABLE)}"
        )
    if config.get("use_parallel"):
        raise ConfigError(f"verify: {folder} ran in several ranks, which verify does not support")
    if not before.keys() >= {"results", "backend", "engine", "versions"}:
        raise ConfigError(f"verify: {folder / RESULT} is not the result of a run", HINT)
    if "tasks" in before and not (folder / SAMPLES).is_file():
        raise ConfigError(f"verify: {folder} has no {SAMPLES}, which holds what is compared")
    with temporary_folder("verify") as work:
        after = _again(config, work)
        parts = _compared(before, after, folder, work / "run")
    differing = [name for name, same in parts if not same]
    unit = "samples" if "tasks" in before else "windows" if "evaluation" in before else "texts"
    rows = [(unit, f"{len(parts) - len(differing)} of {len(parts)} the same, to the bit")]
    rows += _circumstances(before, after)
    progress.text("\n".join(aligned(rows)) + "\n")
    if differing:
        raise RunnerError(
            f"verify: {len(differing)} of {len(parts)} {unit} differ from those of {folder}:"
            f" {', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}",
            "the lines above show what else has changed; runs with"
            " context.reproducible=true have the same bits on every processor",
        )
    return 0


def _again(config: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """The result of a config, computed in another process. Raises RunnerError."""
    for name in ("run", "values"):
        (work / name).mkdir()
    plain = {**config, "dry_run": False, "profile": False}
    if isinstance(tasks := config.get("eval"), Mapping):
        plain["eval"] = {**tasks, "resume": None, "compare": None}
    job = {
        "config": plain,
        "plugins": [],
        "folder": str(work / "run"),
        "values": str(work / "values"),
    }
    with progress.step(f"compute {config['run_mode']} again"):
        answer = own_process.ask(PROGRAM, job)
    if "error" in answer:
        raise RunnerError(f"verify: {answer['error']}")
    return read_json_object(work / "run" / RESULT)


def _compared(
    before: Mapping[str, Any], after: Mapping[str, Any], folder: Path, other: Path
) -> list[tuple[str, bool]]:
    """The parts of both results by name, and whether they are the same."""
    if "tasks" in before:
        lines, again = _samples(folder), _samples(other)
        return [(name, again.get(name) == values) for name, values in lines.items()]
    if "evaluation" in before:
        keys = ("perplexity", "scored_tokens", "windows")
        pair = [[one["evaluation"][key] for key in keys] for one in (before, after)]
        return [("perplexity", pair[0] == pair[1])]
    rows = [
        [[row.get(key) for key in _OF_ROWS] for row in one["results"]] for one in (before, after)
    ]
    if len(rows[0]) != len(rows[1]):
        raise RunnerError(f"verify: got {len(rows[1])} texts, expected {len(rows[0])}")
    pairs = zip(*rows, strict=True)
    return [(f"text {place}", one == again) for place, (one, again) in enumerate(pairs)]


def _samples(folder: Path) -> dict[str, Any]:
    lines = (folder / SAMPLES).read_text(encoding="utf-8").splitlines()
    rows = [parse_json(line) for line in lines]
    return {f"{row['task']} {row['index']}": [row.get(key) for key in _OF_SAMPLES] for row in rows}


def _circumstances(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Versions and settings, then and now."""
    named = [
        {
            "backend": one["backend"],
            "engine": one["engine"],
            **(one.get("provenance") or {}),
            **{f"version of {name}": value for name, value in one["versions"].items()},
        }
        for one in (before, after)
    ]
    rows = []
    for name in {**named[0], **named[1]}:
        then, now = (str(one.get(name, "not known")) for one in named)
        rows.append((name, f"{now} (unchanged)" if now == then else f"{now} (was {then})"))
    return rows
