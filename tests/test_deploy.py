"""deploy/: what its files start is a server that this version accepts, and ends in time."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner.config.argv import parse
from lite_runner.run_modes import heads, resolve
from lite_runner.serving.middleware import PROBES
from tests.paths import ROOT

DEPLOY = ROOT / "deploy"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def unit() -> configparser.SectionProxy:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read(DEPLOY / "lite-runner.service")
    return found["Service"]


def pod() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    spec: dict[str, Any] = next(documents)["spec"]["template"]["spec"]
    return spec


def arguments() -> dict[str, tuple[list[str], int]]:
    """The arguments of each, and the seconds after which it is killed."""
    compose = read("compose.yaml")["services"]["lite-runner"]
    _, *of_unit = shlex.split(unit()["ExecStart"])
    spec = pod()
    job = next(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8")))["spec"]
    ray = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    return {
        "compose": (
            [one.replace("${MODEL:-smollm2_135m}", "smollm2_135m") for one in compose["command"]],
            int(compose["stop_grace_period"].removesuffix("s")),
        ),
        "systemd": (of_unit, int(unit()["TimeoutStopSec"])),
        "kubernetes": (spec["containers"][0]["args"], spec["terminationGracePeriodSeconds"]),
        "kuberay": (shlex.split(job["entrypoint"])[1:], ray["terminationGracePeriodSeconds"]),
    }


@pytest.mark.parametrize("of", arguments())
def test_its_command_is_accepted_and_may_end_by_itself(of: str, tmp_path: Path) -> None:
    words, patience = arguments()[of]
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    words = [f"serve.api_key={key}" if "api_key=" in one else one for one in words]
    words = ["model=tiny_qwen2" if one.startswith("model=") else one for one in words]
    config, _ = resolve(parse(words, heads()))
    assert patience > config.serve.drain_delay + config.serve.drain_timeout  # type: ignore[attr-defined]


def test_containers_are_the_images() -> None:
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    spec, compose = pod(), read("compose.yaml")["services"]
    (container,) = spec["containers"]
    assert f"USER {spec['securityContext']['runAsUser']}:" in image
    (port,) = container["ports"]
    assert f"EXPOSE {port['containerPort']}\n" in image
    places = {one["mountPath"] for one in container["volumeMounts"]}
    assert {"/cache", "/work", "/tmp"} <= places
    assert {one.split(":")[1] for one in compose["lite-runner"]["volumes"]} == {"/cache", "/work"}
    probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
    assert len(probes) == 3 and {one["path"] for one in probes} <= set(PROBES)
    for volume in compose["grafana"]["volumes"]:
        assert (DEPLOY / volume.split(":")[0]).is_file()
    (asked,) = read("prometheus.yml")["scrape_configs"][0]["static_configs"]
    assert asked["targets"] == [f"lite-runner:{port['containerPort']}"]


def test_systemd_does_not_start_again_in_vain() -> None:
    assert unit()["RestartPreventExitStatus"].split() == ["2", "4"]


@pytest.mark.parametrize("name", ["Dockerfile", "deploy/ascend.Dockerfile"])
def test_files_copied_into_the_image_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for path in line.split():
            assert (ROOT / path).exists() and f"!{path}" in ignored, path
    lock = (ROOT / "requirements/lock.txt").read_text(encoding="utf-8").splitlines()
    cuts = re.findall(r"sed '/\^(# \w+)\$/q'", text)
    assert len(cuts) == 2 and all(lock.count(cut) == 1 for cut in cuts)
    # pip stays: it says where the index is from which smollm2_135m comes.
    assert not re.search(r"pip uninstall .*\bpip\b", text)


def test_the_image_for_ascend_starts_with_canns_environment(tmp_path: Path) -> None:
    text = (ROOT / "deploy/ascend.Dockerfile").read_text(encoding="utf-8")
    (found,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    (tmp_path / "set_env.sh").write_text("export ASCEND_HOME_PATH=there\n")
    program = tmp_path / "run-lite"
    program.write_text('#!/bin/sh\nprintf "%s|" "$ASCEND_HOME_PATH" "$@"\n')
    program.chmod(0o755)
    command = [word.replace("/opt/ascend", str(tmp_path)) for word in json.loads(found)]
    done = subprocess.run(
        [*command, "predict_data=two words", "model=x"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.stdout == "there|predict_data=two words|model=x|", done.stderr
