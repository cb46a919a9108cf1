from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from lite_runner.architectures.quantization import Quant, Quantization, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.system.files import sha256_of
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization import quantized_checkpoint
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.quantization.quantized_checkpoint import (
    MANIFEST,
    WEIGHTS,
    QuantizationManifest,
    read_quantization,
    weights_bytes,
    write_quantized,
)
from tests.mutations import mutated

Write = Callable[..., dict[str, LazyTensor]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a random model quantized to tmp_path, and give the tensors that were written."""

    def do(config: Decoder, quant: Quant = "a16w4") -> dict[str, LazyTensor]:
        quantization = Quantization.of(quant, None)
        tensors = with_quantization(random_checkpoint(config, 0), config, quantization)
        write_quantized(tmp_path, tensors, config, quantization, "random")
        written = sha256_of(tmp_path / WEIGHTS)
        matrices = schemes(config, quantization)
        manifest = QuantizationManifest(
            quantization.quant, quantization.group, "random", matrices, written, {}
        )
        assert read_quantization(tmp_path) == manifest
        held = safetensors.numpy.load_file(tmp_path / WEIGHTS)
        assert sum(one.nbytes for one in held.values()) == weights_bytes(config, matrices)
        return tensors

    return do


@pytest.mark.parametrize("quant", ["a16w8", "a16w4", "a8w8"])
@pytest.mark.parametrize("given", ["folder", "file"])
def test_round_trip(
    config: Decoder, quant: Quant, given: str, write: Write, tmp_path: Path
) -> None:
    expected = write(config, quant)
    found = open_checkpoint(tmp_path if given == "folder" else tmp_path / WEIGHTS, config)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, "F32")
        assert found[name].read().tobytes() == tensor.read().tobytes(), name
        assert (found[name].integers is None) is (tensor.integers is None)
        if tensor.integers is not None and (mine := found[name].integers) is not None:
            assert mine.stored and mine.scheme == tensor.integers.scheme
            np.testing.assert_array_equal(mine.read().values, tensor.integers.read().values)
    # Asked for in the same way again, all of it is taken as it is.
    again = with_quantization(found, config, Quantization.of(quant, None))
    assert all(one.integers.stored for one in again.values() if one.integers is not None)


def test_the_file_is_one_of_safetensors(
    configs: dict[str, Decoder], write: Write, tmp_path: Path
) -> None:
    write(configs["gpt2"])
    held = safetensors.numpy.load_file(tmp_path / WEIGHTS)  # the format's own library
    name = "backbone.blocks.1.output.mapping.weight"  # MindFormers: [32, 128]; here out x in
    assert held[name].dtype == np.uint8 and held[name].shape == (128, 16)
    assert held[f"{name}.scales"].dtype == np.float16
    assert held[f"{name}.minimums"].shape == (128, 1)
    q = np.stack([held[name] & 15, held[name] >> 4], -1).reshape(128, 32)
    found = q * held[f"{name}.scales"].astype(np.float32) + held[f"{name}.minimums"]
    weight = random_checkpoint(configs["gpt2"], 0)[name].read().T
    np.testing.assert_allclose(found, weight, atol=0.005)
    assert held["backbone.layernorm.gamma"].dtype == np.float32


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    plain = json.loads(path.read_text())
    plain.pop("checksum", None)
    change(plain)
    path.write_text(json.dumps(plain))


def signed(folder: Path) -> None:
    """Write the digest of the weights as they are into the manifest."""
    digest = sha256_of(folder / WEIGHTS)
    changed(folder / MANIFEST, lambda raw: raw.update(sha256=digest))


WQ = "model.layers.0.attention.wq.weight"
DAMAGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda raw: raw.update(schema=2), "schema 2"),
    (lambda raw: raw.update(schema=True), "schema True"),
    (lambda raw: raw.update(quant="a4w4"), "quant: got 'a4w4', expected one of a16w8"),
    (lambda raw: raw.update(quant=["a16w4"]), "quant: got"),
    (lambda raw: raw.update(group=7), "group 7"),
    (lambda raw: raw.update(group=32.0), "group: got 32.0, expected an integer"),
    (lambda raw: raw.update(quant="a16w8"), "quant 'a16w8' with group 32"),
    (lambda raw: raw.update(source=None), "source: got null"),
    (lambda raw: raw.update(tensors=[]), "tensors: got"),
    (lambda raw: raw.update(sha256=5), "sha256: got 5"),
    (lambda raw: raw.update(sha256="x"), "64 hexadecimal digits"),
    (lambda raw: raw.update(more=1), "more: no such key"),
    (lambda raw: raw.pop("tensors"), "tensors: missing"),
    (lambda raw: raw.pop("sha256"), "sha256: missing"),
    (lambda raw: raw["tensors"][WQ].update(bits=5), WQ),
    (lambda raw: raw["tensors"][WQ].update(group=64), WQ),
    (lambda raw: raw["tensors"][WQ].update(group=32.0), WQ),
    (lambda raw: raw["tensors"].pop(WQ), WQ),
    (lambda raw: raw["tensors"].update(x={"bits": 4, "group": 32}), "x"),
    (lambda raw: raw["tensors"][WQ].update(bits=8), "of the wrong shape|unexpected"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGES)
def test_a_damaged_manifest(
    change: Callable[[dict[str, Any]], object],
    message: str,
    configs: dict[str, Decoder],
    write: Write,
    tmp_path: Path,
) -> None:
    write(configs["llama"])
    changed(tmp_path / MANIFEST, change)
    with pytest.raises(ArtifactError, match=message):
        open_checkpoint(tmp_path, configs["llama"])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', "\x00" * 9])
def test_no_manifest_at_all(
    text: str, configs: dict[str, Decoder], write: Write, tmp_path: Path
) -> None:
    write(configs["llama"])
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ArtifactError, match="not the manifest of a quantized checkpoint"):
        open_checkpoint(tmp_path, configs["llama"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (WQ, None, "1 missing"),
        (f"{WQ}.scales", None, "1 missing"),
        ("more", np.zeros(3, np.float32), "1 unexpected"),
        (WQ, np.zeros((64, 15), np.uint8), "of the wrong shape"),
        (WQ, np.zeros((64, 16), np.int8), "is I8, expected U8"),
        (f"{WQ}.scales", np.zeros((64, 1), np.int16), "is I16, expected F16"),
        (f"{WQ}.scales", np.full((64, 1), np.nan, np.float16), "a scale that is not finite"),
        (f"{WQ}.minimums", np.full((64, 1), np.inf, np.float16), "a scale that is not finite"),
        ("lm_head.weight", np.full((40, 32), -128, np.int8), "an integer of -128"),
    ],
)
def test_a_damaged_file(
    name: str,
    value: np.ndarray | None,
    message: str,
    configs: dict[str, Decoder],
    write: Write,
    tmp_path: Path,
) -> None:
    write(configs["llama"])
    held = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    if value is None:
        del held[name]
    else:
        held[name] = value
    safetensors.numpy.save_file(held, tmp_path / WEIGHTS)
    signed(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        for tensor in open_checkpoint(tmp_path, configs["llama"]).values():
            tensor.read()


def test_a_file_cut_short(configs: dict[str, Decoder], write: Write, tmp_path: Path) -> None:
    write(configs["llama"])
    path = tmp_path / WEIGHTS
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ArtifactError, match="not a valid safetensors"):
        open_checkpoint(tmp_path, configs["llama"])


def test_bytes_that_are_not_aligned(
    configs: dict[str, Decoder], write: Write, tmp_path: Path
) -> None:
    """Another writer may put the tensors in any order."""
    expected = write(configs["llama"])
    held = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    data, header, position = b"", {}, 0
    for name, array in sorted(held.items(), key=lambda item: item[1].dtype.itemsize):
        dtype = {"i1": "I8", "u1": "U8", "f2": "F16", "f4": "F32"}[array.dtype.str[1:]]
        end = position + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [position, end]}
        data, position = data + array.tobytes(), end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + 1)  # all that follows is odd
    (tmp_path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)
    signed(tmp_path)
    for name, tensor in open_checkpoint(tmp_path, configs["llama"]).items():
        np.testing.assert_array_equal(tensor.float32(), expected[name].float32())


@pytest.mark.parametrize("at", [0.1, 0.5, 0.999])
def test_a_flipped_bit_is_found_when_the_first_tensor_is_read(
    at: float, configs: dict[str, Decoder], write: Write, tmp_path: Path
) -> None:
    write(configs["llama"])
    path = tmp_path / WEIGHTS
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + int(at * (len(data) - start))] ^= 1
    path.write_bytes(data)
    tensors = open_checkpoint(tmp_path, configs["llama"])  # the headers are as they were
    for tensor in tensors.values():
        with pytest.raises(ArtifactError, match="another file than the one that was written"):
            tensor.read()
    signed(tmp_path)
    for tensor in open_checkpoint(tmp_path, configs["llama"]).values():
        tensor.read()


def test_the_weights_are_hashed_once(
    configs: dict[str, Decoder], write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(configs["llama"])
    hashed: list[Path] = []

    def counted(path: Path) -> str:
        hashed.append(path)
        return sha256_of(path)

    monkeypatch.setattr(quantized_checkpoint, "digest_of", counted)
    tensors = open_checkpoint(tmp_path, configs["llama"])
    assert not hashed
    for _ in range(2):
        for tensor in tensors.values():
            tensor.read()
            if tensor.integers is not None:
                tensor.integers.read()
    assert hashed == [tmp_path / WEIGHTS]


def test_an_edited_manifest_and_one_without_a_checksum(
    configs: dict[str, Decoder], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(configs["llama"])
    path = tmp_path / MANIFEST
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | {"source": "another"}))
    with pytest.raises(ArtifactError, match="edited or damaged"):
        read_quantization(tmp_path)
    signed(tmp_path)
    for _ in range(2):
        assert read_quantization(tmp_path) is not None
    assert capsys.readouterr().err.count("without a checksum of itself") == 1


def test_mutations_are_refused_or_read(
    configs: dict[str, Decoder], write: Write, tmp_path: Path
) -> None:
    write(configs["llama"])
    path, generator = tmp_path / MANIFEST, random.Random(0)
    plain = json.loads(path.read_text())
    del plain["checksum"]
    for _ in range(300):
        path.write_text(json.dumps(mutated(copy.deepcopy(plain), generator)))
        try:
            found = read_quantization(tmp_path)
            assert found is not None
            for tensor in open_checkpoint(tmp_path, configs["llama"]).values():
                tensor.read()
        except ArtifactError as error:
            assert str(tmp_path) in error.message
