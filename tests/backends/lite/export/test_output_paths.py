"""Output paths of an export, and files of the user's there, which stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.backends.lite.export import job as spec
from lite_runner.backends.lite.export.job import job_of_export
from lite_runner.backends.lite.export.output_paths import OutputPaths, output_paths
from lite_runner.config.argv import parse
from lite_runner.config.model_dir import HEAD
from lite_runner.config.sections import Ranks
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import MANIFEST
from lite_runner.model.adapters import with_adapter
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve
from tests.each import each
from tests.paths import FIXTURES

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
    found = OutputPaths.of_graphs({"prefill": Path(prefill), "increment": Path(increment)}, False)
    assert found.folder == Path(folder) and found.stems is not None
    assert tuple(found.stems.values()) == stems


@pytest.mark.parametrize(
    "name",
    [
        "a.mindir",
        "b_graph.mindir",
        "a_variables",
        "tokenizer.json",
        "tokenizer_config.json",
        MANIFEST,
    ],
)
def test_existing_files_of_a_pair(tmp_path: Path, name: str) -> None:
    place = OutputPaths.of_graphs(
        {"prefill": tmp_path / "x/a", "increment": tmp_path / "x/b"}, overwrite=False
    )
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
    place = OutputPaths.of_graphs(
        {"prefill": folder / "a", "increment": folder / "b"}, overwrite=True
    )
    assert place.has_own_yaml()
    with place.temporary() as written:
        new = contents(fill(written, "second"))
        place.take(written)
    assert contents(folder) == new | users


def test_graphs_in_folders_of_their_own(tmp_path: Path) -> None:
    place = OutputPaths.of_graphs(
        {"prefill": tmp_path / "x/one/a", "increment": tmp_path / "x/two/b"}, overwrite=False
    )
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
    place = OutputPaths.of_graphs(
        {"prefill": folder / "a", "increment": folder / "b"}, overwrite=True
    )
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


ADAPTERS = FIXTURES / "adapters/llama"


def named(*settings: str) -> str:
    """The name of the folder, once the config's checks have passed."""
    words = ["run_mode=export", "model=tiny_llama", "export.layout=static_pair", *settings]
    config, _ = resolve(parse(words, heads()))
    files = with_adapter(locate(config.source), config.adapters)
    job = job_of_export(config.settings, files, Ranks(), slots=config.predict_batch_size or 1)
    folder = output_paths(job, "", overwrite=False).folder
    assert folder.parent == Path(config.output_dir)
    return folder.name


@each(
    ("settings", "name"),
    [
        ([], "static_pair"),
        (["predict_batch_size=1", "infer.infer_seq_length=256"], "static_pair"),  # as without
        (["predict_batch_size=4"], "static_pair_b4"),
        (["infer.infer_seq_length=64"], "static_pair_s64"),
        (["predict_batch_size=2", "infer.infer_seq_length=64"], "static_pair_b2_s64"),
        (["export.target=Ascend"], "static_pair_ascend"),
        (["model.model_config.compute_dtype=bfloat16"], "static_pair_bfloat16"),
        (["model.model_config.compute_dtype=float32"], "static_pair"),
        (["infer.enc_key=0123456789abcdef"], "static_pair_encrypted"),
        (["model.model_config.is_sample_acceleration=true"], "static_pair_sampled"),
    ],
)
def test_an_export_is_named_by_what_it_is(settings: list[str], name: str) -> None:
    assert named(*settings) == f"tiny_llama_{name}"


@pytest.fixture
def every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore Lite counts as set up; nothing is run in it."""
    monkeypatch.setattr(spec, "why_unavailable", lambda *_arguments: None)


@pytest.mark.usefixtures("every_engine")
def test_a_graph_of_any_size_has_no_size_in_its_name() -> None:
    resizable = ["export.layout=resizable", "engine=lite-worker"]
    assert named(*resizable) == "tiny_llama_resizable"
    sizes = ["predict_batch_size=4", "infer.infer_seq_length=64"]
    assert named(*resizable, *sizes) == "tiny_llama_resizable"
    lite = [*resizable, "infer.model_type=mindir_lite"]
    assert named(*lite) == "tiny_llama_resizable_lite"
    assert named(*lite, "export.weight_fp16=true") == "tiny_llama_resizable_lite_float16"


def test_adapters_have_folders_of_their_own(tmp_path: Path) -> None:
    base = ["model=auto", f"load_checkpoint={FIXTURES}/reference/llama"]
    names = {named(*base, f"adapter_path={ADAPTERS}/{name}") for name in ("all", "ends")}
    # Two of one name, as every training run has its checkpoint-500.
    for run, source in (("a", "all"), ("b", "ends")):
        folder = tmp_path / run / "check point"
        folder.mkdir(parents=True)
        for file in (ADAPTERS / source).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        names.add(named(*base, f"adapter_path={folder}"))
    assert len(names) == 4
    assert all(name.startswith("llama_static_pair_") for name in names)
    assert sum("_check-point-" in name for name in names) == 2


def of_output(folder: str, *, overwrite: bool) -> OutputPaths:
    config, _ = resolve(
        parse(["run_mode=export", "model=tiny_llama", f"export_output={folder}"], heads())
    )
    files = locate(config.source)
    job = job_of_export(config.settings, files, Ranks(), slots=config.predict_batch_size or 1)
    return output_paths(job, config.export_output, overwrite=overwrite)


def test_a_name_that_is_given_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_output("x/y", overwrite=False).folder == Path("x/y")
    monkeypatch.chdir(tmp_path)
    for here in (".", "new/.."):  # a temporary folder beside it has its name
        assert of_output(here, overwrite=False).folder == tmp_path


def test_only_an_export_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overwrite=true."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("years of work")
    Path("empty").mkdir()
    Path("export").mkdir()
    Path("export", MANIFEST).write_text('{"schema": 1, "layout": "full", "graphs": {}}')
    for folder in ("new", "empty", "export"):
        of_output(folder, overwrite=True).check()
    for folder, message in ((".", "not an exported model, so"), ("notes.txt", "a file, expected")):
        with pytest.raises(ConfigError, match=message):
            of_output(folder, overwrite=True).check()
