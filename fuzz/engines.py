"""Exported models that are damaged and given to what runs them, with their checksums made anew: a
file that only says that it is as it was is not to crash anything either."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fuzz import formats
from fuzz.children import Case
from fuzz.readers import Read, planned
from fuzz.values import Mutation, flip_bytes
from lite_runner.backends import Row
from lite_runner.backends.lite.engine import EngineOptions, start_engine
from lite_runner.backends.lite.engines.lite_release import LITE
from lite_runner.backends.lite.layouts import open_exported
from lite_runner.config.backend_checks import EngineName
from lite_runner.config.sections import MANIFEST
from lite_runner.errors import EnvironmentFault
from lite_runner.model.exported_model import ExportedModel
from tests.paths import FIXTURES, ROOT
from tests.tokenizer_files import write_ascii_tokenizer

LAYOUTS = ("static_pair", "resizable")
OF_LITE = {"ms": (), "ms_fp16": ("export.weight_fp16=true",)}
EXPORTS = {name: (f"export.layout={name}",) for name in LAYOUTS} | {
    name: ("infer.model_type=mindir_lite", *settings) for name, settings in OF_LITE.items()
}
WRITE = """
import json, sys
from lite_runner.app import main
from lite_runner.backends.lite.export import writer

writer.verify = lambda *_, **__: None  # half of the time
sys.exit(any(main(line) for line in json.loads(sys.argv[1])))
"""
MEMORY = 12 << 30  # bytes of addresses, most of which the threads of an engine never touch
RUN = ("predict_data=hi", "backend=mslite", "infer.model_dir=.")


def exported(name: str) -> Path:
    """The folder in the current one with an export of the tiny llama in it.

    Another process writes them all: MindSpore's threads do not survive the forks that read.
    """
    target = Path(f"of_{name}").absolute()
    if not target.exists():
        words = ("run_mode=export", "load_checkpoint=llama", "model=auto", "verbosity=0")
        lines = [
            (*words, f"export_output={target.with_name(f'of_{one}')}", *settings)
            for one, settings in EXPORTS.items()
            if one in LAYOUTS or _has_lite()
        ]
        command = (sys.executable, "-c", WRITE, json.dumps(lines))
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return target


def cases(folder: Path) -> Iterator[Case]:
    """Every case, with its files made in `folder`; those of MindSpore Lite only where it is."""
    pair = _copied("static_pair", folder)
    graph = next(path.name for path in pair.glob("*prefill_graph.mindir"))
    yield _case("graph-cell/pair", pair, graph, formats.protobuf, computed("graph-cell"))
    for family in ("llama", "gpt2", "bloom"):
        yield _of_mindformers(family, folder)
    if not _has_lite():
        print("left out: .ms in lite-worker, without MindSpore Lite", flush=True)
        return
    for name in OF_LITE:
        given = _copied(name, folder)
        graph = next(path.name for path in given.glob("*.ms"))
        yield _case(f".ms/{name}", given, graph, flip_bytes, computed("lite-worker"))


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
    return Path(shutil.copytree(exported(name), folder / f"engine_{name}"))


def _has_lite() -> bool:
    try:
        LITE.find()
    except EnvironmentFault:
        return False
    return True


def _of_mindformers(family: str, folder: Path) -> Case:
    """A pair without a manifest."""
    given = folder / f"engine_{family}"
    given.mkdir()
    write_ascii_tokenizer(given, 64)
    shutil.copy(FIXTURES / f"mindformers/{family}/past/{family}.yaml", given)
    for part in ("prefill", "inc"):
        packed = FIXTURES / f"mindformers/{family}/mindir/cache_{part}.mindir.gz"
        (given / f"m_{part}.mindir").write_bytes(gzip.decompress(packed.read_bytes()))
    read = loaded("graph-cell", f"--config={family}.yaml")
    return _case(f"graph-cell/{family}", given, "m_inc.mindir", formats.protobuf, read)


def _renew_checksums(folder: Path) -> None:
    manifest = folder / MANIFEST
    raw = json.loads(manifest.read_bytes())
    raw.pop("checksum", None)
    for name in raw["files"]:
        raw["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    manifest.write_text(json.dumps(raw))
