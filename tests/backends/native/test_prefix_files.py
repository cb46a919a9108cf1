"""Prefixes in files: computed by another run, to the bit; damaged, foreign and too many ones."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures.quantization import CacheType
from lite_runner.backends import Row
from lite_runner.backends.native import prefix_files
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.backends.native.prefix_files import StoreSettings
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Completion, Engine, Request
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.system import environment
from lite_runner.weights.lora.adapter import Adapter, pool_size
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.backends.native.ranks import adapters_of
from tests.conftest import Reference
from tests.paths import ROOT

BLOCK = 32
STORE = StoreSettings("of the case", 1 << 30)
Open = Callable[..., NativeBackend]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prefix_files, "BLOCK", BLOCK)
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/prefixes"


@pytest.fixture
def known(reference: Callable[[str], Reference]) -> Reference:
    return reference("qwen3_tied")


@pytest.fixture
def opened(known: Reference) -> Open:
    """A backend of three slots, as another process opens it."""

    def start(
        store: StoreSettings | None = STORE,
        cache: CacheType = "fp16",
        adapters: Sequence[Adapter] = (),
    ) -> NativeBackend:
        lora = pool_size(adapters, 2) if adapters else None
        options = NativeOptions(slots=3, length=104, cache=cache, lora=lora)
        layers = pack(known.config, QuantizedWeights(known.tensors(), known.config), lora)
        return NativeBackend(known.config, layers, options, adapters, threads=1, store=store)

    return start


@pytest.fixture
def prompt(known: Reference) -> NDArray[np.int32]:
    return np.random.default_rng(3).integers(0, known.config.vocab_size, 90).astype(np.int32)


def answers(
    backend: NativeBackend,
    prompts: Sequence[NDArray[np.int32]],
    adapters: Sequence[str | None] = (),
) -> tuple[list[Completion], list[bytes]]:
    """Of prompts that come together; the logits of every token."""
    requests = [
        Request(one, GenerationConfig(max_new_tokens=3), adapter=adapter, keep_logits=True)
        for one, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True)
    ]
    logits: dict[tuple[int, int], list[bytes]] = {}
    outcome = Engine(backend).generate(
        requests,
        on_logits=lambda index, _, row, __: logits.setdefault((index, 0), []).append(row.tobytes()),
    )
    return outcome.completions, [b"".join(logits[key]) for key in sorted(logits)]


def answer(backend: NativeBackend, prompt: NDArray[np.int32]) -> tuple[int, bytes]:
    """Cached tokens and logits of one prompt, after which the backend is closed."""
    (completion,), (logits,) = answers(backend, [prompt])
    backend.close()
    return completion.cached_tokens, logits


@pytest.mark.parametrize("cache_type", ["fp32", "fp16", "int8"])
def test_another_process_reads_what_was_computed(
    opened: Open, prompt: NDArray[np.int32], cache: Path, cache_type: CacheType
) -> None:
    cached, wanted = answer(opened(None, cache_type), prompt)
    assert cached == 0 and not cache.exists()
    assert answer(opened(STORE, cache_type), prompt) == (0, wanted)
    assert answer(opened(STORE, cache_type), prompt) == (2 * BLOCK, wanted)
    longer = np.append(prompt, prompt[:6])
    fresh = answer(opened(None, cache_type), longer)[1]
    assert answer(opened(STORE, cache_type), longer) == (2 * BLOCK, fresh)
    assert answer(opened(STORE, cache_type), longer) == (2 * BLOCK, fresh)
    assert answer(opened(STORE, cache_type), prompt[:64])[0] == BLOCK  # the last is computed


def test_a_prefix_that_is_longer_than_windows_is_read(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first blocks are freed while the last ones are read or computed."""
    monkeypatch.setattr("lite_runner.backends.LONGEST_CHUNK", 16)
    known = reference("gemma3")
    config = replace(known.config, seq_length=700)

    def start(store: StoreSettings | None) -> NativeBackend:
        layers = pack(config, QuantizedWeights(known.tensors(), config), None)
        backend = NativeBackend(config, layers, NativeOptions(slots=1, length=700), store=store)
        assert backend.info.windows is not None and backend.info.windows.blocks == 2
        return backend

    text = np.random.default_rng(3).integers(0, config.vocab_size, 600).astype(np.int32)
    _, wanted = answer(start(None), text)
    assert answer(start(STORE), text) == (0, wanted)
    assert answer(start(STORE), text) == (599 // BLOCK * BLOCK, wanted)
    # The slot has what the tokens behind its prefix see, but not what the block before them does.
    backend = start(STORE)
    logits = backend.forward([Row(0, text, 0)])
    windows, stored = backend.info.windows, backend.stored
    assert windows is not None and stored is not None
    cached = next(length for length in range(1, 600) if windows.usable(0, length))
    assert not windows.usable(0, cached // BLOCK * BLOCK)
    prefix = stored.find(0, text, None, cached, cached)
    assert prefix is not None
    stored.restore(prefix)
    assert backend.forward([Row(0, text[prefix.end :], prefix.end)]).tobytes() == logits.tobytes()
    allowance = stored._allowance.available
    stored.save(0, text[::-1].copy(), None, 0)  # as if the slot had it: its first blocks are gone
    assert stored._allowance.available == allowance
    backend.close()


def test_prompts_together_with_files_slots_and_copies(opened: Open, known: Reference) -> None:
    """Batches of prompts that begin alike, with the files of several runs before."""
    generator = np.random.default_rng(7)
    begins = generator.integers(0, known.config.vocab_size, (2, 70)).astype(np.int32)
    plain = opened(None)
    cached = 0
    for _ in range(4):
        stored = opened()
        for _ in range(6):
            prompts = []
            for _ in range(5):
                end = generator.integers(0, known.config.vocab_size, generator.integers(1, 30))
                begin = begins[generator.integers(2)][: generator.integers(20, 70)]
                prompts.append(np.append(begin, end.astype(np.int32)))
            found, logits = answers(stored, prompts)
            assert logits == answers(plain, prompts)[1]
            cached += sum(one.cached_tokens for one in found)
        stored.close()
    assert cached > 100 * BLOCK / 4


def test_the_name_depends_on_all_that_changes_bits(
    opened: Open, prompt: NDArray[np.int32], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(opened(), prompt)
    assert answer(opened(replace(STORE, layers="of another")), prompt)[0] == 0
    assert answer(opened(cache="fp32"), prompt)[0] == 0
    other = prompt.copy()
    other[0] += 1 if other[0] == 0 else -1
    assert answer(opened(), other)[0] == 0
    turned = opened()
    assert turned.stored is not None
    turned.stored.rotate(turned._metadata.table + 1)
    assert answer(turned, prompt)[0] == 0
    pairs = not environment.multiplies_pairs()  # a cache may be shared by such processors
    monkeypatch.setattr("lite_runner.system.environment.multiplies_pairs", lambda: pairs)
    assert answer(opened(), prompt)[0] == 0
    monkeypatch.setattr("lite_runner.native.instructions", lambda: "others")
    assert answer(opened(), prompt)[0] == 0
    monkeypatch.undo()
    assert len(list(cache.iterdir())) == 5  # by what all files depend on


def test_adapters_have_prefixes_of_their_own(
    opened: Open, known: Reference, prompt: NDArray[np.int32]
) -> None:
    one, two = adapters_of(known.config)
    every = [prompt] * 3, [None, one.name, two.name]
    first = opened(adapters=[one, two])
    wanted = answers(first, *every)[1]
    first.close()
    assert len(set(wanted)) == 3
    # The same values under another name, and others under this one.
    changed = [replace(one, name=two.name), replace(two, name=one.name)]
    again = opened(adapters=changed)
    found, logits = answers(again, [prompt] * 3, [None, two.name, one.name])
    assert logits == wanted and [one.cached_tokens for one in found] == [2 * BLOCK] * 3
    again.close()


def damaged(path: Path) -> None:
    """One of what can happen to a file."""
    content = bytearray(path.read_bytes())
    kind = random.randrange(5)
    if kind == 0:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del content[random.randrange(len(content)) :]
    elif kind == 2:
        content += os.urandom(random.randrange(1, 99))
    elif kind == 3:
        content[:] = bytes(len(content))
    else:
        others = [one for one in path.parent.iterdir() if one != path]
        content[:] = random.choice(others).read_bytes()
    path.write_bytes(content)


def test_damaged_files_are_removed_and_computed_again(
    opened: Open, prompt: NDArray[np.int32], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, wanted = answer(opened(), prompt)
    for seed in range(20):
        random.seed(seed)
        path = random.choice(sorted(cache.glob("*/[!.]*")))
        damaged(path)
        cached, logits = answer(opened(), prompt)
        assert logits == wanted and cached in (0, BLOCK)
        assert f"{path}: damaged, and removed" in capfd.readouterr().err
        assert answer(opened(), prompt) == (2 * BLOCK, wanted)


def test_a_kill_at_any_time_leaves_whole_files() -> None:
    script = ROOT / "tests/backends/native/kill_writers.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.check_output([sys.executable, script, "8"], env=environment, text=True)
    assert re.match(r"\d+ of 96, ", output)


def test_the_oldest_make_room(
    opened: Open, known: Reference, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(1)
    backend = opened()
    assert backend.stored is not None
    size = 32 + backend.stored._model.bytes_of(BLOCK)
    backend.close()
    monkeypatch.setattr(prefix_files, "_REMEMBERED", 4)
    limited = opened(replace(STORE, limit=4 * 7 * size))
    assert limited.stored is not None
    for _ in range(9):
        text = generator.integers(0, known.config.vocab_size, 90).astype(np.int32)
        answers(limited, [text])
    assert len(limited.stored._known) <= 4 + 2  # names, and those of the last text
    limited.close()
    assert 3 <= len(list(cache.glob("*/*"))) <= 7
    assert answer(opened(), text)[0] == 2 * BLOCK  # the newest


def test_what_was_removed_is_stored_again(
    opened: Open, prompt: NDArray[np.int32], cache: Path
) -> None:
    """By another process, or to make room: later blocks are of no use without it."""
    backend = opened()
    answers(backend, [prompt])
    assert backend.stored is not None
    backend.stored._writer.submit(int).result()  # all is written
    names = sorted(cache.glob("*/[!.]*"))
    assert len(names) == 2
    for removed in names:
        removed.unlink()
        answers(backend, [np.roll(prompt, shift) for shift in (1, 2, 3)])  # in every slot
        answers(backend, [prompt])
        backend.stored._writer.submit(int).result()
        assert removed.exists()
    backend.close()


def test_a_full_disk_stores_nothing(opened: Open, prompt: NDArray[np.int32], cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    _, wanted = answer(opened(None), prompt)
    assert answer(opened(), prompt) == answer(opened(), prompt) == (0, wanted)


def test_a_queue_that_is_full_stores_the_rest_later(
    opened: Open, prompt: NDArray[np.int32], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_files, "QUEUED", 1)
    held = opened()
    assert held.stored is not None
    held.stored._queued = {"of another prompt": 1}
    answer(held, prompt)
    assert not list(cache.glob("*/*"))
    assert answer(opened(), prompt)[0] == 0
    assert list(cache.glob("*/*"))


def test_prefixes_of_single_requests_are_written_within_an_allowance(
    opened: Open, prompt: NDArray[np.int32], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_files, "UNSHARED_S", 0)
    other = prompt.copy()
    other[BLOCK + 1] += 1  # in the second block

    def stored(*prompts: NDArray[np.int32]) -> int:
        backend = opened()
        engine = Engine(backend)
        for one in prompts:
            engine.generate([Request(one, GenerationConfig(max_new_tokens=1))])
        backend.close()
        return len([*cache.glob("*/*")])

    monkeypatch.setattr(prefix_files, "UNSHARED", 0)
    assert stored(prompt) == 0
    assert stored(prompt, other) == 1  # what both begin with
    block = next(cache.glob("*/*")).stat().st_size
    monkeypatch.setattr(prefix_files, "UNSHARED", block + block // 2)
    assert stored(prompt, other) == 2
