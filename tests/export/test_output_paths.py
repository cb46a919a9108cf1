"""Where an export goes, and what of the user's lies there and stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.config.model_yaml import HEAD
from lite_runner.errors import ConfigError
from lite_runner.export.output_paths import OutputPaths
from lite_runner.mindir.manifest import MANIFEST

OURS = f"{HEAD}\nmodel: ours\n"


def fill(folder: Path, text: str) -> Path:
    """A pair above 1 GB, as it is written."""
    for name in ("a_graph.mindir", "a_variables/data_0", "b.mindir", MANIFEST):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "ours.yaml").write_text(OURS + text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("prefill", "increment", "folder", "stems"),
    [
        ("x/a.mindir", "x/b", "x", ("a", "b")),
        ("x/a_7.1b", "x/b_7.1b.mindir", "x", ("a_7.1b", "b_7.1b")),
        ("x/one/a.mindir", "x/two/b.mindir", "x", ("one/a", "two/b")),
    ],
)
def test_the_folder_of_two_paths(
    prefill: str, increment: str, folder: str, stems: tuple[str, str]
) -> None:
    found = OutputPaths.of_pair(Path(prefill), Path(increment), False)
    assert found.folder == Path(folder) and found.stems is not None
    assert tuple(found.stems.values()) == stems


@pytest.mark.parametrize("name", ["a.mindir", "b_graph.mindir", "a_variables", MANIFEST])
def test_what_a_pair_would_replace(tmp_path: Path, name: str) -> None:
    place = OutputPaths.of_pair(tmp_path / "x/a", tmp_path / "x/b", False)
    place.check()
    (tmp_path / "x").mkdir()
    (tmp_path / "x/notes.txt").touch()
    place.check()
    (tmp_path / "x" / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name}: exists already"):
        place.check()
    OutputPaths(place.folder, place.stems, overwrite=True).check()
    with pytest.raises(ConfigError, match="x: exists already"):
        OutputPaths(tmp_path / "x").check()


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_that_another_process_was_first_with(tmp_path: Path, overwrite: bool) -> None:
    fill(tmp_path / "x", "first")
    (tmp_path / "x/more").touch()
    place = OutputPaths(tmp_path / "x", overwrite=overwrite)
    with place.temporary() as written:
        place.take(fill(written, "second"))
    assert (tmp_path / "x" / MANIFEST).read_text() == ("second" if overwrite else "first")
    assert (tmp_path / "x/more").exists() is not overwrite  # the folder is the export's alone
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_pair_replaces_its_own_files_and_no_others(tmp_path: Path) -> None:
    folder = fill(tmp_path / "x", "first")
    (folder / "a_variables/data_1").touch()  # of a larger model
    users = {"mine.yaml": "model: mine", "notes.txt": "years of work", "old/a.mindir": "old"}
    for name, text in users.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "of another export.yaml").write_text(OURS)
    place = OutputPaths.of_pair(folder / "a", folder / "b", overwrite=True)
    assert place.has_own_yaml()
    with place.temporary() as written:
        new = contents(fill(written, "second"))
        place.take(written)
    assert contents(folder) == new | users


def test_graphs_in_folders_of_their_own(tmp_path: Path) -> None:
    place = OutputPaths.of_pair(tmp_path / "x/one/a", tmp_path / "x/two/b", overwrite=False)
    assert not place.has_own_yaml()
    place.make_parent()
    with place.temporary() as written:
        for name in ("one/a.mindir", "two/b.mindir", MANIFEST):
            (written / name).parent.mkdir(exist_ok=True)
            (written / name).write_text(name)
        new = contents(written)
        place.take(written)
    assert contents(tmp_path / "x") == new


@pytest.mark.parametrize("moves", range(4))
def test_a_pair_that_is_half_there_has_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """Of a process that is killed between two moves: the old one's would name the new files."""
    folder = fill(tmp_path / "x", "first")
    place = OutputPaths.of_pair(folder / "a", folder / "b", overwrite=True)
    replace, done = Path.replace, list[str]()

    def killed(self: Path, target: Path) -> Path:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt), place.temporary() as written:
        place.take(fill(written, "second"))
    assert not (folder / MANIFEST).exists() and MANIFEST not in done
    assert len(done) == moves
