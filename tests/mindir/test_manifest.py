"""manifest.json of exports: any error in one is a message of one line."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from lite_runner.architectures.llama_like import changed
from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Norm,
    RopeScaling,
    Rotary,
)
from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.layouts import open_exported
from lite_runner.config import Invalid, read
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.manifest import (
    MANIFEST,
    Graph,
    Layout,
    Manifest,
    StoredDecoder,
    TensorSpec,
    decoder_of,
    read_manifest,
    serialize,
)
from lite_runner.system.files import sha256_of
from lite_runner.weights.manifest_file import CHECKSUM
from tests import references
from tests.each import each
from tests.models import model_named, reference_model
from tests.mutations import mutated

MUTATIONS = 400
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(artifact: Callable[[Layout], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact("resizable"), tmp_path / "resizable"))


def change(folder: Path, how: Change, *, signed: bool = True) -> None:
    """Change the manifest; `signed`: and its checksum."""
    path = folder / MANIFEST
    raw = json.loads(path.read_text(encoding="utf-8"))
    if signed:
        del raw[CHECKSUM]
    how(raw)
    if signed:
        text = json.dumps(raw, sort_keys=True, separators=(",", ":"))
        raw[CHECKSUM] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(raw), encoding="utf-8")


def opened(folder: Path) -> None:
    manifest = read_manifest(folder)
    engine = EngineOptions("graph-cell")
    open_exported(manifest.paths(folder), manifest, engine, slots=1).close()


def test_a_manifest_is_read_back(folder: Path) -> None:
    manifest = read_manifest(folder)
    manifest.write(folder)
    assert read_manifest(folder) == manifest
    assert len(json.loads((folder / MANIFEST).read_text())[CHECKSUM]) == 64


def set_(*path: str | int) -> Callable[[object], Change]:
    """`set_("model", "theta")(500.0)` gives that field this value."""

    def to(value: object) -> Change:
        def how(raw: dict[str, Any]) -> None:
            inside: Any = raw
            for one in path[:-1]:
                inside = inside[one]
            inside[path[-1]] = value

        return how

    return to


SHA = "0" * 64
FILE = set_("graphs", "model", "file")
BLOCKS = ("blocks", 0)  # the only run of equal ones
BLOCK = ("model", *BLOCKS)


@each(
    ("how", "message"),
    [
        (FILE(True), "graphs.model.file: got true, expected a string"),
        (FILE("a\0b"), "graphs.model.file"),
        (FILE("../tiny_graph.mindir"), "naming a file of the artifact"),
        (FILE("manifest.json"), "names the file 'manifest.json', which is not the artifact's"),
        (set_("graphs", "model", "others")(["b.mindir"]), "names the file 'b.mindir'"),
        (set_("source")("\ud800"), "surrogate"),
        (set_(*BLOCK, "attention", "rotary", "theta")(float("inf")), "Infinity"),
        (set_(*BLOCK, "attention", "rotary", "theta")(0), "theta is 0"),
        (set_("files", "tiny_graph.mindir")(5), "files.tiny_graph.mindir: got 5"),
        (set_("files", "tiny_graph.mindir")("ab"), "64 hexadecimal digits"),
        (set_("files", "/etc/passwd")(SHA), "naming a file of the artifact"),
        (set_("files")({}), "which is not the artifact's"),
        (set_("batch_size")("2"), "batch_size: got '2', expected an integer"),
        (set_("batch_size")(10**9), "batch_size: got 1000000000"),
        (set_("seq_length")(10**9), "seq_length: got 1000000000"),
        (set_("seq_length")(4096), "seq_length 4096, but the model supports at most"),
        (set_("layout")("zzz"), "layout: got 'zzz', expected one of resizable"),
        (set_("layout")("static_pair"), "expected increment, prefill with layout static_pair"),
        (set_("model_type")(5), "model_type: got 5"),
        (set_("target")("GPU"), "target: got 'GPU'"),
        (set_("precision")("int8"), "precision: got 'int8'"),
        (set_(*BLOCK, "layers")(-1), "-1 layers"),
        (set_(*BLOCK, "layers")(10**12), "layers, expected 1 to"),
        (set_(*BLOCK, "attention", "kv_heads")(3), "do not divide"),
        (set_("model", "vocab_size")(95), "vocabulary of 95"),
        (set_("model", "architecture")("zzz"), "'zzz' is not known"),
        (set_("model")(None), "model: got null"),
        (set_("tokenizer")(["../../etc/passwd"]), "tokenizer[0]"),
        (set_("tokenizer")(["other.json"]), "names the file 'other.json'"),
        (set_("versions")({"mindspore": 2}), "versions.mindspore: got 2"),
        (set_("encrypted")(1), "encrypted: got 1"),
        (set_("adapter_sha256")("x"), "adapter_sha256"),
        (set_("graphs")({}), "expected model with layout resizable"),
        (set_("graphs", "zzz")({}), "graphs: a name: got 'zzz'"),
        (set_("graphs", "model", "inputs", 0, "dtype")("zzz"), "type 'zzz', which no graph has"),
        (set_("graphs", "model", "inputs", 0, "shape")([1.5]), "shape[0]: got 1.5"),
        (set_("graphs", "model", "inputs", 0, "shape")([-2]), "shape[0]: got -2"),
        (set_("schema")(2), "schema 2, expected 1"),
        (set_("unknown")(1), "unknown: no such key"),
    ],
)
def test_errors_are_named(folder: Path, tmp_path: Path, how: Change, message: str) -> None:
    folder = Path(shutil.copytree(folder, Path(mkdtemp(dir=tmp_path), "x")))
    change(folder, how)
    with pytest.raises(ArtifactError) as error:
        read_manifest(folder)
    assert message in error.value.message
    assert str(folder / MANIFEST) in error.value.message
    assert error.value.hint == "export the model again" and error.value.exit_code == 4


@pytest.mark.parametrize(
    "how",
    [
        set_("model", "blocks", 0, "attention", "rotary", "theta")(500.0),
        set_("versions", "mindspore")("2.3.0"),
        set_(CHECKSUM)(SHA),
        set_(CHECKSUM)(None),
    ],
)
def test_the_checksum_finds_every_edit(folder: Path, how: Change) -> None:
    change(folder, how, signed=False)
    with pytest.raises(ArtifactError, match="edited or damaged"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("layout", "how", "message"),
    [
        ("static_pair", set_("model", "hidden_size")(128), "hidden_size: got"),
        ("static_pair", set_(*BLOCK, "layers")(1), "num_layers: got 2, expected 1"),
        ("static_pair", set_(*BLOCK, "attention", "head_dim")(8), "expected"),
        ("static_pair", set_(*BLOCK, "feed_forward", "width")(12), "feed-forward"),
        ("static_pair", set_("batch_size")(4), "elements of a layer's cache"),
        ("static_pair", set_("seq_length")(16), "elements of a layer's cache"),
        ("static_pair", set_("sampled")(True), "it returns logits"),
        ("static_pair", set_("graphs", "prefill", "inputs", 0, "dtype")("int64"), "it takes"),
        ("static_pair", set_("graphs", "prefill", "inputs", 1, "shape")([3]), "it takes"),
        ("resizable", set_(*BLOCK, "layers")(1), "num_layers|inputs are not those"),
    ],
)
def test_numbers_are_held_against_the_graph(
    artifact: Callable[[Layout], Path], tmp_path: Path, layout: Layout, how: Change, message: str
) -> None:
    folder = Path(shutil.copytree(artifact(layout), tmp_path / layout))
    change(folder, how)
    with pytest.raises(ArtifactError, match=message):
        opened(folder)


@pytest.mark.parametrize("layout", ["resizable", "static_pair"])
def test_mutations_are_refused_or_read(
    artifact: Callable[[Layout], Path], tmp_path: Path, layout: Layout
) -> None:
    folder = Path(shutil.copytree(artifact(layout), tmp_path / layout))
    whole, generator = (folder / MANIFEST).read_text(encoding="utf-8"), random.Random(layout)

    def mutate(raw: dict[str, Any]) -> None:
        changed = mutated(copy.deepcopy(raw), generator)
        raw.clear()
        raw.update(changed)

    for _ in range(MUTATIONS):
        (folder / MANIFEST).write_text(whole, encoding="utf-8")
        change(folder, mutate)
        try:
            found = read_manifest(folder)
        except (ArtifactError, ConfigError) as error:
            assert str(folder) in error.message
        else:
            found.write(folder)
            assert read_manifest(folder) == found


# -- What it names. --------------------------------------------------------------------------------

TOKENS = TensorSpec("tokens", (-1, -1), "int32")
LOGITS = TensorSpec("logits", (-1, 320), "float32")


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Of a folder with a graph and a file of another tool; somebody else's lies outside."""
    folder = tmp_path / "exported"
    folder.mkdir()
    for path in (folder / "model.mindir", folder / "other.mindir", tmp_path / "outside.mindir"):
        path.write_bytes(b"graph")
    return Manifest(
        layout="resizable",
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


def test_reads_back_what_was_written(manifest: Manifest, tmp_path: Path) -> None:
    manifest.write(tmp_path / "exported")
    assert read_manifest(tmp_path / "exported") == manifest


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["../outside.mindir", "ABSOLUTE", "link.mindir"])
def test_a_graph_outside(manifest: Manifest, tmp_path: Path, name: str, listed: bool) -> None:
    """Listed among the files, with the right sha256, or not."""
    folder, outside = tmp_path / "exported", tmp_path / "outside.mindir"
    (folder / "link.mindir").symlink_to(outside)
    name = name.replace("ABSOLUTE", str(outside))
    graphs = {"model": replace(manifest.graphs["model"], file=name)}
    files = {**manifest.files, name: sha256_of(outside)} if listed else manifest.files
    replace(manifest, graphs=graphs, files=files).write(folder)
    for checked in (True, False):
        with pytest.raises(
            ArtifactError, match=r"names the file .*mindir|naming a file of the artifact"
        ):
            read_manifest(folder, check_files=checked)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_graph_that_the_files_do_not_list(manifest: Manifest, tmp_path: Path, rank: int) -> None:
    """It is in the folder, but without a known sha256."""
    names = ["model.mindir", "model.mindir"]
    names[rank] = "other.mindir"
    graph = replace(manifest.graphs["model"], file=names[0], others=(names[1],))
    replace(manifest, graphs={"model": graph}).write(tmp_path / "exported")
    with pytest.raises(ArtifactError, match=r"names the file 'other\.mindir'"):
        read_manifest(tmp_path / "exported", check_files=False)


def test_a_file_outside_that_no_graph_is_in(manifest: Manifest, tmp_path: Path) -> None:
    outside = {"../outside.mindir": sha256_of(tmp_path / "outside.mindir")}
    replace(manifest, files={**manifest.files, **outside}).write(tmp_path / "exported")
    with pytest.raises(
        ArtifactError, match=r"'\.\./outside\.mindir', expected a string naming a file"
    ):
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


RMS = Norm("rms", 1e-6)
FULL = Block(
    RMS,
    Attention(4, 2, 8, Rotary(1e6, RopeScaling("yarn", 4.0, 64, truncate=False)), qk_norm=RMS),
    FeedForward(48, gated=True, bias=True),
)
SLIDING = replace(FULL, attention=replace(FULL.attention, window=7))
MIXED = Decoder("llama", 96, 32, 64, (FULL, SLIDING, SLIDING), RMS, False, eos_token_id=(1, 2))


def from_plain(plain: Any) -> Decoder:
    """As manifests are read."""
    faults: list[Invalid] = []
    stored = read(plain, StoredDecoder, "model", faults)
    if faults:
        raise ValueError(faults[0].text)
    return decoder_of(stored)


def test_round_trip(subtests: pytest.Subtests) -> None:
    unrotated = changed(MIXED, {"rotary": None, "head_dim": 16})  # 64 numbers of a token of 32
    for case in ("mixed", "unrotated", *references.every()):
        models = {"mixed": MIXED, "unrotated": unrotated}
        model = models.get(case) or reference_model(case)
        with subtests.test(case=case):
            assert from_plain(json.loads(json.dumps(serialize(model)))) == model


def test_neighbours_that_are_one_stand_once() -> None:
    assert [block["layers"] for block in serialize(MIXED)["blocks"]] == [1, 2]


@pytest.mark.parametrize("layers", [0, -1, 10**9, True, "2"])
def test_a_number_of_layers_that_no_model_has(layers: Any) -> None:
    plain = serialize(MIXED)
    plain["blocks"][0]["layers"] = layers
    with pytest.raises(ValueError, match="layers"):
        from_plain(plain)


ORIGINAL = "original_seq_length"
SCALING: Any = {"type": "linear", "factor": 2.0, ORIGINAL: 8}


@each(
    ("path", "value", "message"),
    [
        ((*BLOCKS, "layers"), 10**12, "layers"),
        (("hidden_size",), 0, "hidden_size"),
        ((*BLOCKS, "attention", "kv_heads"), 3, "do not divide"),
        ((*BLOCKS, "attention", "head_dim"), 7, "even"),
        ((*BLOCKS, "attention", "clip"), -1.0, "clip is -1.0"),
        (("architecture",), "zzz", "'zzz' is not known"),
        (("norm", "eps"), -1.0, "eps"),
        ((*BLOCKS, "attention", "rotary", "theta"), 0.0, "theta"),
        ((*BLOCKS, "attention", "rotary", "scaling"), {**SCALING, "factor": 0.0}, "is by 0.0"),
        ((*BLOCKS, "attention", "rotary", "scaling"), {**SCALING, ORIGINAL: 0}, "from 0 positions"),
        ((*BLOCKS, "feed_forward", "width"), -2, "width"),
        (("eos_token_id",), [-7], "special token"),
        (("tie_word_embeddings",), 1, "tie_word_embeddings"),
        (("more",), 1, "more"),
    ],
)
def test_sizes_that_no_model_has(path: tuple[Any, ...], value: object, message: str) -> None:
    plain: Any = json.loads(json.dumps(serialize(reference_model("llama"))))
    inside = plain
    for one in path[:-1]:
        inside = inside[one]
    inside[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        from_plain(plain)


@pytest.mark.parametrize("borrowed", [-1, 99])
def test_keys_of_a_layer_that_lends_none(borrowed: int) -> None:
    plain = serialize(reference_model("gemma4_sides"))
    plain["blocks"][-1]["attention"]["borrowed"] = borrowed
    with pytest.raises(ValueError, match="which has none to share"):
        from_plain(plain)
