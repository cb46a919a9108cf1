"""The real MindFormers beside our own operators: the same tokens, and logits within what
its float16 moves them by. Left out, by name, where it cannot be installed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.app import main
from lite_runner.architectures import chatglm, parameters
from lite_runner.architectures.spec import Decoder, RopeScaling
from lite_runner.backends.mindformers.process import MindFormersProcess
from lite_runner.backends.mindformers.releases import (
    V1_0_2,
    V1_9_0,
    MindFormersRelease,
    Sizes,
    static_length,
)
from lite_runner.backends.mindformers.run import MindFormersRun, OpenMindFormers, write_checkpoint
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Engine, Generator, Request
from lite_runner.model import ModelFiles
from lite_runner.native.packed_model import pack
from lite_runner.output.completer import CompleterGenerator
from lite_runner.weights import LazyTensor
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.models import reference_model
from tests.paths import FIXTURES, REFERENCE
from tests.test_real_mindformers import CONFIGS

SAVED = FIXTURES / "mindformers"  # by the real one
STEPS, LENGTH = 6, 16
V1_0_2_ENGINE, ATTEMPTS = "mindformers-1.0.2", 4
PROMPTS = [[5, 9, 33], [7, 12, 40, 41, 8, 30, 21], [6]]
GROUPED = CONFIGS["llama"]  # 4 heads on 2
LINEAR = RopeScaling("linear", 4.0, original_seq_length=4)
ROTARY = replace(GROUPED.attention, rotary=replace(GROUPED.attention.rotary, theta=40000.0))
GLM2: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "intermediate_size": 24,
    "seq_length": LENGTH,
    "norm_eps": 1e-5,
    "rope_ratio": 1.0,
    "qkv_bias": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def first_layer(model: Decoder) -> Decoder:
    return replace(model, blocks=model.blocks[:1])


FAST = replace(CONFIGS["bloom"].feed_forward, activation="quick_gelu")
# Of two layers are those alone of which there is no file that MindFormers has saved: each layer is
# to be compiled.
TWO_LAYERS = ("bloom", "bloom, fast_gelu", "glm2, a key for each head")
OURS: dict[str, Decoder] = {
    "bloom": CONFIGS["bloom"],
    "bloom, fast_gelu": replace(
        CONFIGS["bloom"],
        blocks=tuple(replace(block, feed_forward=FAST) for block in CONFIGS["bloom"].blocks),
    ),
    "gpt2": CONFIGS["gpt2"],
    "llama, positions interpolated": GROUPED.with_rope_scaling(LINEAR),
    "llama, NTK and a tied head": replace(
        GROUPED,
        blocks=tuple(replace(block, attention=ROTARY) for block in GROUPED.blocks),
        tie_word_embeddings=True,
    ),
    "glm2": chatglm.decoder(**GLM2, n_kv_heads=2),
    "glm2, a key for each head": chatglm.decoder(**GLM2, n_kv_heads=4),
}
FILES = {
    **{
        f"{name}, saved by MindFormers": ModelFiles(
            name, SAVED / name / "plain" / f"{name}.ckpt", CONFIGS[name], 0
        )
        for name in ("gpt2", "llama")
    },
    **{
        name: ModelFiles("ours", None, model if name in TWO_LAYERS else first_layer(model), 0)
        for name, model in OURS.items()
    },
}
GLM = REFERENCE / "chatglm_6b"
Logits = dict[int, list[NDArray[np.float32]]]


def random_tensors(model: Decoder) -> dict[str, LazyTensor]:
    """Numbers large enough that tokens differ from one another."""

    def values(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        gain = float(len(shape) == 1 and name.endswith(("gamma", "weight")))
        return (rng.normal(0.0, 0.5, shape) + gain).astype(np.float32)

    def lazy(name: str, shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor(shape, "F32", lambda: values(name, shape))

    return {one.name: lazy(one.name, one.shape) for one in parameters(model)}


@pytest.fixture(scope="module")
def process(
    mindformers_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MindFormersProcess]:
    """One for all: importing MindFormers takes seconds."""
    folder = tmp_path_factory.mktemp("mindformers")
    started = MindFormersProcess(folder, V1_0_2, threads=1, python=mindformers_python)
    yield started
    started.close()


@pytest.fixture(scope="module")
def later(
    mindformers_1_9_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MindFormersProcess]:
    """The same of 1.9.0."""
    folder = tmp_path_factory.mktemp("mindformers-1.9")
    started = MindFormersProcess(folder, V1_9_0, threads=1, python=mindformers_1_9_python)
    yield started
    started.close()


def theirs(
    process: MindFormersProcess,
    folder: Path,
    files: ModelFiles,
    *,
    use_past: bool,
    batch: int = 3,
    beams: int = 1,
    release: MindFormersRelease = V1_0_2,
) -> CompleterGenerator:
    model = files.model
    dtype = release.computed_in(model, "float32", use_past=use_past)
    rows = release.rows_together(model, beams if beams > 1 else batch, use_past=use_past)
    length = static_length(model, LENGTH)
    run = MindFormersRun(
        release=release,
        model=model,
        sizes=Sizes(rows, length, dtype, use_past),
        beams=beams,
        fill=[5],
        unused=63,
        trainer={},
        tokenizer={},
    )
    yaml = folder / "run.yaml"
    yaml.write_text(run.yaml(str(write_checkpoint(files, release, folder))))
    process.load(yaml)
    return CompleterGenerator(OpenMindFormers(process, run, folder, ExitStack()))


def ours(files: ModelFiles) -> Engine:
    model = files.model
    options = NativeOptions(slots=3, length=LENGTH)
    weights = QuantizedWeights(files.whole(), model)
    layers = pack(model, weights)
    return Engine(NativeBackend(model, layers, options), prefix_cache=False)


def generated(
    generator: Generator, options: GenerationConfig, prompts: list[list[int]] = PROMPTS
) -> tuple[list[list[int]], Logits]:
    """The tokens of each prompt, and the logits of each step. Of MindFormers 1.0.2 those that two
    runs in a row agree in: on a busy machine MindSpore 2.0.0 computes one prompt in a hundred
    otherwise, from its first token on."""
    found = generated_once(generator, options, prompts)
    if generator.engine != V1_0_2_ENGINE:
        return found
    for _ in range(ATTEMPTS):
        former, found = found, generated_once(generator, options, prompts)
        if found[0] == former[0] and all(
            np.array_equal(found[1][index], former[1][index]) for index in found[1]
        ):
            return found
    pytest.fail(f"{ATTEMPTS} runs of {generator.engine}, no two alike")


def generated_once(
    generator: Generator, options: GenerationConfig, prompts: list[list[int]]
) -> tuple[list[list[int]], Logits]:
    logits: Logits = {}
    requests = [
        Request(np.array(prompt, np.int32), options, keep_logits=options.num_beams == 1)
        for prompt in prompts
    ]
    outcome = generator.generate(
        requests,
        on_logits=lambda index, _, row, __: logits.setdefault(index, []).append(row.copy()),
    )
    return [one.token_ids for one in outcome.completions], logits


# Each of its networks with a cache and without, and each file in one of the two ways.
WITHOUT_CACHE = ("bloom", "gpt2", "glm2, a key for each head", "llama, NTK and a tied head")


@pytest.mark.parametrize("name", FILES)
def test_the_same_tokens(process: MindFormersProcess, tmp_path: Path, name: str) -> None:
    files, use_past = FILES[name], name not in WITHOUT_CACHE
    if files.path is None:
        files = replace(files, held=random_tensors(files.model))
    options = GenerationConfig(max_new_tokens=STEPS)
    with closing(ours(files)) as mine:
        expected, wanted = generated(mine, options)
    found, logits = generated(theirs(process, tmp_path, files, use_past=use_past), options)
    assert len({token for row in expected for token in row}) > 1  # not one for ever
    # MindFormers computes bloom's layers, and the heads of both, with float16.
    tolerance = 1e-4 if files.model.rotary is not None else 2e-2
    if files.model.feed_forward.activation is not None:
        tolerance = 2e-3  # another GELU is off by 4e-3
    for index in range(len(PROMPTS)):
        theirs_, mine_ = np.stack(logits[index]), np.stack(wanted[index])
        error = np.abs(theirs_ - mine_).max() / np.abs(mine_).max()
        best = np.sort(mine_, -1)
        if (best[:, -1] - best[:, -2]).min() > 2 * tolerance * np.abs(mine_).max():
            assert found[index] == expected[index]
            assert error < tolerance


@pytest.mark.parametrize("use_past", [True, False], ids=["cache", "no cache"])
def test_glm_6b(process: MindFormersProcess, tmp_path: Path, use_past: bool) -> None:
    """Its MLP is in float16 for any yaml: the same where the two largest are further
    apart than the 0.03 that moves logits by."""
    model = reference_model("chatglm_6b")
    files = ModelFiles("ours", GLM / "model.safetensors", model, 0)
    case = np.load(GLM / "expected.npz")
    rows = zip(case["prompts"], case["lengths"], strict=True)
    prompts = [row[:length].tolist() for row, length in rows]
    options = GenerationConfig(max_new_tokens=STEPS)
    with closing(ours(files)) as mine:
        expected, wanted = generated(mine, options, prompts)
    found, logits = generated(theirs(process, tmp_path, files, use_past=use_past), options, prompts)
    for index in range(len(prompts)):
        theirs_, mine_ = np.stack(logits[index]), np.stack(wanted[index])
        best = np.sort(mine_, -1)
        sure = (best[:, -1] - best[:, -2]) > 2 * 0.03
        same = next((step for step, one in enumerate(sure) if not one), STEPS)
        assert found[index][:same] == expected[index][:same]
        assert np.abs(theirs_ - mine_)[: same + 1].max() < 0.03


LATER = {  # what 1.9.0 computes
    name: files for name, files in FILES.items() if "llama" in name
} | {
    "llama, llama3 scaling": ModelFiles(
        "ours",
        None,
        first_layer(GROUPED.with_rope_scaling(RopeScaling("llama3", 8.0, original_seq_length=4))),
        0,
    ),
    "qwen2": ModelFiles("ours", None, reference_model("qwen2"), 0),
}


@pytest.mark.parametrize("name", LATER)
def test_the_same_tokens_of_1_9(later: MindFormersProcess, tmp_path: Path, name: str) -> None:
    files = LATER[name]
    if files.path is None:
        files = replace(files, held=random_tensors(files.model))
    options = GenerationConfig(max_new_tokens=STEPS)
    with closing(ours(files)) as mine:
        expected, wanted = generated(mine, options)
    generator = theirs(later, tmp_path, files, use_past=False, release=V1_9_0)
    assert generator.engine == "mindformers-1.9.0, argmax stand-in"
    found, logits = generated(generator, options)
    assert found == expected
    for index in range(len(PROMPTS)):
        theirs_, mine_ = np.stack(logits[index]), np.stack(wanted[index])
        assert np.abs(theirs_ - mine_).max() < 1e-4 * np.abs(mine_).max()
        assert theirs_.argmax(-1).tolist() == found[index]  # the stand-in is NumPy's


def test_sampling_with_1_9(later: MindFormersProcess, tmp_path: Path) -> None:
    files = FILES["llama, saved by MindFormers"]
    sampling = GenerationConfig(max_new_tokens=STEPS, do_sample=True, top_k=8, seed=4)
    generator = theirs(later, tmp_path, files, use_past=False, batch=1, release=V1_9_0)
    first, _ = generated(generator, sampling)
    assert first == generated(generator, sampling)[0] and all(len(row) == STEPS for row in first)
    assert first != generated(generator, replace(sampling, seed=5))[0]


def test_fixtures_and_sampling(process: MindFormersProcess, tmp_path: Path) -> None:
    """The worker gives the results of MindFormers in the fixtures."""
    expected = np.load(SAVED / "llama" / "expected.npz")
    rows = zip(expected["prompts"], expected["lengths"], strict=True)
    prompts = [row[:length].tolist() for row, length in rows]
    files = FILES["llama, saved by MindFormers"]
    generator = theirs(process, tmp_path, files, use_past=True, batch=2)
    generator.prepare()
    assert generator.compile_s > 0
    found, _ = generated(generator, GenerationConfig(max_new_tokens=STEPS), prompts)
    assert found == expected["tokens"].tolist()
    sampling = GenerationConfig(max_new_tokens=STEPS, do_sample=True, top_k=8, seed=4)
    first, _ = generated(generator, sampling)
    again, _ = generated(generator, sampling)
    other, _ = generated(generator, replace(sampling, seed=5))
    assert first == again != other and all(len(row) == STEPS for row in first)


def test_beams(process: MindFormersProcess, tmp_path: Path) -> None:
    files = FILES["llama, saved by MindFormers"]
    beams = GenerationConfig(max_new_tokens=STEPS, num_beams=2)
    searched = theirs(process, tmp_path, files, use_past=False, beams=2)
    found, _ = generated(searched, beams, PROMPTS[:2])
    # Not those of our beams: MindFormers ranks by the newest token alone, and never adds up.
    assert [len(row) for row in found] == [STEPS, STEPS]
    assert found == generated(searched, beams, PROMPTS[:2])[0]


def test_a_run_that_compares(
    mindformers_python: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(mindformers_python))
    line = ["model=tiny_gpt2", "predict_data=[hello,the cat,abc]", "max_new_tokens=4", "seed=3"]
    line.append("backend=mindformers")
    assert main([*line, "compare_backend=native", "compare_tolerance=1e-9"]) == 1
    stderr = capsys.readouterr().err
    assert "3 of 3 texts differ from backend=mindformers by more than" in stderr
    assert "DIFFERS" in stderr
    result: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    comparison = result["comparison"]
    assert [side["backend"] for side in comparison["sides"]] == ["mindformers", "native"]
    for text in comparison["texts"]:
        assert text["equal"] == text["tokens"] == 4 and 0 < text["logit_difference"] < 0.05
    assert all(side["peak_rss_mib"] > 20 for side in comparison["sides"])
