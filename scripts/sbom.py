"""Writes an SBOM in CycloneDX's JSON (1.6) to standard output; nothing but the standard library.

python scripts/sbom.py WHEEL     of a wheel: what it runs with, as requirements/lock.txt pins it,
                                 with the SHA-256 of every file of each version
python scripts/sbom.py           of the environment of this Python: packages, licences, and what
                                 each requires
python scripts/sbom.py --system  and the system's packages, by dpkg; so is that of the image made
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

OWN = "mindspore-lite-runner"
LOCK = Path(__file__).resolve().parent.parent / "requirements/lock.txt"
# An entry of the lock, and the comments between which the packages stand that a wheel runs with.
_ENTRY = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n +--hash=sha256:\w+)+)", re.MULTILINE)
_RUNS_WITH = re.compile(r"^# core$(.*)^# tests$", re.MULTILINE | re.DOTALL)


def normalized(name: str) -> str:
    """A package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def component(name: str, version: str, **others: Any) -> dict[str, Any]:
    """A Python package."""
    purl = f"pkg:pypi/{normalized(name)}@{version}"
    known = {key: value for key, value in others.items() if value}
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    } | known


def hashes(digests: list[str]) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest} for digest in digests]


def of_wheel(path: Path) -> dict[str, Any]:
    """The document of a wheel file."""
    name, version = path.name.split("-")[:2]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    main = component(name.replace("_", "-"), version, hashes=hashes([digest]))
    main["licenses"] = [{"license": {"id": "Apache-2.0"}}]
    locked = _RUNS_WITH.search(LOCK.read_text(encoding="utf-8"))
    assert locked is not None, f"{LOCK} has no part between '# core' and '# tests'"
    found = [
        component(name, version, hashes=hashes(re.findall(r"sha256:(\w+)", digests)))
        for name, version, digests in _ENTRY.findall(locked[1])
    ]
    return document(main, found, {main["bom-ref"]: [one["bom-ref"] for one in found]})


def of_environment(system: bool) -> dict[str, Any]:
    """The document of this Python's environment; `system`: and of the machine's packages."""
    installed = {normalized(one.name): one for one in metadata.distributions()}
    parts = {
        name: component(one.name, one.version, licenses=licence(one.metadata))
        for name, one in installed.items()
    }
    edges = {}
    for name, one in installed.items():
        texts = [text for text in one.requires or () if "extra ==" not in text]
        needed = {normalized(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in texts}
        edges[parts[name]["bom-ref"]] = sorted(
            parts[each]["bom-ref"] for each in needed & parts.keys()
        )
    main = parts.pop(OWN, None) or {
        "type": "application",
        "bom-ref": sys.prefix,
        "name": sys.prefix,
    }
    return document(main, [*parts.values(), *(of_dpkg() if system else ())], edges)


def licence(fields: Any) -> list[dict[str, Any]]:
    """The licence in a package's metadata: an SPDX expression, or a name."""
    if expression := fields.get("License-Expression"):
        return [{"expression": expression}]
    names = [line for line in (fields.get("License") or "").splitlines() if line.strip()][:1]
    classifiers = fields.get_all("Classifier") or ()
    names += [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License ::")]
    return [
        {"license": {"name": name.strip()}} for name in dict.fromkeys(names) if name != "UNKNOWN"
    ]


def of_dpkg() -> list[dict[str, Any]]:
    """Debian's packages of this system."""
    form = "${Package} ${Version} ${Architecture}\n"
    done = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={form}"],
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    found = []
    for name, version, architecture in map(str.split, done.stdout.splitlines()):
        quoted = version.replace("+", "%2B").replace(":", "%3A").replace("~", "%7E")
        purl = f"pkg:deb/debian/{name.replace('+', '%2B')}@{quoted}?arch={architecture}"
        one = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        found.append(one)
    return found


def document(
    main: dict[str, Any], components: list[dict[str, Any]], edges: dict[str, list[str]]
) -> dict[str, Any]:
    """A whole SBOM; without a time, so that the same state gives the same bytes."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": main | {"type": "application"}},
        "components": sorted(components, key=lambda one: one["bom-ref"]),
        "dependencies": [{"ref": ref, "dependsOn": on} for ref, on in sorted(edges.items())],
    }


def main() -> None:
    match sys.argv[1:]:
        case [] | ["--system"]:
            made = of_environment(bool(sys.argv[1:]))
        case [path] if path.endswith(".whl"):
            made = of_wheel(Path(path))
        case _:
            sys.exit("usage: python scripts/sbom.py [WHEEL | --system]")
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
