"""A run that is killed, or fills the disk, leaves no part of a file."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.text.tokenizer import byte_tokenizer
from tests.forks import forks
from tests.paths import FIXTURES, REFERENCE
from tests.tokenizer_files import write_tokenizer

CONVERT = ("run_mode=convert", "load_checkpoint=model")
ADAPTERS = ("run_mode=convert", "load_checkpoint=model", "adapter_path=adapters")
SHARD = ("run_mode=shard", "model=auto", "load_checkpoint=model")
# What writes, and the key of where.
WRITERS = {
    "safetensors": (*CONVERT, "convert_output=new/m.safetensors"),
    "ckpt": (*CONVERT, "convert_format=ckpt", "convert_output=new/m.ckpt"),
    "huggingface": (*CONVERT, "convert_format=huggingface", "convert_output=new"),
    "quantize": (
        "run_mode=quantize",
        "load_checkpoint=model",
        "quant=a16w8",
        "quantize_output=new",
    ),
    "shard": (*SHARD, "parallel=tp2", "shard_output=new"),
    "merge": ("run_mode=shard", "model=auto", "load_checkpoint=cut", "shard_output=new/m.ckpt"),
    "peft": (*ADAPTERS, "convert_format=peft", "convert_output=new"),
    "merged": (
        *ADAPTERS[:2],
        "adapter_path=adapters/all",
        "merge=true",
        "convert_output=new/m.safetensors",
    ),
}
IN_ONE = {"quantize", "shard"}  # a folder that is replaced as a whole; of others, file by file
LARGEST = 4096  # bytes of a file, where the disk is full


def forked(action: Callable[[], int]) -> int:
    """The exit status of a child that runs `action`: its code, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write(words: Sequence[str]) -> int:
    return main([*words, "overwrite=true", "verbosity=0"])


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but those that a killed run left for the next to remove."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".lite_runner" not in str(path)
    }


def change_weights() -> None:
    """The model and the adapters as another training left them."""
    for path in (*Path("model").glob("*.safetensors"), *Path("adapters").rglob("*.safetensors")):
        data = bytearray(path.read_bytes())
        for place in range(10 + int.from_bytes(data[:8], "little"), len(data), 400):
            data[place] ^= 32  # of a mantissa
        path.write_bytes(data)


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> str:
    """A writer; in the current folder what it reads, and in `new` what it wrote before."""
    name: str = request.param
    shutil.copytree(REFERENCE / "llama", "model")
    shutil.copytree(FIXTURES / "adapters/llama", "adapters")
    if name == "merge":
        assert forked(lambda: write((*SHARD, "parallel=tp2", "shard_output=cut"))) == 0
    assert forked(lambda: write(WRITERS[name])) == 0
    change_weights()
    if name == "merge":
        assert forked(lambda: write((*SHARD, "parallel=tp2", "shard_output=cut"))) == 0
    return name


def test_a_full_disk_leaves_what_there_was(writer: str) -> None:
    old = contents(Path("new"))

    def full() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
        return write(WRITERS[writer])

    assert max(map(len, old.values())) > LARGEST
    assert forked(full) == 3
    assert contents(Path("new")) == old
    assert not list(Path("new").glob(".*")) and not list(Path().glob(".*"))


@pytest.mark.parametrize("synced", [1, 3])
def test_a_killed_run_leaves_what_there_was_or_what_is_new(writer: str, synced: int) -> None:
    """Killed when it makes sure that the n-th file or folder is on the disk."""
    old = contents(Path("new"))

    def killed() -> int:
        left, fsync = synced, os.fsync

        def counted(handle: int) -> None:
            nonlocal left
            if (left := left - 1) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(handle)

        os.fsync = counted
        return write(WRITERS[writer])

    how = forked(killed)
    assert how in (-signal.SIGKILL, 0)
    found = contents(Path("new"))
    assert forked(lambda: write(WRITERS[writer])) == 0
    new = contents(Path("new"))
    assert old.keys() == new.keys() and old != new
    if writer in IN_ONE or how == 0:
        assert found in (old, new)
    assert found.keys() == old.keys()
    assert all(data in (old[name], new[name]) for name, data in found.items())


# -- Exports, in processes of their own: MindSpore's threads do not survive a fork. --------------

# Any layout: a folder is replaced as a whole. That of one graph compiles in a quarter of the time.
EXPORT = (
    *("run_mode=export", "model=auto", "load_checkpoint=model", "export_output=new"),
    *("export.layout=resizable", "infer.infer_seq_length=32"),
)
# What is written is not verified: that compiles the graphs twice more.
EXPORTS = """
import importlib, os, resource, signal, sys
from lite_runner.app import main
from lite_runner.backends.lite.export import writer
writer.verify = lambda *_, **__: None
"""
# Ends itself before or after this call of a function.
KILLED = f"""{EXPORTS}
def kill(when, name):
    module, _, name = name.rpartition(".")
    module = importlib.import_module(module)
    call = getattr(module, name)
    def ended(*arguments):
        if when == "after":
            call(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(module, name, ended)

if sys.argv[1]:
    kill(*sys.argv[1].split())
sys.exit(main(sys.argv[2:]))
"""
FULL = f"""{EXPORTS}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({LARGEST},) * 2)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def export(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """`export(*words, code=...)`: how a process that exports to `new` ends."""
    base = tmp_path.parent / f"{tmp_path.name}-export"
    base.mkdir()

    def run(*words: str, code: str = KILLED) -> int:
        (base / "code.py").write_text(code)
        words = (*words, *EXPORT, "overwrite=true", "verbosity=0")
        done = started.run(*words, program=str(base / "code.py"))
        assert "Traceback" not in done.stderr
        return done.returncode

    with forks(base) as started:
        yield run


def test_an_export_that_is_ended_leaves_what_there_was_or_what_is_new(
    write_tiny_llama: Callable[..., Path], export: Callable[..., int]
) -> None:
    write_tokenizer(byte_tokenizer(), write_tiny_llama("model", {"num_layers": 1}))
    assert export("") == 0
    change_weights()
    old = contents(Path("new"))
    assert max(map(len, old.values())) > LARGEST
    assert export(code=FULL) == 3
    assert contents(Path("new")) == old and not list(Path().glob(".new*"))
    # As a run that is killed earlier leaves it: all that is new is in a folder of its own.
    assert export("before lite_runner.backends.lite.export.output_paths.put_in_place") == (
        -signal.SIGKILL
    )
    assert contents(Path("new")) == old
    after = "after lite_runner.backends.lite.export.output_paths.put_in_place"
    assert export(after) == -signal.SIGKILL
    found = contents(Path("new"))
    assert found.keys() == old.keys() and found != old
    for orphan in Path().glob(".new*"):
        os.utime(orphan, (0, 0))  # a young one may be another run's that has not locked it yet
    assert export("") == 0
    assert contents(Path("new")).keys() == found.keys()  # a graph has names of its own each time
    assert not list(Path().glob(".new*"))  # of the killed ones
