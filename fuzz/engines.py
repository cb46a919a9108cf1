"""Exported models that are damaged and given to what runs them, with their checksums made anew: a
file that only says that it is as it was is not to crash anything either."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mindspore.train.mind_ir_pb2 import ModelProto

from fuzz import formats
from fuzz.children import Case
from fuzz.readers import Read, planned
from fuzz.values import Mutation, flip_bytes, integer
from lite_runner.backends.base import Row
from lite_runner.backends.engines.lite_python import find_lite_python
from lite_runner.backends.engines.start import EngineOptions, start_engine
from lite_runner.backends.exported import open_exported
from lite_runner.config.engines import EngineName
from lite_runner.config.model_dir import MANIFEST
from lite_runner.errors import EnvironmentFault
from lite_runner.model.exported_model import ExportedModel
from tests.native.damage import words as words_of_layer
from tests.paths import FIXTURES

EXPORTED = FIXTURES / "frozen/artifacts"
GRAPH, PACKED = "auto_graph.mindir", "auto_variables/data_0"
MEMORY = 12 << 30  # bytes of addresses, most of which the threads of an engine never touch
RUN = ("predict_data=hi", "backend=mslite", "infer.model_dir=.")


def cases(folder: Path, ascii_tokenizer: Callable[[Path], None]) -> Iterator[Case]:
    """Every case, with its files made in `folder`; those of MindSpore Lite only where it is."""
    for name, graph in (
        ("dynamic", GRAPH),
        ("pair", "auto_prefill_graph.mindir"),
        ("resizable", GRAPH),
    ):
        given = _copied(name, folder)
        yield _case(f"graph-cell/{name}", given, graph, formats.protobuf, computed("graph-cell"))
    for family in ("llama", "gpt2", "bloom"):
        yield _of_mindformers(family, folder, ascii_tokenizer)
    for name in ("a16w8", "a16w4", "a8w8", "a16w8_gpt2", "a16w8_kv_int8"):
        packed, read = _copied(name, folder), computed("graph-cell")
        yield _case(f"packed layers/{name}", packed, PACKED, _headers(packed), read)
        yield _case(f"packed graph/{name}", packed, GRAPH, formats.protobuf, read)
    try:
        find_lite_python()
    except EnvironmentFault as fault:
        print(f"left out: .ms in lite-worker: {fault.message}", flush=True)
        return
    for name in ("ms", "ms_fp16"):
        given = _copied(name, folder)
        yield _case(f".ms/{name}", given, "auto_graph.ms", flip_bytes, computed("lite-worker"))


def loaded(engine: EngineName, *words: str) -> Read:
    """Reads by loading the graphs into an engine, which computes nothing: what an older MindSpore
    has exported may not run in this one."""

    def read(at: Path) -> None:
        given = _planned(*words)
        paths = given.manifest.paths(given.folder, 0)
        start_engine(paths, given.manifest, EngineOptions(engine, threads=2)).close()

    return read


def computed(engine: EngineName) -> Read:
    """Reads by loading the model into an engine and computing a prompt's step and one more."""

    def read(at: Path) -> None:
        _renew_checksums(at)
        given = _planned()
        manifest, options = given.manifest, EngineOptions(engine, threads=2)
        paths = manifest.paths(given.folder, 0)
        backend = open_exported(paths, manifest, options, slots=manifest.batch_size)
        try:
            tokens = np.arange(1, 6, dtype=np.int32)
            backend.forward([Row(0, tokens, 0)])
            backend.forward([Row(0, tokens[:1], 5)])
        finally:
            backend.close()

    return read


def _planned(*words: str) -> ExportedModel:
    files = planned(*RUN, *words).files
    assert files is not None and files.exported is not None
    return files.exported


def _case(name: str, folder: Path, file: str, mutation: Mutation, read: Read) -> Case:
    return Case(name, folder, file, mutation, read, memory=MEMORY)


def _copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(EXPORTED / name, folder / f"engine_{name}"))


def _of_mindformers(family: str, folder: Path, ascii_tokenizer: Callable[[Path], None]) -> Case:
    """A pair without a manifest."""
    given = folder / f"engine_{family}"
    given.mkdir()
    ascii_tokenizer(given)
    shutil.copy(FIXTURES / f"mindformers/{family}/past/{family}.yaml", given)
    for part in ("prefill", "inc"):
        packed = FIXTURES / f"mindformers/{family}/mindir/cache_{part}.mindir.gz"
        (given / f"m_{part}.mindir").write_bytes(gzip.decompress(packed.read_bytes()))
    read = loaded("graph-cell", f"--config={family}.yaml")
    return _case(f"graph-cell/{family}", given, "m_inc.mindir", formats.protobuf, read)


def _renew_checksums(folder: Path) -> None:
    manifest = folder / MANIFEST
    raw = json.loads(manifest.read_bytes())
    for name in raw["files"]:
        raw["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    manifest.write_text(json.dumps(raw))


def _headers(folder: Path) -> Mutation:
    """Changes words of the layers' headers: values of matrices and norms are free."""
    model: Any = ModelProto()
    model.ParseFromString((folder / GRAPH).read_bytes())
    layers = {one.name.rpartition(":layer")[2]: one for one in model.graph.parameter}
    layers = {name: one for name, one in layers.items() if name.isdigit()}
    data = np.fromfile(folder / PACKED, np.uint8)
    places = []
    for name, one in layers.items():
        start = one.external_data.offset
        block = data[start : start + one.external_data.length]
        places += [start + at for at in words_of_layer(block, int(name), len(layers))]

    def changed(content: bytes, random: Random) -> bytes:
        made = bytearray(content)
        for _ in range(random.choice((1, 1, 2))):
            at = random.choice(places)
            if random.random() < 0.5:
                word = int.from_bytes(made[at : at + 8], "little")
                near = word + random.choice((-64, -8, -1, 1, 8, 64, word))
                made[at : at + 8] = (near % (1 << 64)).to_bytes(8, "little")
            else:
                made[at : at + 8] = integer(random, 8)
        return bytes(made)

    return changed
