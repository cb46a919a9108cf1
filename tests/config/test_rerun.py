"""--config outputs/latest/config.yaml: the same run, from any folder, without a note."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner import run_modes
from lite_runner.config.argv import parse
from lite_runner.config.compose import portable
from lite_runner.config.prompt import Message, Request
from lite_runner.config.prompts import completed
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve
from lite_runner.system.yaml_file import dump_yaml

Write = Callable[..., RunConfig]
CHAT = "predict_data=[{role: user, content: hi}]"
LINES = {
    "texts": ["model=tiny_llama", "predict_data=['a.txt', '${x}', '-']", "stop=[a,b]"],
    "sampling": ["model=tiny_gpt2", "predict_data=x", "do_sample=true", "eos_token_id=[1,2]"],
    "prompts": ["model=tiny_bloom", "predict_data=[{prompt: a, seed: 3, id: x}, b]"],
    "a chat": ["chat=true", CHAT, "system=Be kind.", "quant=a16w8", "context.threads=1"],
    "ranks": ["model=tiny_llama", "parallel=dp2", "predict_data=[a,b]", "parallel.timeout=9"],
    "adapters": [
        *("run_mode=slora", "adapter_path=l.json", "adapter_id=[a,null]", "predict_data=[a,b]")
    ],
    "offline": ["model=tiny_llama", "backend=mslite", "predict_data=x", "engine=graph-cell"],
    "ge": ["model=tiny_llama", "backend=mslite", "predict_data=x", "ge=atlas_800"],
    "export": ["model=tiny_llama", "run_mode=export"],
    "convert": ["model=tiny_llama", "run_mode=convert", "convert_output=x.ckpt"],
    "eval": ["model=auto", "load_checkpoint=hf://a/b", "run_mode=eval", "eval_data=t.txt"],
    "shard": ["model=tiny_llama", "run_mode=shard", "parallel=tp2"],
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A command line in one folder, whose config.yaml is kept, as of a run; the config of it."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("t.txt", "l.json", "p.jsonl"):
        (here / name).write_text("{}")

    def write(*words: str) -> RunConfig:
        config = completed(resolve(parse(words, heads()))[0], draws_seed=True)
        (tmp_path / "config.yaml").write_text(dump_yaml(portable(config)), encoding="utf-8")
        return config

    return write


def test_paths_of_every_run_mode_and_no_others(write: Write, tmp_path: Path) -> None:
    Path("random").mkdir()
    line = ["run_mode=embed", "model=tiny_llama", "load_checkpoint=random", "embed_output=o.npy"]
    raw = portable(write(*line, "predict_data=t.txt"))
    assert raw["predict_data"] == str(tmp_path / "here/t.txt")
    assert raw["load_checkpoint"] == "random"


@pytest.mark.parametrize("name", LINES)
def test_it_is_the_same_run_without_a_note(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = write(*LINES[name])
    expected = portable(config)
    monkeypatch.chdir(tmp_path)
    again, notes = resolve(parse(["--config", "config.yaml"], heads()))
    assert (again.to_dict(), notes) == (expected, [])
    assert again.output_dir == str(tmp_path / "here/outputs")


def test_typed_keys_go_over_it(write: Write) -> None:
    write("model=tiny_llama", "predict_data=[x,w]", "parallel=dp2", "max_new_tokens=4")

    def again(*words: str) -> RunConfig:
        return resolve(parse(["--config", "../config.yaml", *words], heads()))[0]

    assert again("predict_data=[y,z]").predict_data == ("y", "z")
    alone = again("parallel=single", "max_new_tokens=null")
    assert (alone.use_parallel, alone.parallel_config.data_parallel) == (False, 1)
    assert alone.max_new_tokens is None and alone.predict_data == ("x", "w")
    write("model=tiny_llama", "run_mode=convert", "convert_output=x.ckpt")
    exporting = again("run_mode=export")
    assert not hasattr(exporting, "convert_output") and exporting.export_output == ""


def test_a_typed_option_goes_over_it_with_its_bases(write: Write, tmp_path: Path) -> None:
    """Files that an option names in `defaults` are of the option, a user's as ours."""
    sampling = "model.model_config.do_sample=true"
    write("model=tiny_llama", "predict_data=hi", sampling, "ge=auto", "backend=mslite")
    mine = tmp_path / "mine/ge/mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\ndefaults:\n  - atlas_800t_a2\n  - _self_\n")

    def again(*words: str) -> RunConfig:
        return resolve(parse(["--config", "../config.yaml", *words], heads()))[0]

    former = again()
    assert former.infer.ge_preset == "auto" and former.model.model_config.do_sample
    assert again("ge=atlas_800t_a2").infer.ge_preset is None  # set by atlas_800
    assert again("ge=mine", "--config-dir", "../mine").infer.ge_preset is None
    assert not again("model=tiny_llama").model.model_config.do_sample


def test_prompts_of_standard_input_are_kept(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controls = "".join(map(chr, [*range(0xA0), 0x2028, 0x2029, 0xFEFF, 0x1F600]))
    for text in ("两行\na.txt", f"{controls}x", "long " * 300_000 + "x"):
        given = io.TextIOWrapper(io.BytesIO(f"{text}\n".encode()))
        monkeypatch.setattr("sys.stdin", given)
        assert write("model=tiny_llama", "predict_data=-").predict_data == (text,)
        again, _ = resolve(parse(["--config", "../config.yaml"], heads()))
        assert again.predict_data == (text,)


def test_paths_are_from_the_root_and_sources_stay(write: Write, tmp_path: Path) -> None:
    def paths(*words: str) -> list[str]:
        raw = portable(write("model=tiny_llama", *words))
        return [raw["load_checkpoint"], raw["predict_data"], raw["output_dir"]]

    here = tmp_path / "here"
    assert paths("load_checkpoint=l.json", "predict_data=p.jsonl", "output_dir=o") == [
        str(here / "l.json"),
        str(here / "p.jsonl"),
        str(here / "o"),
    ]
    for source in ("random", "hf://a/b", "pypi://a"):
        assert paths(f"load_checkpoint={source}", "predict_data=a text")[:2] == [source, "a text"]


def test_only_the_config_of_a_run_is_one(write: Write) -> None:
    config = write("model=tiny_llama", CHAT, "chat=true")
    raw = portable(config)
    schemas = run_modes.schemas()
    assert schemas.is_of_a_run(raw)
    assert not schemas.is_of_a_run({"model": raw["model"], "seed": 1})
    assert config.predict_data == (Message("user", "hi"),)
    with pytest.raises(ConfigError, match="sead: no such key"):
        run_modes.from_dict({**raw, "sead": 1})
    assert replace(config, predict_data=(Request("a", id=1),)).to_dict()["predict_data"] == [
        {"prompt": "a", "id": 1}
    ]
