"""scripts/llama_server.sh, with stand-ins for pip and CMake."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.paths import ROOT

PIP = """#!/bin/sh
echo "$@" >>pip.log
mkdir -p source/vendor/llama.cpp
tar -czf build/llama.cpp/llama_cpp_python-0.tar.gz source
"""


def test_the_server_is_built_once_from_the_version_of_the_peers(tmp_path: Path) -> None:
    for name in ("scripts/llama_server.sh", "scripts/llama_flags.sh", "requirements/peers.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stand_ins = {
        ".venv-bench/bin/python": PIP,
        "bin/cmake": '#!/bin/sh\necho "$@ $CXXFLAGS" >>cmake.log\n',
    }
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "bin/c++").symlink_to("/bin/true")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for _ in range(2):
        subprocess.run(
            ["bash", "scripts/llama_server.sh"], cwd=tmp_path, env=environment, check=True
        )
    asked = re.findall(r"llama-cpp-python==(\S+)$", (tmp_path / "pip.log").read_text(), re.M)
    pinned = re.findall(
        r"^llama-cpp-python==([\d.]+)", (ROOT / "requirements/peers.txt").read_text(), re.M
    )
    assert asked == pinned and len(pinned) == 1
    assert (tmp_path / "build/llama.cpp/.built").read_text().split() == pinned
    configured, built = (tmp_path / "cmake.log").read_text().splitlines()
    assert configured.endswith("-fno-tree-dse -fno-dse") and " --target llama-server " in built
