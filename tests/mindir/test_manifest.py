"""manifest.json: what it names belongs to the exported model, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import Graph, Manifest, TensorSpec, read_manifest
from lite_runner.system.files import sha256_of
from tests.models import model_named

TOKENS = TensorSpec("tokens", (-1, -1), "int32")
LOGITS = TensorSpec("logits", (-1, 256), "float32")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Of a folder with a graph and a file of another tool; somebody else's lies outside."""
    folder = tmp_path / "exported"
    folder.mkdir()
    for path in (folder / "model.mindir", folder / "other.mindir", tmp_path / "outside.mindir"):
        path.write_bytes(b"graph")
    return Manifest(
        layout="dynamic",
        model_name="tiny_llama",
        model=model_named("tiny_llama"),
        source="random",
        target="CPU",
        model_type="MINDIR",
        precision="float32",
        batch_size=1,
        seq_length=64,
        graphs={"model": Graph("model.mindir", (TOKENS,), (LOGITS,))},
        files={"model.mindir": sha256_of(folder / "model.mindir")},
        tokenizer=(),
        versions={},
    )


def test_as_it_was_written(manifest: Manifest, tmp_path: Path) -> None:
    manifest.write(tmp_path / "exported")
    assert read_manifest(tmp_path / "exported") == manifest


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["../outside.mindir", "ABSOLUTE", "link.mindir"])
def test_a_graph_outside(manifest: Manifest, tmp_path: Path, name: str, listed: bool) -> None:
    """Whether the files list it or not, with the right sha256."""
    folder, outside = tmp_path / "exported", tmp_path / "outside.mindir"
    (folder / "link.mindir").symlink_to(outside)
    name = name.replace("ABSOLUTE", str(outside))
    graphs = {"model": replace(manifest.graphs["model"], file=name)}
    files = {**manifest.files, name: sha256_of(outside)} if listed else manifest.files
    replace(manifest, graphs=graphs, files=files).write(folder)
    for checked in (True, False):
        with pytest.raises(ArtifactError, match=r"names the file .*mindir"):
            read_manifest(folder, check_files=checked)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_graph_that_the_files_do_not_list(manifest: Manifest, tmp_path: Path, rank: int) -> None:
    """It lies in the folder, but nobody knows its sha256."""
    names = ["model.mindir", "model.mindir"]
    names[rank] = "other.mindir"
    graph = replace(manifest.graphs["model"], file=names[0], others=(names[1],))
    replace(manifest, graphs={"model": graph}).write(tmp_path / "exported")
    with pytest.raises(ArtifactError, match=r"names the file 'other\.mindir'"):
        read_manifest(tmp_path / "exported", check_files=False)


def test_a_file_outside_that_no_graph_is_in(manifest: Manifest, tmp_path: Path) -> None:
    outside = {"../outside.mindir": sha256_of(tmp_path / "outside.mindir")}
    replace(manifest, files={**manifest.files, **outside}).write(tmp_path / "exported")
    with pytest.raises(ArtifactError, match=r"names the file '\.\./outside\.mindir'"):
        read_manifest(tmp_path / "exported")


def test_a_file_that_changed_or_is_gone(manifest: Manifest, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    manifest.write(folder)
    (folder / "model.mindir").write_bytes(b"graqh")
    with pytest.raises(ArtifactError, match="another file than the one exported"):
        read_manifest(folder)
    (folder / "model.mindir").unlink()
    with pytest.raises(ArtifactError, match="missing, but the manifest names it"):
        read_manifest(folder)
