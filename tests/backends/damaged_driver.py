"""Loads damaged copies of an exported model, one after the other, and computes with each.

`python -m tests.backends.damaged_driver FOLDER`: a line of JSON on standard input is a damage,
{file: [[start, end, bytes in hex that replace those], ..]}; a line on standard output says how it
ended. A hang ends this process by SIGALRM.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

from lite_runner.backends.base import Row
from lite_runner.backends.engines.start import EngineOptions
from lite_runner.backends.exported import open_exported
from lite_runner.config.model_dir import MANIFEST
from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import read_manifest

WATCHDOG_S = 120  # a healthy load takes a tenth of a second


def outcome(folder: Path) -> str:
    """How loading the model and two steps end: "error: .." or "logits of [..]"."""
    try:
        manifest = read_manifest(folder)
        backend = open_exported(
            manifest.paths(folder), manifest, EngineOptions("graph-cell", threads=2), slots=2
        )
        tokens = np.arange(1, 18, dtype=np.int32)
        shapes = [
            backend.forward([Row(0, tokens, 0), Row(1, tokens[:3], 0)]).shape,
            backend.forward([Row(1, tokens[3:4], 3), Row(0, tokens[:1], 17)]).shape,
        ]
        backend.close()
    except ArtifactError as error:
        return f"error: {error.message}"
    return f"logits of {shapes}"


def main(source: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        for line in sys.stdin:
            shutil.copytree(source, folder)
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            for name, changes in json.loads(line).items():
                data = bytearray((folder / name).read_bytes())
                for start, end, replacement in changes:
                    data[start:end] = bytes.fromhex(replacement)
                (folder / name).write_bytes(data)
                manifest["files"][name] = hashlib.sha256(data).hexdigest()
            (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            signal.alarm(WATCHDOG_S)
            print(json.dumps(outcome(folder)), flush=True)
            signal.alarm(0)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
