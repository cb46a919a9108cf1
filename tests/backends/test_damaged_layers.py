"""Exported models of packed layers whose bytes are not what was packed, with their checksums made
anew: each ends in an ArtifactError or in logits, and none in a signal or a hang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore.train.mind_ir_pb2 import ModelProto

from tests.frozen_artifacts import EXPORTS, FOLDER
from tests.native.damage import other_words, words
from tests.paths import ROOT

GRAPH, DATA = "auto_graph.mindir", "auto_variables/data_0"
PACKED = [name for name in EXPORTS if name.startswith("a")]
WORDS = 60  # damaged of an artifact; tests/native/test_validation.py takes all
FINE = "logits of [(2, 96), (2, 96)]"
Damage = dict[str, list[tuple[int, int, str]]]


def run_all(folder: Path, damages: list[Damage]) -> list[str]:
    """How each ended; where it took its process along, how that did."""
    ended: list[str] = []
    while len(ended) < len(damages):
        done = subprocess.run(
            [sys.executable, "-m", "tests.backends.damaged_driver", str(folder)],
            input="".join(json.dumps(one) + "\n" for one in damages[len(ended) :]),
            cwd=ROOT,
            capture_output=True,
            encoding="utf-8",
        )
        ended += [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
        if done.returncode:
            ended.append(f"exit code {done.returncode}: {done.stderr[-500:]}")
    return ended


def graph_of(folder: Path) -> Any:
    model = ModelProto()
    model.ParseFromString((folder / GRAPH).read_bytes())
    return model


def layers_of(model: Any) -> dict[str, Any]:
    """The parameters that are packed layers."""
    named = {one.name.rpartition(":")[2]: one for one in model.graph.parameter}
    return {name: one for name, one in named.items() if name.startswith("layer")}


def damaged_words(folder: Path, rng: np.random.Generator) -> Iterator[tuple[str, Damage]]:
    """Some of all words of the embedding, the first layers and the head, and what they become."""
    data = np.fromfile(folder / DATA, np.uint8)
    layers = layers_of(graph_of(folder))
    found: list[tuple[str, Damage]] = []
    for number in (0, 1, 2, len(layers) - 1):
        name = f"layer{number}"
        place = layers[name].external_data
        block = data[place.offset : place.offset + place.length]
        for at in words(block, number, len(layers)):
            word = int(block[at : at + 8].view(np.int64)[0])
            for other in other_words(word, rng):
                new = np.int64(other).tobytes().hex()
                start = place.offset + at
                found.append((f"{name} {at}: {word} -> {other}", {DATA: [(start, start + 8, new)]}))
    for index in rng.choice(len(found), WORDS, replace=False):
        yield found[index]


def damaged_values(folder: Path, rng: np.random.Generator) -> Iterator[tuple[str, Damage]]:
    """The last bytes of layers, which are values of their norms and matrices."""
    for name, one in layers_of(graph_of(folder)).items():
        if one.external_data.length < 2048:
            continue  # a tied head: mostly its header
        end = one.external_data.offset + one.external_data.length
        for new in (rng.bytes(512), b"\xff" * 512, b"\0" * 512):
            yield f"values of {name}", {DATA: [(end - 512, end, new.hex())]}


def damaged_places(folder: Path) -> Iterator[tuple[str, Damage]]:
    """Layers that are at another place of the file, in place of another, or of another length."""

    def swap(model: Any, first: str, second: str) -> None:
        one, other = (layers_of(model)[name] for name in (first, second))
        kept = ModelProto().graph.parameter.add()
        kept.CopyFrom(one)
        for target, source in ((one, other), (other, kept)):
            target.external_data.CopyFrom(source.external_data)
            target.dims[0] = source.dims[0]

    def move(model: Any, offset: int, length: int) -> None:
        one = layers_of(model)["layer1"]
        one.external_data.offset += offset
        one.external_data.length += length
        one.dims[0] += length

    def mistype(model: Any) -> None:
        layers_of(model)["layer1"].data_type = 3

    def rename(model: Any) -> None:
        one, other = (layers_of(model)[name] for name in ("layer1", "layer2"))
        one.ref_key, other.ref_key = other.ref_key, one.ref_key

    def empty(model: Any) -> None:
        layers_of(model)["layer1"].ClearField("external_data")

    changes: dict[str, Callable[[Any], None]] = {
        "the embedding for the head": lambda model: swap(model, "layer0", "layer5"),
        "attention for feed-forward": lambda model: swap(model, "layer1", "layer2"),
        "attention for the embedding": lambda model: swap(model, "layer1", "layer0"),
        "earlier": lambda model: move(model, -64, 0),
        "later": lambda model: move(model, 64, 0),
        "shorter": lambda model: move(model, 0, -64),
        "longer": lambda model: move(model, 0, 64),
        "of no bytes": lambda model: move(model, 0, -layers_of(model)["layer1"].dims[0]),
        "of another type": mistype,
        "under another's name": rename,
        "zeros": empty,
    }
    for what, change in changes.items():
        model = graph_of(folder)
        size = (folder / GRAPH).stat().st_size
        change(model)
        # What MindSpore is told of a layer says the same.
        for node in model.graph.node:
            if node.op_type.startswith("REF::Load") and node.input[0].endswith("layer1"):
                (shape,) = (one for one in node.attribute if one.name == "shape")
                shape.tensors[0].dims[:] = layers_of(model)["layer1"].dims
        yield what, {GRAPH: [(0, size, model.SerializeToString().hex())]}


@pytest.mark.parametrize("name", PACKED)
def test_no_damage_crashes(name: str) -> None:
    rng = np.random.default_rng(19)
    folder = FOLDER / name
    headers = [*damaged_words(folder, rng), *damaged_places(folder)]
    values = [("nothing", {}), *damaged_values(folder, rng)]
    ended = run_all(folder, [damage for _, damage in (*headers, *values)])
    told = [f"{what}: {end}" for (what, _), end in zip((*headers, *values), ended, strict=True)]
    assert not [one for one in told[: len(headers)] if ": error: " not in one]
    assert not [one for one in told[len(headers) :] if not one.endswith(FINE)]
