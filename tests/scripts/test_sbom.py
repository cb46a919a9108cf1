"""scripts/sbom.py: the packages of a wheel by their hashes, and those of an environment."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT


def sbom(*words: str | Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts/sbom.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, check=True, encoding="utf-8")
    bom: dict[str, Any] = json.loads(done.stdout)
    refs = [one["bom-ref"] for one in (bom["metadata"]["component"], *bom["components"])]
    assert len(refs) == len(set(refs)) and (bom["bomFormat"], bom["specVersion"]) == (
        "CycloneDX",
        "1.6",
    )
    assert {to for one in bom["dependencies"] for to in (one["ref"], *one["dependsOn"])} <= {*refs}
    return bom


def test_a_wheel_runs_with_what_the_lock_has_above_its_tests(tmp_path: Path) -> None:
    wheel = tmp_path / "mindspore_lite_runner-1.0.0rc1-py3-none-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"content")
    bom = sbom(wheel)
    own = bom["metadata"]["component"]
    assert own["purl"] == "pkg:pypi/mindspore-lite-runner@1.0.0rc1"
    assert own["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"content").hexdigest()}]
    above = (ROOT / "requirements/lock.txt").read_text().partition("\n# core\n")[2]
    above = above.partition("\n# tests\n")[0]
    assert len(bom["components"]) == above.count("==") > 50
    assert sum(len(one["hashes"]) for one in bom["components"]) == above.count("--hash=sha256:")
    assert any(one["name"] == "mindspore" for one in bom["components"])


def test_an_environment_has_its_packages_and_what_each_requires() -> None:
    bom = sbom()
    found = {one["name"]: one for one in bom["components"]}
    assert found["numpy"]["version"] == metadata.version("numpy")
    assert found["Jinja2" if "Jinja2" in found else "jinja2"]["purl"].startswith("pkg:pypi/jinja2@")
    edges = {one["ref"]: one["dependsOn"] for one in bom["dependencies"]}
    hydra = edges[found["hydra-core"]["purl"]]
    assert any(one.startswith("pkg:pypi/omegaconf@") for one in hydra)
    assert all(found[name]["licenses"] for name in ("numpy", "hydra-core", "uvicorn"))


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="no Debian")
def test_the_sbom_of_a_system_has_debian_packages() -> None:
    purls = [one["purl"] for one in sbom("--system")["components"]]
    assert any(one.startswith("pkg:deb/debian/libc6@") for one in purls)
