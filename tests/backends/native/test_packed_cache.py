"""Packed layers in the cache: made once of what a checkpoint holds, or in memory, with a note."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.backends import Row, collectives
from lite_runner.backends.native import packed_cache
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.backends.native.packed_cache import (
    FILE,
    content_digest,
    entry_of,
    open_packed,
    packed_memory,
    packed_model,
    write_packed,
)
from lite_runner.config.argv import parse
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate
from lite_runner.native.packed_model import pack
from lite_runner.native.structs import WHOLE
from lite_runner.run_modes import heads, resolve
from lite_runner.system import user_cache
from lite_runner.weights.lora.adapter import pool_size
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.read_ahead import QuantizedWeights
from tests import references
from tests.conftest import Reference
from tests.paths import FIXTURES

KEPT, DAMAGED = "is in the cache from now on", "is damaged, and packed again"
IN_MEMORY = "is packed in memory, at each start: "
Stderr = Callable[[], str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stderr(capfd: pytest.CaptureFixture[str]) -> Stderr:
    """Standard error since the last call."""
    return lambda: capfd.readouterr().err


@pytest.fixture
def files(cache: Path, write_tiny_llama: Callable[..., Path]) -> ModelFiles:
    write_tiny_llama("model")
    return files_of("load_checkpoint=model")


def files_of(*settings: str) -> ModelFiles:
    config, _ = resolve(parse(["model=auto", "predict_data=x", *settings], heads()))
    return locate(config.source)


def packed(files: ModelFiles, *, cached: bool = True, ranks: Ranks | None = None) -> list[bytes]:
    found = packed_model(files, None, name="tiny", cached=cached, ranks=ranks or Ranks())
    return [layer.block.tobytes() for layer in found]


def entries(cache: Path) -> list[Path]:
    return sorted(one.relative_to(cache) for one in cache.glob("packed/[!.]*"))


def test_layers_are_packed_once(
    files: ModelFiles, cache: Path, stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = packed(files, cached=False)
    monkeypatch.setattr(user_cache, "LARGE", 1)
    assert not entries(cache) and KEPT not in stderr()
    assert packed(files) == wanted
    assert KEPT in stderr()
    file = entry_of(files) / FILE
    estimated, loading = packed_memory(files, Ranks(), WHOLE, cached=False)
    assert file.stat().st_size == pytest.approx(estimated, rel=0.2) and loading
    written = file.stat().st_mtime_ns
    user_cache._found.clear()  # as in another process, which does not verify them
    assert user_cache.of_file("damaged layers", file, lambda: pytest.fail("read")) == []
    assert packed(files) == wanted
    assert "pack" not in stderr() and file.stat().st_mtime_ns == written


def test_memory_of_cached_layers_is_the_size_of_the_file(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(files)
    monkeypatch.setattr(ModelFiles, "tensors", lambda *_, **__: pytest.fail("headers were read"))
    size = (entry_of(files) / FILE).stat().st_size
    assert packed_memory(files, Ranks(), WHOLE, cached=True) == (size, 0)


def test_copies_under_other_names_share_an_entry(
    files: ModelFiles, cache: Path, stderr: Stderr
) -> None:
    packed(files)
    shutil.copytree("model", "copy of it")
    Path("model").rename("elsewhere")
    for where in ("copy of it", "elsewhere"):
        packed(files_of(f"load_checkpoint={where}"))
    assert len(entries(cache)) == 1 and stderr().count(KEPT) == 1
    Path("elsewhere/model.safetensors").rename("elsewhere/of_tomorrow.safetensors")
    one = files_of("load_checkpoint=elsewhere/of_tomorrow.safetensors")
    shutil.copy("elsewhere/of_tomorrow.safetensors", "elsewhere/again.safetensors")
    assert entry_of(one) == entry_of(files_of("load_checkpoint=elsewhere/again.safetensors"))


def test_changes_of_the_layers_change_the_entry(files: ModelFiles) -> None:
    base = "load_checkpoint=model"
    others = [
        files,
        replace(files, rounded="bfloat16"),
        replace(files, model=replace(files.model, embedding_scale=2.0)),
        *(files_of(base, f"quant={quant}") for quant in ("a16w8", "a16w4", "a8w8")),
        files_of(base, "quant=a16w4", "quant_group=64"),
    ]
    found = {entry_of(one) for one in others}
    weights = Path("model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    found.add(entry_of(files))
    assert len(found) == len(others) + 1


@pytest.mark.parametrize("damage", ["a value", "the header", "cut", "gone"])
def test_a_damaged_entry_is_packed_again(files: ModelFiles, stderr: Stderr, damage: str) -> None:
    wanted = packed(files)
    stderr()
    file = entry_of(files) / FILE
    content = bytearray(file.read_bytes())
    if damage == "a value":
        content[-100] ^= 1
    elif damage == "the header":
        content[20] ^= 1
    elif damage == "cut":
        del content[-64:]
    file.write_bytes(content)
    if damage == "gone":
        file.unlink()
    assert packed(files) == wanted
    text = stderr()
    assert DAMAGED in text and KEPT in text and str(file) in text
    assert packed(files) == wanted
    assert "pack" not in stderr()


def test_a_cache_that_cannot_be_written(
    files: ModelFiles, stderr: Stderr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = packed(files, cached=False)
    stderr()
    (tmp_path / "file").touch()
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "file/cache"))
    for _ in range(2):
        assert packed(files) == wanted
        text = stderr()
        assert f"tiny {IN_MEMORY}{tmp_path}/file" in text and "LITE_RUNNER_CACHE=FOLDER" in text


def test_a_disk_that_is_full(
    files: ModelFiles, stderr: Stderr, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise EnvironmentFault("the disk is full", "free some space")

    for place in (
        "lite_runner.system.user_cache.require_space",
        f"{packed_cache.__name__}.write_packed",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, full)
            packed(files)
        assert f"{IN_MEMORY}the disk is full" in stderr() and not entries(cache)


def test_an_entry_that_cannot_be_written_is_used(
    files: ModelFiles, stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a layer of an image has it; tests/test_read_only_cache.py: with modes that say so."""
    wanted = packed(files)
    stderr()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.utime", refused)
    monkeypatch.setattr(packed_cache, "new_folder", refused)
    monkeypatch.setattr(packed_cache, "cannot_hold", lambda *_: "it is read-only")
    assert packed(files) == wanted and "pack" not in stderr()


def test_parameters_in_memory_and_random_weights_are_not_cached(
    files: ModelFiles, cache: Path
) -> None:
    held = replace(files, held=dict(files.tensors()), path=None)
    assert packed(held) == packed(files, cached=False)
    held = replace(held, path=files.path)  # read from there, and then changed by a script
    assert packed(held) == packed(files, cached=False)
    config, _ = resolve(parse(["model=tiny_llama", "predict_data=x"], heads()))
    random = locate(config.source)
    assert random.path is None and packed(random) == packed(random) != packed(held)
    assert not entries(cache)


def test_replicas_leave_the_packing_to_the_first(
    files: ModelFiles, stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []

    def broadcast(ranks: Ranks, text: str) -> str:
        if ranks.rank == 0:
            messages.append(text)
            return text
        return messages.pop(0)

    monkeypatch.setattr(collectives, "broadcast", broadcast)
    first, second = Ranks(0, 2), Ranks(1, 2)
    wanted = packed(files, ranks=first)
    assert KEPT in stderr()
    assert packed(files, ranks=second) == wanted and not stderr()
    monkeypatch.setattr(packed_cache, "_found", lambda *_: None)
    monkeypatch.setattr(packed_cache, "_pack_into", lambda *_: "no room")
    assert packed(files, ranks=first) == packed(files, ranks=second) == wanted
    assert stderr().count(f"{IN_MEMORY}no room") == 1


def test_a_rank_on_another_machine_verifies_the_layers_there(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = packed(files)
    answers = ["", "another file"]
    monkeypatch.setattr(collectives, "broadcast", lambda ranks, text: answers.pop(0))
    assert packed(files, ranks=Ranks(1, 2)) == wanted
    file = entry_of(files) / FILE
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    answers += ["", "another file"]
    with pytest.raises(ArtifactError, match="not the bytes that were written"):
        packed(files, ranks=Ranks(1, 2))


def test_adapters_compute_beside_mapped_layers_as_beside_those_in_memory(cache: Path) -> None:
    """Also rounded to bfloat16: a file of layers serves any pool."""
    files = files_of(f"load_checkpoint={FIXTURES}/reference/llama")
    adapters = list(open_adapters(FIXTURES / "adapters/llama", files.model).values())[:2]
    for rounded in (False, True):
        lora = pool_size(adapters, 2, rounded=rounded)
        logits = []
        for cached in (True, False):
            found = packed_model(files, lora, name="llama", cached=cached, ranks=Ranks())
            options = NativeOptions(slots=3, length=32, lora=lora)
            backend = NativeBackend(files.model, found, options, adapters)
            assert backend.adapters is not None
            slots = [-1, *(backend.adapters.pin(one.name) for one in adapters)]
            tokens = np.array([5, 7, 11], np.int32)
            logits.append(backend.forward([Row(i, tokens, 0, s) for i, s in enumerate(slots)]))
        assert logits[0].tobytes() == logits[1].tobytes()
        assert len({row.tobytes() for row in logits[0]}) == 3
    assert len(entries(cache)) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text(name)
    return folder


def test_a_file_is_what_it_holds(tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    first.write_bytes(b"same")
    second.write_bytes(b"same")
    assert content_digest(first) == content_digest(second)
    second.write_bytes(b"other")
    assert content_digest(first) != content_digest(second)


def test_a_folder_is_what_its_weights_hold(folder: Path, tmp_path: Path) -> None:
    whole = content_digest(folder)
    assert content_digest(Path(shutil.copytree(folder, tmp_path / "copy"))) == whole
    assert content_digest(folder / "model.safetensors.index.json") == whole
    (folder / "README.md").write_text("what is no weight")
    (folder / "outputs/latest").mkdir(parents=True)  # of a run in this folder
    (folder / "outputs/latest/result.json").write_text("{}")
    assert content_digest(folder) == whole
    (folder / "b.safetensors").write_text("other")
    changed = content_digest(folder)
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    assert len({whole, changed, content_digest(folder)}) == 3


def test_shards_of_every_rank_count(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}/x.ckpt").write_text(str(rank))
    whole = content_digest(tmp_path)
    (tmp_path / "rank_1/x.ckpt").write_text("other")
    assert content_digest(tmp_path) != whole


def written(path: Path, case: str) -> Reference:
    known = Reference(case)
    weights = QuantizedWeights(known.tensors(), known.config)
    with path.open("wb") as file:
        write_packed(file, known.config, lambda room: pack(known.config, weights, room=room))
    return known


class Written(io.BytesIO):
    """A file that remembers where writes began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        start = self.tell()
        count = super().write(data)
        self.bounds.append((start, start + count))
        return count


def test_layers_of_a_file_are_those_that_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every reference model: memory that one layer left behind is no part of another. And all is
    written by whole pages."""
    monkeypatch.setattr(packed_cache, "HUGE_PAGE", 1 << 13)
    path, wrong = tmp_path / "layers", []
    for case in references.every():
        known = written(path, case)
        found = open_packed(path, known.config)
        wanted = pack(known.config, QuantizedWeights(known.tensors(), known.config))
        if [one.block.tobytes() for one in found] != [one.block.tobytes() for one in wanted]:
            wrong.append(case)
    assert not wrong
    with Written() as file:
        weights = QuantizedWeights(known.tensors(), known.config)
        write_packed(file, known.config, lambda room: pack(known.config, weights, room=room))
        assert file.getvalue() == path.read_bytes()
        *whole, (last, end), header = file.bounds
    assert len(whole) > 5 and last > 0 and end == path.stat().st_size and header[0] == 0
    assert all(start % (1 << 13) == stop % (1 << 13) == 0 for start, stop in whole)


def test_damage_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "layers"
    known = written(path, "llama")
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    digest = json.loads(whole[8:start])["__metadata__"]["head"]
    passed = []
    for at in (0, 9, whole.index(b"offsets"), whole.index(digest.encode()), start, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        try:
            open_packed(path, known.config)
        except ArtifactError as error:
            assert str(path) in error.message and error.hint
        else:
            passed.append(at)
    assert not passed
    path.write_bytes(whole[:-64])
    with pytest.raises(ArtifactError):
        open_packed(path, known.config)
    path.write_bytes(whole)
    open_packed(path, known.config)


def test_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "layers", "llama")
    for case in ("qwen2", "mixtral"):
        with pytest.raises(ArtifactError):
            open_packed(tmp_path / "layers", Reference(case).config)


def test_a_layer_that_cannot_be_written_ends_in_its_error(tmp_path: Path) -> None:
    known = Reference("llama")
    weights = QuantizedWeights(known.tensors(), known.config)
    path = tmp_path / "layers"
    path.touch()
    with path.open("rb") as read_only, pytest.raises(OSError, match="write"):
        write_packed(read_only, known.config, lambda room: pack(known.config, weights, room=room))
    weights.close()
