"""Keys that each run mode takes, and its errors for the others.

`python -m tests.frozen_keys` writes what is missing of tests/fixtures/frozen/keys/; `--overwrite`
makes it anew, which is for a change that users are told of. tests/config/test_frozen_keys.py
compares. What is typed is in samples.yaml; what is meant by the words of accepted.json:

    accepted VALUE   the resolved config shows this under the key (as JSON; nothing: no such key)
    refused KEY ...  what the lines of the message begin with
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lite_runner.config import leaves

# Everything of the package that this file needs, and that may move.
from lite_runner.config.argv import parse
from lite_runner.config.compose import portable
from lite_runner.config.prompts import with_seed
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve, schemas

FOLDER = Path(__file__).resolve().parent / "fixtures/frozen/keys"
# Where the resolved config shows the option of a group.
SHOWN_AT = {"model": "trainer.model_name", "parallel": "parallel_config", "ge": "infer.ge_preset"}
HERE = "<here>"  # the folder that a config.yaml was written in


def known_keys() -> set[str]:
    """Every dotted key of any run mode, and the groups."""
    return {*leaves(RunConfig), *schemas().every_key, *SHOWN_AT}


def resolved(words: list[str]) -> dict[str, Any]:
    """The config that a command line means, as plain data. Raises ConfigError."""
    return resolve(parse(words, _heads()))[0].to_dict()


@cache
def _heads() -> list[str]:
    return heads()


def written(words: list[str]) -> str:
    """The config.yaml of the run that a command line means."""
    config = with_seed(resolve(parse(words, _heads()))[0])
    return yaml.safe_dump(portable(config), sort_keys=False, allow_unicode=True)


@cache
def typed() -> dict[str, Any]:
    """The contents of samples.yaml: `lines`, `samples` and `meaningless`."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / "samples.yaml").read_text(encoding="utf-8"))
    return found


def key_of(sample: str) -> str:
    """The key that a sample is about."""
    return sample.partition("=")[0]


def meaningless() -> set[tuple[str, str]]:
    """Pairs of a run mode and a key that it takes and does nothing with: it may be refused."""
    return {(mode, key) for mode, keys in typed()["meaningless"].items() for key in keys}


def took(run_mode: str, key: str) -> bool:
    """True if a run mode accepted a key with some value, and it had an effect."""
    verdicts = stored("accepted.json")
    return (run_mode, key) not in meaningless() and any(
        verdicts[sample][run_mode].startswith("accepted")
        for sample in verdicts
        if key_of(sample) == key
    )


def command_line(run_mode: str, sample: str) -> list[str]:
    """The words to type: the minimum of the run mode, what the sample needs, the sample."""
    first, *needed = sample.split(" ")
    return [f"run_mode={run_mode}", *typed()["lines"][run_mode], *needed, first]


def verdict(words: list[str], key: str) -> str:
    """The outcome of a command line; `key` is the one whose value is shown."""
    try:
        config = resolved(words)
    except ConfigError as error:
        lines = error.message.splitlines()
        faults = [line.removeprefix("  - ") for line in (lines[1:] if len(lines) > 1 else lines)]
        return " ".join(["refused", *sorted({re.split(r"[=: ]", fault)[0] for fault in faults})])
    shown: Any = config
    for name in SHOWN_AT.get(key, key).split("."):
        if not isinstance(shown, dict) or name not in shown:
            return "accepted"
        shown = shown[name]
    return f"accepted {json.dumps(shown, ensure_ascii=False)}"


def accepted() -> dict[str, dict[str, str]]:
    """Of each sample, the verdict of each run mode. To be called `beside` the files."""
    return {
        sample: {mode: verdict(command_line(mode, sample), key_of(sample)) for mode in run_modes()}
        for sample in typed()["samples"]
    }


def run_modes() -> list[str]:
    return sorted(typed()["lines"])


def configs() -> dict[str, str]:
    """Of each run mode the config.yaml that it leaves in its folder."""
    here = str(Path.cwd())
    return {
        mode: written([f"run_mode={mode}", *typed()["lines"][mode]]).replace(here, HERE)
        for mode in run_modes()
    }


def former(run_mode: str, here: Path) -> Path:
    """The stored config.yaml of a run mode, as if it had been written in the folder `here`."""
    copy = here / f"{run_mode}.yaml"
    text = (FOLDER / copy.name).read_text(encoding="utf-8")
    copy.write_text(text.replace(HERE, str(here)), encoding="utf-8")
    return copy


def changed_run_mode(before: str, after: str, here: Path) -> str:
    """The outcome of a run mode's config.yaml that is repeated with another run mode typed."""
    needed = [word for word in typed()["lines"][after] if not word.startswith("model=")]
    return verdict(
        ["--config", str(former(before, here)), f"run_mode={after}", *needed], "run_mode"
    )


def changed_run_modes(here: Path) -> dict[str, dict[str, str]]:
    """Of each stored config.yaml, the verdict of each run mode that is typed behind it."""
    return {
        before: {after: changed_run_mode(before, after, here) for after in run_modes()}
        for before in run_modes()
    }


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """With the files that the samples name in `folder`, which is the current one."""
    for name in ("text.txt", "other.txt", "prompts.txt"):
        (folder / name).write_text("a text\n", encoding="utf-8")
    (folder / "adapters.json").write_text('{"en": "en"}', encoding="utf-8")
    (folder / "ge.ini").write_text("[ascend_context]\n", encoding="utf-8")
    (folder / "table.json").write_text(json.dumps(_rank_table()), encoding="utf-8")
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _rank_table() -> dict[str, Any]:
    """Of two ranks on one machine."""
    devices = [
        {"device_id": str(i), "device_ip": f"192.168.1.{i + 1}", "rank_id": str(i)}
        for i in range(2)
    ]
    server = {"server_id": "10.0.0.1", "device": devices, "host_nic_ip": "reserve"}
    return {"version": "1.0", "server_count": "1", "server_list": [server], "status": "completed"}


def stored(name: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return found


def merged(name: str, found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The stored entries, and those found in addition."""
    before = {} if "--overwrite" in sys.argv else stored(name)
    return {key: inner | before.get(key, {}) for key, inner in found.items()}


def _write(name: str, text: str) -> None:
    path = FOLDER / name
    if path.suffix == ".yaml" and path.exists() and "--overwrite" not in sys.argv:
        print(f"{name}: there already")
    else:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {name}")


def _rows(value: dict[str, dict[str, str]]) -> str:
    """JSON with a line for each inner entry."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, beside(Path(folder)):
        _write("accepted.json", _rows(merged("accepted.json", accepted())))
        for run_mode, text in configs().items():
            _write(f"{run_mode}.yaml", text)
        changed = merged("changed_run_mode.json", changed_run_modes(Path(folder)))
        _write("changed_run_mode.json", _rows(changed))
