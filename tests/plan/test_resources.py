"""Resources of a run: sizes as large as the free memory allows, and checks before it starts."""

from __future__ import annotations

import dataclasses
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.app import main
from lite_runner.backends.mindformers import releases, run
from lite_runner.config.argv import parse
from lite_runner.config.schema import ComputeOptions, RunConfig
from lite_runner.errors import EnvironmentFault
from lite_runner.launch import launch
from lite_runner.plan import resources
from lite_runner.plan.resources import SHORTEST, choose_sizes, lengths_of
from lite_runner.run_modes import heads, resolve
from lite_runner.sizing import MSRUN_PROCESS, Memory
from lite_runner.system import environment, memory
from tests.download_server import Behaviour, serving
from tests.paths import REFERENCE

GB = 10**9
QUANT = ["quant=a16w4"]
Dry = Callable[..., str]

contexts = st.integers(1, 1 << 20)


@given(contexts, st.integers(1, 16), st.integers(1, 3), st.integers(0, 1 << 24))
def test_the_largest_sizes_that_fit_are_chosen(
    context: int, most: int, least: int, free: int
) -> None:
    def fits(rows: int, length: int) -> bool:
        return rows * length <= free

    slots, lengths = range(1, most + 1), lengths_of(context)
    rows, length = choose_sizes(fits, slots, lengths, least)
    assert rows in slots and length in lengths
    if not fits(1, lengths[-1]):
        assert (rows, length) == (1, lengths[-1])
        return
    assert fits(rows, length)
    assert rows == most or not fits(rows + 1, length)
    enough = min(least, most)
    if rows >= enough:  # the longest with enough rows; fewer only where these fit nowhere
        assert not any(fits(enough, one) for one in lengths if one > length)
    else:
        assert not fits(enough, lengths[-1])


@given(contexts)
def test_lengths_are_the_context_and_the_powers_of_two_below(context: int) -> None:
    first, *others = lengths_of(context)
    assert first == context
    assert others == sorted(others, reverse=True)
    assert all(SHORTEST <= one < context and one & (one - 1) == 0 for one in others)
    assert not others or (context <= 2 * others[0] and others[-1] == SHORTEST)


@given(st.integers(1, 16), contexts, st.booleans())
def test_given_sizes_stay(rows: int, length: int, fit: bool) -> None:
    assert choose_sizes(lambda *_: fit, [rows], [length], 2) == (rows, length)


@pytest.fixture
def dry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Dry:
    def run(free: float, *settings: str) -> str:
        monkeypatch.setattr(memory, "free_memory", lambda: int(free * GB))
        monkeypatch.setattr(memory, "resident", lambda: 0)  # which the tests before decide
        words = ["load_checkpoint=random", "context.device_target=CPU", *settings, "dry_run=true"]
        assert main(words) == 0
        return capsys.readouterr().out

    return run


def sizes(text: str) -> tuple[int, int]:
    found = re.search(r"^cache .* for (\d+) x (\d+) tokens", text, re.MULTILINE)
    assert found
    return int(found[1]), int(found[2])


def test_a_server_of_four_bits_fits_a_laptop(dry: Dry) -> None:
    """7 billion parameters in 8 to 64 GB: the whole context, or a part, and 8 sequences that share
    the memory for their keys as they grow."""
    model = ["run_mode=serve", "model=qwen2_7b", *QUANT]
    chosen = {free: sizes(dry(free, *model)) for free in (8, 10, 13, 20, 64)}
    assert chosen == {8: (8, 16384), **dict.fromkeys((10, 13, 20, 64), (8, 32768))}
    text = dry(8, *model)
    assert "is free: enough" in text
    chosen_line = next(line for line in text.splitlines() if line.startswith("chosen"))
    assert (
        chosen_line.split()[1:]
        == "serve.max_length=16384 instead of 32768 to fit in 8.0 GB of free memory".split()
    )
    assert "more cache where it is free" in text
    assert "\nchosen" not in dry(64, *model)


def test_a_limit_of_addresses_is_heeded(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_addresses", lambda: 12 * GB)
    text = dry(64, "run_mode=serve", "model=qwen2_7b", *QUANT)
    assert 2048 <= sizes(text)[1] < 32768
    assert "to fit in 12.0 GB that ulimit -v leaves" in text


def test_too_little_for_the_least_is_refused(dry: Dry) -> None:
    text = dry(6, "run_mode=serve", "model=qwen2_7b", *QUANT)
    assert sizes(text) == (1, 2048)
    assert "would be refused" in text
    assert "max_running=" not in text.partition("to fit")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("mode", "typed", "expected"),
    [
        ("serve", ["serve.max_running=8"], (8, 32768)),
        ("serve", ["serve.max_running=1"], (1, 32768)),
        ("serve", ["serve.max_length=1000"], (8, 1000)),
        ("serve", ["serve.max_length=30000"], (8, 30000)),
        ("chat", [], (1, 16384)),
        ("chat", ["max_length=3000"], (1, 3000)),
    ],
)
def test_given_sizes_are_not_changed(
    dry: Dry, mode: str, typed: list[str], expected: tuple[int, int]
) -> None:
    text = dry(11 if mode == "serve" else 8, f"run_mode={mode}", "model=qwen2_7b", *QUANT, *typed)
    assert sizes(text) == expected
    assert "is free: enough" in text


@pytest.mark.parametrize(
    ("mode", "typed"),
    [
        ("serve", ["serve.max_running=8", "serve.max_length=32768"]),
        ("serve", ["serve.max_length=null", "serve.max_running=4"]),
        ("chat", ["max_length=32768"]),
        ("predict", ["predict_data=[x,y,z]", "max_new_tokens=30000", "predict_batch_size=3"]),
        ("predict", ["predict_data=hi", "max_length=32768"]),
    ],
)
def test_typed_sizes_that_do_not_fit_are_refused_with_what_fits(
    dry: Dry, mode: str, typed: list[str]
) -> None:
    """Each setting of the remedy, typed behind the others, takes as much as it says."""
    words = [f"run_mode={mode}", "model=qwen2_7b", *QUANT, "kv_cache=fp32", *typed]
    text = dry(8, *words)
    remedy = text.partition("to fit")[2].partition("\n")[0]
    assert "would be refused" in text
    assert "predict_batch_size" not in remedy
    for setting, size in re.findall(r"((?:[\w.]+=\w+ ?)+) would need ([\d.]+ .B)", remedy):
        assert f"needs {size} " in dry(64, *words, *setting.split())
    if mode != "predict":
        smaller = next(one for one in remedy.split("; ") if "max_length" in one)
        settings = smaller.partition(" would")[0].split()
        assert "is free: enough" in dry(8, *words, *settings)


def test_prompts_share_the_memory_that_there_is(dry: Dry) -> None:
    words = ["model=qwen2_7b", *QUANT, "max_new_tokens=4000"]
    words.append(f"predict_data=[{','.join('abcdefghijklmnop')}]")
    rows, length = sizes(dry(10, *words))
    assert rows == 16 and length > 4000
    assert sizes(dry(64, *words)) == (16, length)
    assert sizes(dry(10, *words, "num_beams=2")) == (32, length)


@pytest.mark.parametrize("free", [6, 16])
def test_memory_does_not_multiply(dry: Dry, free: int) -> None:
    """A window is given to who fills it: 8 of 32k tokens take what one takes, until they grow."""
    words = ["run_mode=serve", "model=qwen2_7b", *QUANT, "serve.max_length=32768"]
    one, eight = (dry(free, *words, f"serve.max_running={count}") for count in (1, 8))
    needs = [re.search(r"needs ([\d.]+) GB", text) for text in (one, eight)]
    assert needs[0] and needs[1] and float(needs[1][1]) - float(needs[0][1]) < 0.1
    assert ("is free: enough" in eight) is (free == 16)


def test_a_default_length_never_refuses_a_run(dry: Dry) -> None:
    """The context of a model, or the most that it says of itself, is no wish of the user."""
    own = ["model.model_config.max_decode_length=32768", "model.model_config.max_new_tokens=null"]
    words = ["model=qwen2_7b", *QUANT, "predict_data=hi"]
    assert sizes(dry(8, *words, *own)) == (1, 16384)
    rows, length = sizes(dry(8, *words, "max_new_tokens=20"))
    assert rows == 1 and length < 64


def config_of(*settings: str) -> RunConfig:
    return resolve(parse(["model=tiny_llama", "predict_data=hi", *settings], heads()))[0]


RANK = Memory(100_000_000, 10_000_000, process=500_000_000)


def check(config: RunConfig, rank: Memory = RANK) -> None:
    device = environment.resolve_device(config.context.device_target)
    resources.check_machine(config.cluster, device, rank)


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 2)
    check(config_of("parallel=tp2"))
    with pytest.raises(EnvironmentFault, match="4 ranks on this machine need 4 Ascend devices"):
        check(config_of("parallel=tp4"))
    check(config_of("parallel=tp4", "parallel.local_worker_num=2", "parallel.master_port=8118"))


def test_more_ranks_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("parallel=tp2", "context.device_target=CPU")
    needed = 2 * RANK.total + 2 * MSRUN_PROCESS
    monkeypatch.setattr(memory, "free_memory", lambda: needed)
    check(config_of(*settings))
    with pytest.raises(EnvironmentFault, match=r"the process 500.0 MB\), and 943.7 MB for msrun"):
        check(config_of(*settings), dataclasses.replace(RANK, adapters=1_000_000))
    monkeypatch.setattr(memory, "free_memory", lambda: needed - 1)
    with pytest.raises(EnvironmentFault, match=r"2 ranks of 610.0 MB each .* 2.2 GB is free"):
        check(config_of(*settings))
    # A second machine has no scheduler.
    second = ("parallel.local_worker_num=1", "parallel.node_rank=1", "parallel.master_port=8118")
    check(config_of(*settings, *second))


def test_each_rank_has_its_own_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10**12)
    monkeypatch.setattr(memory, "free_addresses", lambda: RANK.addresses)
    check(config_of("parallel=tp2", "context.device_target=CPU"))
    monkeypatch.setattr(memory, "free_addresses", lambda: RANK.addresses - 1)
    with pytest.raises(EnvironmentFault, match=r"each rank needs .* of address space .* ulimit -v"):
        check(config_of("parallel=tp2", "context.device_target=CPU"))


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    config = config_of("parallel=tp2", "context.device_target=CPU", f"output_dir={tmp_path}")
    with pytest.raises(EnvironmentFault, match="but 0 B is free"):
        launch(config)
    assert {path.name for path in (tmp_path / "latest").iterdir()} == {"config.yaml", "run.log"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    """A hub with a tiny model, on a machine that has no memory left; nothing is in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "free_memory", lambda: 10**4)  # less than its weights
    Path("text.txt").write_text("a text", encoding="utf-8")
    folder = REFERENCE / "llama"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    behaviour = Behaviour(repositories={"owner/name": files})
    with serving(behaviour) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield behaviour


WEIGHTS = "/model.safetensors"


@pytest.mark.parametrize(
    "settings",
    [
        "predict_data=hi",
        "predict_data=hi backend=mslite",
        "predict_data=hi parallel=tp2 context.device_target=CPU",
        "run_mode=serve serve.port=0",
        "run_mode=chat",
        "run_mode=eval eval_data=text.txt",
        "run_mode=export",
    ],
)
def test_a_model_beyond_the_memory_is_not_fetched(
    settings: str, hub: Behaviour, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=auto", "load_checkpoint=hf://owner/name", *settings.split()]
    assert main(words) == 3
    assert "error: memory: " in (stderr := capsys.readouterr().err), stderr
    assert not any(path.endswith(WEIGHTS) for path in hub.files_asked)


def test_a_model_within_the_memory_is_fetched(
    hub: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 2**40)
    config = config_of("model=auto", "load_checkpoint=hf://owner/name")
    assert isinstance(config, ComputeOptions)
    planned = resources.check_before_fetching(config.settings)
    assert planned is not None and planned.stored == "F32" and not planned.is_local
    size = len(hub.repositories["owner/name"]["model.safetensors"])
    hub.claimed = {"model.safetensors": size // 2}
    planned = resources.check_before_fetching(config.settings)
    assert planned is not None and planned.stored == "F16"
    hub.claimed = {"model.safetensors": size // 8}  # quantized: nobody knows how
    assert resources.check_before_fetching(config.settings) is None


@pytest.mark.parametrize(
    ("settings", "fault", "code"),
    [
        ("run_mode=serve serve.api_key=env:NO_SUCH", "serve.api_key=env:NO_SUCH", 2),
        ("run_mode=serve serve.port={taken}", "serve.port={taken}", 3),
        ("run_mode=chat server_key=env:NO_SUCH server=http://x", "server_key=env:NO_SUCH", 2),
        ("predict_data=hi adapter_path=missing.json adapter_id=a", "missing.json", 4),
        ("run_mode=slora predict_data=hi adapter_path=missing adapter_id=a", "missing", 4),
        ("run_mode=serve serve.port=0 adapter_path=missing.json", "missing.json", 4),
        ("run_mode=eval eval_data=missing.txt", "missing.txt", 2),
        ("run_mode=export export_output=text.txt", "text.txt: exists already", 2),
    ],
)
def test_cheap_errors_come_before_fetching(
    settings: str,
    fault: str,
    code: int,
    hub: Behaviour,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 2**40)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        taken = bound.getsockname()[1]
        words = ["model=auto", "load_checkpoint=hf://owner/name"]
        assert main([*words, *settings.format(taken=taken).split()]) == code
    assert fault.format(taken=taken) in capsys.readouterr().err
    assert not any(path.endswith(WEIGHTS) for path in hub.files_asked)


MINDFORMERS = ["model=tiny_bloom", "backend=mindformers", "load_checkpoint=random"]
TWO_RANKS = ["use_parallel=true", "parallel_config.data_parallel=2"]


def test_memory_for_mindformers_is_checked_before_any_of_it_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (releases, run):
        monkeypatch.setattr(module, "python_for", lambda *_: sys.executable)
    monkeypatch.setattr(memory, "free_memory", lambda: 10**8)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    # Of several the sum; what one process has taken already is part of its own need.
    for ranks, expected in (([], "memory: the run needs "), (TWO_RANKS, "memory: 2 ranks ")):
        assert main([*MINDFORMERS, "predict_data=[hi,there]", *ranks]) == 3
        stderr = capsys.readouterr().err
        assert expected in stderr and "100.0 MB is free" in stderr, stderr
        assert "load MindFormers" not in stderr
