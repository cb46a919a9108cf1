"""Prompts with adapters of their own, from the command line to the report."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lite_runner.app import main
from lite_runner.system import memory
from lite_runner.system.files import readable
from lite_runner.weights.lora.adapter_reader import shards_of
from tests.refusals import refused

Run = Callable[..., dict[str, Any]]
HIDDEN, HEADS, WIDE, LAYERS = 64, 96, 128, 1  # of model=tiny_llama, but for one layer
WIDTHS = {"self_attn.q_proj": (HIDDEN, HEADS), "self_attn.o_proj": (HEADS, HIDDEN)}
WIDTHS |= {"mlp.up_proj": (HIDDEN, WIDE), "mlp.down_proj": (WIDE, HIDDEN)}
BASE = ["model=tiny_llama", "model.model_config.num_layers=1", "max_new_tokens=6"]


def write_adapter(folder: Path, rank: int, modules: Collection[str], factor: float = 1.0) -> None:
    """A folder as peft writes it, with random values."""
    random = np.random.default_rng(rank)
    tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            wide_in, wide_out = WIDTHS[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            a = random.standard_normal((rank, wide_in)) / rank**0.5
            b = factor * random.standard_normal((wide_out, rank)) / wide_in**0.5
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted(module.partition(".")[2] for module in modules)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.fixture
def adapters(tmp_path: Path) -> str:
    """The listing of three good adapters and one that does nothing; the test runs beside it."""
    write_adapter(tmp_path / "en", 4, WIDTHS)
    write_adapter(tmp_path / "zh", 1, ["self_attn.q_proj", "mlp.down_proj"], factor=4.0)
    write_adapter(tmp_path / "de", 16, ["mlp.up_proj", "mlp.down_proj"])
    write_adapter(tmp_path / "new", 2, WIDTHS, factor=0.0)
    folders = {name: name for name in ("en", "zh", "de", "new")}
    (tmp_path / "lora_adapter.json").write_text(json.dumps(folders))
    return "adapter_path=lora_adapter.json"


@pytest.fixture
def run(run: Run) -> Run:
    return functools.partial(run, "verbosity=0", *BASE)


def tokens(result: dict[str, Any]) -> list[list[int]]:
    return [row["token_ids"] for row in result["results"]]


def test_no_name_and_the_name_none_are_the_base(
    adapters: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tokens(run("predict_data=hello"))
    listing = Path("elsewhere/lora_adapter.json")  # absolute paths, as MindFormers documents them
    listing.parent.mkdir()
    folders = {"Adapter1": str(tmp_path / "en"), "Adapter2": str(tmp_path / "zh")}
    listing.write_text(json.dumps(folders))
    moved = f"adapter_path={listing}"
    for given in ([], ["--adapter_id", "None"], ["adapter_id=null"], ["run_mode=slora"]):
        assert tokens(run(moved, "predict_data=hello", *given)) == base
    assert tokens(run("--adapter_id", "None", "predict_data=hello")) == base
    named = run(moved, "--adapter_id", "Adapter1", "predict_data=hello")
    assert tokens(named) == tokens(run(adapters, "adapter_id=en", "predict_data=hello")) != base
    assert main([*BASE, moved, "predict_data=hello"]) == 0
    assert "adapter_id= names none, so the base model runs" in capsys.readouterr().err


def test_the_only_adapter_is_meant_without_a_name(adapters: str, run: Run, tmp_path: Path) -> None:
    hello = "predict_data=hello"
    base, named = tokens(run(hello)), tokens(run(adapters, "adapter_id=en", hello))
    assert base != named
    Path("one.json").write_text(json.dumps({"mine": str(tmp_path / "en")}))
    for path in (f"adapter_path={tmp_path / 'en'}", "adapter_path=one.json"):
        for words in ([], ["run_mode=slora"], ["adapter_id=null"]):
            result = run(path, hello, *words)
            assert tokens(result) == named
            assert result["results"][0]["adapter"] in ("en", "mine")
        for words in (["adapter_id=base"], ["--adapter_id", "None"]):
            assert tokens(run(path, hello, *words)) == base
    mixed = [
        "predict_data=[{prompt: hello, adapter: base}, {prompt: hello}]",
        "predict_batch_size=2",
    ]
    assert tokens(run("adapter_path=one.json", *mixed)) == [*base, *named]


def test_one_adapter_for_each_prompt_equals_each_alone(adapters: str, run: Run) -> None:
    slora = ["run_mode=slora", adapters]
    mixed = run(*slora, "adapter_id=[en,null,zh,en]", "predict_data=[hello,hello,hello,bye]")
    names = ["en", None, "zh", "en"]
    assert [row["adapter"] for row in mixed["results"]] == names
    base = run("predict_data=hello")
    assert "adapters" not in base
    en = run("--run_mode", "predict", adapters, "--adapter_id", "en", "predict_data=[hello,bye]")
    zh = run(*slora, "adapter_id=zh", "predict_data=hello")
    assert tokens(mixed) == [tokens(en)[0], tokens(base)[0], tokens(zh)[0], tokens(en)[1]]
    assert len({tuple(row) for row in tokens(mixed)}) == 4
    report = mixed["adapters"]
    assert (report["places"], report["loads"]) == (2, 2)
    # Two places of rank 4 for all that either adapter changes, float32.
    widths = sum(sum(WIDTHS[module]) for module in WIDTHS)
    assert report["pool_bytes"] == 2 * 4 * 4 * LAYERS * widths
    use = report["used"]
    assert {name: one["modules"] for name, one in use.items()} == {"base": 0, "en": 4, "zh": 2}
    assert {name: one["prompts"] for name, one in use.items()} == {"base": 1, "en": 2, "zh": 1}
    assert use["en"]["prompt_tokens"] == len("hello") + len("bye")
    assert use["en"]["generated_tokens"] == 12
    assert all(one["seconds"] > 0 for one in use.values())


@pytest.mark.usefixtures("float32_cache")
def test_two_backends_compute_the_same(
    adapters: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run_mode=slora", adapters, "adapter_id=[en,null,zh,de]"]
    line.append("predict_data=[hello,hello,hello,bye]")
    result = run(*line, "compare_backend=ms", "verbosity=1")
    assert tokens(result) == tokens(run(*line))
    assert len({tuple(row) for row in tokens(result)[:3]}) == 3
    comparison = result["comparison"]
    assert [side["backend"] for side in comparison["sides"]] == ["native", "ms"]
    assert [(text["equal"], text["tokens"]) for text in comparison["texts"]] == [(6, 6)] * 4
    assert all(text["logit_difference"] < 1e-4 for text in comparison["texts"])
    assert result["adapters"]["used"].keys() == {"base", "en", "zh", "de"}
    assert "prompt  equal tokens" in capsys.readouterr().err


def test_records_name_their_adapters(
    adapters: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"prompt": "hello", "adapter": "en", "id": "a"},
        {"prompt": "hello", "adapter": "base", "max_new_tokens": 2},
        {"prompt": "hello"},
    ]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = ["run_mode=slora", adapters, "predict_data=p.jsonl", "output_format=jsonl"]
    result = run(*options, "adapter_id=zh")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["id"], one["adapter"]) for one in lines] == [("a", "en"), (1, None), (2, "zh")]
    by_id = run(adapters, "adapter_id=[en,null,zh]", "predict_data=[hello,hello,hello]")
    expected = tokens(by_id)
    assert tokens(result) == [expected[0], expected[1][:2], expected[2]]


def test_a_file_of_adapters_and_prompts_with_a_small_pool(adapters: str, run: Run) -> None:
    lines = ["en\tone", "\ttwo", "zh\tthree", "de\tfour\twith a tab", "null\tfive", "en\tsix"]
    Path("prompts.txt").write_text("\n".join(lines) + "\n")
    options = ["run_mode=slora", adapters, "predict_data=prompts.txt"]
    whole = run(*options)
    assert [row["adapter"] for row in whole["results"]] == ["en", None, "zh", "de", None, "en"]
    assert whole["results"][3]["prompt"] == "four\twith a tab"
    assert (whole["adapters"]["places"], whole["adapters"]["loads"]) == (3, 3)
    small = run(*options, "max_loaded_adapters=1")
    assert tokens(small) == tokens(whole)
    assert (small["adapters"]["places"], small["adapters"]["loads"]) == (1, 4)  # en twice


def test_rounded_adapters_take_half_the_memory(
    adapters: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["run_mode=slora", adapters, "adapter_id=[de,null,en]", "predict_data=[a,b,c]"]
    exact, rounded = run(*options), run(*options, "adapter_dtype=bf16")
    pools = [report["adapters"]["pool_bytes"] for report in (exact, rounded)]
    assert pools[0] == 2 * pools[1]
    assert tokens(rounded)[1] == tokens(exact)[1]
    capsys.readouterr()
    assert main([*BASE, *options, "adapter_dtype=bf16", "dry_run=true"]) == 0
    assert f"adapters      {readable(pools[1])} for those" in capsys.readouterr().out
    refused([*BASE, *options, "adapter_dtype=bf16", "backend=ms"], 2)
    stderr = capsys.readouterr().err
    assert "adapter_dtype=bf16 needs backend=native" in stderr and "backend=native can" in stderr


def test_beams_and_completions_keep_their_adapter(adapters: str, run: Run) -> None:
    options = ["num_beams=2", "num_return_sequences=2", "run_mode=slora", adapters]
    mixed = run(*options, "adapter_id=[de,en]", "predict_data=[hello,hello]")
    assert [row["adapter"] for row in mixed["results"]] == ["de", "de", "en", "en"]
    en = run(*options, "adapter_id=en", "predict_data=hello")
    assert tokens(mixed)[2:] == tokens(en)
    assert mixed["adapters"]["used"]["en"]["prompts"] == 1


def test_a_dry_run_tells_of_the_pool_that_the_run_has(
    adapters: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["run_mode=slora", adapters, "adapter_id=[en,null,zh,de]", "max_loaded_adapters=2"]
    options += ["predict_data=[hello,hello,hello,hello]"]
    pool = run(*options)["adapters"]["pool_bytes"]
    capsys.readouterr()
    plans = []
    for changed in ([], ["adapter_id=base"]):
        assert main([*BASE, *options, *changed, "dry_run=true"]) == 0
        plans.append(capsys.readouterr().out)
    assert f"adapters      {readable(pool)} for those loaded at a time" in plans[0]
    assert "adapters  " not in plans[1]
    assert f", adapters {readable(pool)}, the process" in plans[0]
    bare = ["run_mode=slora", adapters, "adapter_id=en", "dry_run=true"]
    assert main([*BASE, *bare]) == 0  # without a prompt
    assert "for those loaded at a time" in capsys.readouterr().out


@pytest.mark.usefixtures("light_msrun")
def test_two_ranks_give_the_tokens_of_one(
    adapters: str, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["run_mode=slora", adapters, "adapter_id=[en,null,zh,de]"]
    options += ["predict_data=[hello,hello,hello,hello]"]
    alone, merge = run(*options), run(*options, "parallel=tp2")
    assert merge["world_size"] == 2
    assert tokens(merge) == tokens(alone)
    assert merge["adapters"]["used"].keys() == alone["adapters"]["used"].keys()
    # Cut beforehand, into the folder of the first adapter that is listed, as MindFormers has it.
    cut = run(*options, "parallel=tp2", "auto_trans_ckpt=true", "output_dir=cut")
    assert tokens(cut) == tokens(alone)
    weights = Path("en/adapter_model.safetensors")
    kept = weights.read_bytes()
    weights.unlink()
    shutil.copytree("cut/transformed_checkpoint/slora", "en/slora")
    assert main([*BASE, *options, "parallel=tp2", "dry_run=true"]) == 0  # of the parts alone
    listing = Path("lora_adapter.json")
    assert shards_of(listing) == Path("en/slora")
    for rank in Path("en/slora").iterdir():  # or without a folder of their own
        rank.rename(Path("en") / rank.name)
    assert shards_of(listing) == Path("en")
    for rank in Path("en").glob("rank_*"):
        shutil.rmtree(rank)
    weights.write_bytes(kept)
    # What each of them holds is known before, and counts where memory is short.
    capsys.readouterr()
    assert main([*BASE, *options, "parallel=tp2", "dry_run=true"]) == 0
    pool = re.search(r"x 11 tokens, (\S+ kB) of adapters\n", capsys.readouterr().out)
    assert pool is not None
    each = pool[1]
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    refused([*BASE, *options, "parallel=tp2"], 3)
    assert f", adapters {each}, the process" in capsys.readouterr().err


BAD = {
    "a name in other letters": (["adapter_id=EN"], 4, "no adapter 'EN'; did you mean en?"),
    "a name that there is not": (["adapter_id=eng"], 4, "no adapter 'eng'; did you mean en?"),
    "one that changes nothing": (["adapter_id=new"], 4, "adapter new: new: has no effect"),
    "more adapters than prompts": (["adapter_id=[en,zh]"], 2, "got 2 for 1 prompt, expected one"),
    "a file without a tab": (
        ["predict_data=x.txt"],
        2,
        "prompt 2 has no adapter; expected adapter",
    ),
    "a file of more": (["predict_data=x.txt", "adapter_id=[en]"], 2, "got 1 for 2 prompts"),
    "no file": (["adapter_id=en", "adapter_path=no.json"], 4, "no.json: no such file"),
    "no path": (["adapter_id=en", "adapter_path="], 2, "needs adapter_path=lora_adapter.json"),
    "an exported model": (["adapter_id=en", "backend=mslite"], 2, "no effect with backend=mslite"),
}


@pytest.mark.parametrize(("overrides", "code", "message"), BAD.values(), ids=BAD.keys())
def test_errors_come_before_loading_the_base(
    adapters: str, capsys: pytest.CaptureFixture[str], overrides: list[str], code: int, message: str
) -> None:
    Path("x.txt").write_text("en\thello\nhello\n")
    start = [*BASE, "run_mode=slora", adapters, "predict_data=hello"]
    given = {override.partition("=")[0] for override in overrides}
    start = [one for one in start if one.partition("=")[0] not in given]
    refused([*start, *overrides], code)
    err = capsys.readouterr().err
    assert message in err
    assert "weights" not in err
