"""Exported models that the user gives: the files that are found, and errors with exit code 4."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.backends.lite.export import writer
from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError
from lite_runner.model.exported_model import exported_model, graphs_in
from lite_runner.model.locate import locate, tokenizer_of
from lite_runner.run_modes import heads, resolve
from tests.paths import ROOT
from tests.refusals import refused

PREFILL, INCREMENT = "tiny_llama_prefill_graph.mindir", "tiny_llama_inc_graph.mindir"
TINY = ["model=tiny_llama", "model.model_config.num_layers=1"]  # to compile
PREDICT = ["predict_data=some words", "max_new_tokens=6", "eos_token_id=[]"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static pair of tiny_llama, as run_mode=export writes it."""
    folder = tmp_path_factory.mktemp("exported") / "prefill"  # a name that means nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        patch.setenv("LITE_RUNNER_CACHE", str(folder.parent / "cache"))
        patch.setattr(writer, "verify", lambda *_, **__: None)
        layout = ["export.layout=static_pair", "infer.infer_seq_length=64"]
        assert main(["run_mode=export", *TINY, *layout, f"export_output={folder}"]) == 0
    return folder


@pytest.fixture
def ours(exported: Path, tmp_path: Path) -> Path:
    """A copy with its manifest."""
    return Path(shutil.copytree(exported, tmp_path / "prefill_graph.mindir"))


@pytest.fixture
def foreign(ours: Path) -> Path:
    """A copy without it."""
    (ours / "manifest.json").unlink()
    return ours


def config(*settings: str) -> RunConfig:
    line = parse(["backend=mslite", *PREDICT, *settings], heads())
    return resolve(line)[0]


def pair(folder: Path, prefill: str = PREFILL, increment: str = INCREMENT) -> list[str]:
    return [
        f"infer.prefill_model_path={folder / prefill}",
        f"infer.increment_model_path={folder / increment}",
    ]


def refusal(*settings: str) -> str:
    with pytest.raises(ArtifactError) as caught:
        exported_model(config(*settings).source)
    return str(caught.value)


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """The ids that a command line generates."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))

    def run(*settings: str) -> list[int]:
        assert main([*PREDICT, *settings]) == 0
        result: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text())
        ids: list[int] = result["results"][0]["token_ids"]
        return ids

    return run


def test_every_way_to_give_a_pair_says_the_same(
    tokens: Callable[..., list[int]], ours: Path, tmp_path: Path
) -> None:
    online = tokens(*TINY)
    # With our manifest nothing else says which model it is.
    assert tokens("backend=mslite", f"infer.model_dir={ours}") == online
    assert tokens("backend=mslite", *pair(ours)) == online
    (ours / "manifest.json").unlink()
    assert tokens("backend=mslite", f"infer.model_dir={ours}") == online  # by its yaml
    (tmp_path / "elsewhere").mkdir()
    moved = (ours / INCREMENT).rename(tmp_path / "elsewhere" / "second.mindir")
    paths = pair(ours, increment=str(moved))
    assert tokens("backend=mslite", *TINY, *paths) == online


def test_names_with_and_without_graph(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An export to x writes x_graph.mindir above 1 GB, else x.mindir, and any of the three finds
    what there is."""
    (foreign / PREFILL).rename(foreign / "x_prefill_seq1024_bs1.mindir")
    (foreign / INCREMENT).rename(foreign / "x_decode_seq1024_bs1_graph.mindir")
    for prefill in ("x_prefill_seq1024_bs1", "x_prefill_seq1024_bs1_graph.mindir"):
        increment = "x_decode_seq1024_bs1" + prefill.removeprefix("x_prefill_seq1024_bs1")
        given = exported_model(config(*TINY, *pair(foreign, prefill, increment)).source)
        assert given is not None
        assert {name: path.name for name, path in given.graphs.items()} == {
            "prefill": "x_prefill_seq1024_bs1.mindir",
            "increment": "x_decode_seq1024_bs1_graph.mindir",
        }
        assert (
            f"{prefill}: no such file; using x_prefill_seq1024_bs1.mindir"
            in capsys.readouterr().err
        )
        assert graphs_in(foreign) == given.graphs
    (foreign / "x_prefill_seq1024_bs1_graph.mindir").touch()
    error = refusal(*TINY, *pair(foreign, "x_prefill_seq1024_bs1"))
    assert "but both x_prefill_seq1024_bs1.mindir and x_prefill_seq1024_bs1_graph.mindir" in error


def test_a_manifest_counts_for_the_files_it_names(ours: Path) -> None:
    given = exported_model(config(*pair(ours)).source)
    assert given is not None and given.manifest.files and given.folder == ours
    assert dict(given.graphs) == {"prefill": ours / PREFILL, "increment": ours / INCREMENT}
    (ours / "other.mindir").write_bytes((ours / PREFILL).read_bytes())
    other = exported_model(config(*TINY, *pair(ours, prefill="other.mindir")).source)
    assert other is not None and not other.manifest.files
    assert "another file than the one exported" in _broken(ours, *pair(ours))
    assert "another file than the one exported" in _broken(ours, f"infer.model_dir={ours}")


def _broken(folder: Path, *settings: str) -> str:
    content = (folder / INCREMENT).read_bytes()
    (folder / INCREMENT).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        return refusal(*settings)
    finally:
        (folder / INCREMENT).write_bytes(content)


def test_a_pair_above_1_gb_by_the_name_it_was_asked_for(foreign: Path) -> None:
    named = pair(foreign, "tiny_llama_prefill.mindir", "tiny_llama_inc.mindir")
    given = exported_model(config(*TINY, *named).source)
    assert given is not None
    assert [path.name for path in given.graphs.values()] == [PREFILL, INCREMENT]


def test_ge_options_beside_the_graphs(foreign: Path) -> None:
    here = [*TINY, f"infer.model_dir={foreign}"]
    without = exported_model(config(*here).source)
    (foreign / "config.ini").write_text("[ascend_context]\nprovider=ge\n")
    given = exported_model(config(*here).source)
    assert given is not None and without is not None
    assert (without.ge_files, given.ge_files) == ((), (foreign / "config.ini",))


@pytest.mark.parametrize("manifest", [True, False])
def test_paths_that_are_no_pair(ours: Path, manifest: bool) -> None:
    if not manifest:
        (ours / "manifest.json").unlink()
    assert "swapped" in refusal(*TINY, *pair(ours, INCREMENT, PREFILL))
    assert "are the same file" in refusal(*TINY, *pair(ours, PREFILL, PREFILL))
    assert "no such file" in refusal(*TINY, *pair(ours, increment="x.mindir"))
    assert "a folder" in refusal(*TINY, *pair(ours.parent, prefill=ours.name))
    single = f"infer.prefill_model_path={ours / PREFILL}"
    assert "only one of a pair" in refusal(*TINY, single)


def test_ambiguous_graphs(foreign: Path) -> None:
    paths = pair(foreign)
    assert "no manifest.json says which model it is" in refusal("model=auto", *paths)
    assert "which is a bloom" in refusal("model=tiny_bloom", *paths)
    assert "no such folder" in refusal("infer.model_dir=nowhere")
    assert "File name too long" in refusal(f"infer.model_dir={'a' * 300}")
    (foreign / "x.ms").touch()
    text = refusal(*TINY, f"infer.prefill_model_path={foreign / 'x.ms'}")
    assert "no manifest.json names it" in text
    text = refusal(*TINY, f"infer.model_dir={foreign}", "infer.model_type=mindir_lite")
    assert "the model is mindir" in text


def test_two_yaml_files_in_a_folder_end_in_4(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(foreign.parent)
    (foreign / "another.yaml").touch()
    for model in ([], TINY):
        given = ["backend=mslite", f"infer.model_dir={foreign}", *PREDICT, *model]
        refused(given, 4)
        assert "2 yaml files (another.yaml, tiny_llama.yaml)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "no MindIR"),
        (("x.ms",), "a .ms, but no manifest.json"),
        (("x.mindir", "y.mindir"), "got x.mindir, y.mindir"),
        (("x_inc_graph.mindir",), "only one of a pair, there is no ...prefill_graph.mindir"),
        (("x_inc_graph.mindir", "y.mindir"), "there is no ...prefill_graph.mindir"),
        (("x_inc_graph.mindir", "y_inc_graph.mindir"), "got x_inc_graph.mindir, y_inc_graph"),
        (("a.mindir", "b.mindir", "c.mindir"), "got 3 MindIR files"),
    ],
)
def test_folders_that_are_ambiguous(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    folder = tmp_path / "a_prefill_graph.mindir"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(ArtifactError, match=message):
        graphs_in(folder)


def test_an_export_or_a_run_without_paths_gives_none(tmp_path: Path) -> None:
    assert exported_model(config(*TINY).source) is None
    settings = ["run_mode=export", *TINY, *pair(tmp_path)]
    assert exported_model(resolve(parse(settings, heads()))[0].source) is None


def test_the_files_of_a_given_model(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No checkpoint is read; the sizes are the manifest's, the special tokens the config's."""
    here = f"infer.model_dir={ours}"
    files = locate(config(*TINY, here, "load_checkpoint=nowhere").source)
    assert "load_checkpoint: not read" in capsys.readouterr().err
    assert (files.path, files.source) == (None, "random")
    with pytest.raises(ArtifactError, match="weights stay in it"):
        files.tensors()
    auto = locate(config(here).source)
    assert auto.exported is not None and auto.model == auto.exported.manifest.model
    other = locate(config(*TINY, here, "model.model_config.eos_token_id=7").source)
    assert other.model.eos_token_id == (7,)
    with pytest.raises(ArtifactError, match="num_layers: the config says 3, the export 1"):
        locate(config(*TINY, here, "model.model_config.num_layers=3").source)


def test_the_tokenizer_of_a_given_model(ours: Path) -> None:
    here = f"infer.model_dir={ours}"

    def encoded(*settings: str) -> list[int]:
        run = config(*settings)
        return tokenizer_of(run.tokenizer, locate(run.source)).encode("ab")

    wanted = encoded(here)
    assert wanted[-2:] == [97, 98]
    (ours / "manifest.json").unlink()
    assert encoded(*TINY, here) == wanted  # built in
    own = ["processor.tokenizer.type=AutoTokenizer", *TINY, here]
    assert encoded(*own) == wanted  # the file beside the graphs
    (ours / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"processor\.tokenizer\.tokenizer_file="):
        encoded(*own)


def test_cheap_checks_come_before_mindspore(foreign: Path) -> None:
    (foreign / PREFILL).rename(foreign / "x.mindir")
    (foreign / INCREMENT).rename(foreign / "y.mindir")
    code = (
        "import sys; from lite_runner.app import main;"
        f"code = main(['backend=mslite', 'model=tiny_llama', 'infer.model_dir={foreign}',"
        " 'predict_data=a']);"
        "sys.exit(100 if 'mindspore' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=foreign,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 4, done.stderr
