"""Adapters from the command line: converted, merged into a checkpoint, exported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as st

from lite_runner.app import main
from lite_runner.backends.lite.export.job import spec_of
from lite_runner.backends.lite.export.opening import folder_in_cache
from lite_runner.config.argv import parse
from lite_runner.model.adapters import with_adapter
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.ckpt_file import write_ckpt
from tests.paths import FIXTURES

LLAMA = ["model=auto", f"load_checkpoint={FIXTURES}/reference/llama"]
ADAPTERS = f"adapter_path={FIXTURES}/adapters/llama"
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("key=value", ..., code=2)` in an empty folder; returns its standard error."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))

    def run(*overrides: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*overrides]) == code
        return capsys.readouterr().err

    return run


def convert(*overrides: str) -> list[str]:
    return ["run_mode=convert", *LLAMA, *overrides]


def test_a_list_of_adapters_there_and_back(run: Run) -> None:
    one = [f"adapter_path={FIXTURES}/adapters/llama/ends", "convert_format=mindformers"]
    err = run(*convert(*one, "convert_output=mf"))
    assert "its copy of the base's lm_head.weight, model.tok_embeddings.embedding_weight is" in err
    assert {file.name for file in Path("mf").iterdir()} == {
        *("adapter_config.json", "adapter_model.ckpt")
    }
    run(*convert("adapter_path=mf", "convert_format=peft", "convert_output=back"))
    before = st.load_file(FIXTURES / "adapters/llama/ends/adapter_model.safetensors")
    after = st.load_file("back/adapter_model.safetensors")
    assert after.keys() == {name for name in before if "base_layer" not in name}
    assert all(np.array_equal(value, before[name]) for name, value in after.items())
    run(*convert(ADAPTERS, "convert_format=peft", "convert_output=all"))
    names = ["all", "rank_64", "patterns", "second_layer", "ends"]
    assert json.loads(Path("all/lora_adapter.json").read_text()) == {name: name for name in names}
    some = ["adapter_id=all", "convert_format=peft", "convert_output=some"]
    run(*convert(ADAPTERS, *some))
    assert Path("some/adapter_model.safetensors").is_file()


def test_adapters_of_a_model_whose_weights_are_not_here(run: Run, tmp_path: Path) -> None:
    sizes = ["run_mode=convert", "model=llama2_7b", "convert_format=peft", "convert_output=x"]
    err = run(*sizes, ADAPTERS, code=4)
    assert "a is [8, 32], expected [8, 4096]" in err


def test_a_merged_checkpoint_holds_the_sum(run: Run) -> None:
    run(*convert(ADAPTERS, "adapter_id=all", "merge=true", "convert_output=x.safetensors"))
    base = st.load_file(FIXTURES / "reference/llama/model.safetensors")
    adapter = st.load_file(FIXTURES / "adapters/llama/all/adapter_model.safetensors")
    found = st.load_file("x.safetensors")
    stem = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{stem}.lora_{kind}.weight"] for kind in "AB")
    wanted = base[f"{stem}.weight"] + 2.0 * (b.astype(np.float64) @ a)
    got = found["model.layers.1.feed_forward.w2.weight"]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    norm = "model.layers.1.input_layernorm.weight"
    assert np.array_equal(found["model.layers.1.attention_norm.weight"], base[norm])


def test_a_merged_tied_embedding_gets_a_head_of_its_own(run: Run) -> None:
    tied = ["model=auto", f"load_checkpoint={FIXTURES}/reference/qwen2", "merge=true"]
    which = [f"adapter_path={FIXTURES}/adapters/qwen2", "adapter_id=embedding"]
    output = ["convert_format=huggingface", "convert_output=x"]
    run("run_mode=convert", *tied, *which, *output)
    assert json.loads(Path("x/config.json").read_text())["tie_word_embeddings"] is False
    base = st.load_file(FIXTURES / "reference/qwen2/model.safetensors")
    found = st.load_file("x/model.safetensors")
    embedding = "model.embed_tokens.weight"
    assert np.array_equal(found["lm_head.weight"], base[embedding])
    assert not np.array_equal(found[embedding], base[embedding])


@pytest.mark.parametrize(
    ("overrides", "code", "expected"),
    [
        (["convert_format=peft"], 2, "convert_format=peft needs adapter_path="),
        (["merge=true"], 2, "merge=true needs adapter_path="),
        ([ADAPTERS], 2, "expected peft, mindformers or gguf to convert adapters"),
        ([ADAPTERS, "merge=true", "convert_format=peft"], 2, "merge=true writes a checkpoint"),
        ([ADAPTERS, "merge=true"], 2, "lists 5 adapters, one can be merged"),
        (["adapter_id=all"], 2, "adapter_id needs adapter_path=lora_adapter.json"),
        ([ADAPTERS, "adapter_id=[null]", "merge=true"], 2, "expected the name of one adapter"),
        (["adapter_root=/"], 2, "adapter_root needs adapter_path=lora_adapter.json"),
        ([ADAPTERS, "adapter_id=al", "merge=true"], 4, "no adapter 'al'; did you mean all?"),
        (["adapter_path=no.json", "merge=true"], 4, "adapter_path: no.json: no such file"),
    ],
)
def test_invalid_adapter_settings(run: Run, overrides: list[str], code: int, expected: str) -> None:
    assert expected in run(*convert("convert_output=x.safetensors", *overrides), code=code)
    assert not Path("x.safetensors").exists()


def test_an_untrained_adapter_is_refused(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "untrained"
    folder.mkdir()
    source = FIXTURES / "adapters/llama/all"
    held = st.load_file(source / "adapter_model.safetensors")
    zero = {n: v if "lora_A" in n else np.zeros_like(v) for n, v in held.items()}
    st.save_file(zero, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    for form in (["convert_format=peft"], ["merge=true", "convert_format=huggingface"]):
        err = run(*convert("adapter_path=untrained", "convert_output=x", *form), code=4)
        assert "has no effect" in err


def write_adapter(folder: Path) -> None:
    """An adapter of tiny_llama in MindFormers' names."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    settings = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": ["wo"]}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {}
    for layer in range(2):
        for kind, shape in (("a", (2, 4 * 24)), ("b", (64, 2))):
            values = generator.standard_normal(shape).astype(np.float32)
            name = f"model.layers.{layer}.attention.wo.lora_{kind}"
            tensors[name] = LazyTensor(shape, "F32", lambda values=values: values)
    write_ckpt(folder / "adapter_model.ckpt", tensors)


def tokens(run: Run, *overrides: str) -> list[list[int]]:
    run("predict_data=['some words','more']", "max_new_tokens=6", "eos_token_id=[]", *overrides)
    result: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text())
    return [row["token_ids"] for row in result["results"]]


@pytest.mark.usefixtures("unverified")
def test_an_export_with_an_adapter_computes_like_the_merged_checkpoint(
    run: Run,
    write_tiny_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lite_python: Path,
) -> None:
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(lite_python))
    write_tiny_llama("model")
    write_adapter(tmp_path / "mine")
    source = ["model=tiny_llama", "load_checkpoint=model"]
    adapter = "adapter_path=mine"
    merge = ["merge=true", "convert_format=huggingface", "convert_output=merged"]
    run("run_mode=convert", *source, adapter, *merge)
    shape = ["export.layout=static_pair", "export_output=exported", "predict_batch_size=2"]
    run("run_mode=export", *source, adapter, *shape)
    manifest = json.loads(Path("exported/manifest.json").read_text())
    files = [tmp_path / "mine" / name for name in ("config.json", "adapter_model.ckpt")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert (manifest["adapter"], manifest["adapter_sha256"]) == ("mine", digest)
    base = tokens(run, *source)
    online = tokens(run, "model=tiny_llama", "load_checkpoint=merged")
    offline = tokens(run, "model=tiny_llama", "backend=mslite", "infer.model_dir=exported")
    assert offline == online != base


def test_an_exported_model_in_the_cache_is_of_its_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "one")
    config, _ = resolve(parse(["model=tiny_llama", "run_mode=export"], heads()))
    plain = locate(config.source)
    folders = set()
    for path in ("", str(tmp_path / "one")):
        files = with_adapter(plain, replace(config, adapter_path=path).adapters)
        folders.add(folder_in_cache("x", files, spec_of(config.settings, files, 1, 64)))
    settings = tmp_path / "one/config.json"
    settings.write_text(settings.read_text().replace('"lora_alpha": 4', '"lora_alpha": 5'))
    files = with_adapter(plain, replace(config, adapter_path=str(tmp_path / "one")).adapters)
    folders.add(folder_in_cache("x", files, spec_of(config.settings, files, 1, 64)))
    assert len(folders) == 3
