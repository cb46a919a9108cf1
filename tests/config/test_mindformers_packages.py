"""Every yaml that comes in the mindformers packages for a model of ours runs, or says what is
missing: the packages are fetched, and what came of each file last is in
mindformers_yaml_outcomes.yaml. Without a network the tests are left out, except for those of the
repository's files, which are a fixture (see tests/mindformers_repository.py)."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner.app import main
from lite_runner.architectures import KNOWN
from lite_runner.config.argv import parse
from lite_runner.config.mindformers import IGNORED
from lite_runner.errors import ConfigError
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads
from lite_runner.run_modes import resolve as resolve_line
from tests import mindformers_repository
from tests.paths import REFERENCE, ROOT

OUTCOMES = Path(__file__).with_name("mindformers_yaml_outcomes.yaml")

OURS = {
    *("BloomLMHeadModel", "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"),
    *("ChatGLM2ForConditionalGeneration", "ChatGLM2WithPtuning2", "ParallelLlamaForCausalLM"),
    *("GLMChatModel", "GLMForPreTraining"),
    *("PanguAlphaHeadModel", "PanguAlphaPromptTextClassificationModel"),
}
LORA = "runs with LoRA weights in the checkpoint"
HERE = ("--run_mode", "predict", "--device_target", "CPU", "--use_parallel", "False")
RANDOM = ("--load_checkpoint", "random", "--predict_data", "hello")
Packages = Callable[[str], Path]


def outcomes() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(OUTCOMES.read_text(encoding="utf-8"))
    return loaded


def files_of_ours(configs: Path) -> Iterator[tuple[str, bool]]:
    """Each file for a model of ours, or to predict with a folder's, and whether it is such."""
    for path in sorted(configs.rglob("*.yaml")):
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        model, name = raw.get("model") or {}, path.relative_to(configs).with_suffix("").as_posix()
        folder = raw.get("pretrained_model_dir") is not None and raw.get("run_mode") == "predict"
        if folder or (model.get("arch") or {}).get("type") in OURS:
            yield name, folder


def test_the_page_counts_them() -> None:
    counts = Counter[str]()
    for named in outcomes()["sizes"].values():
        counts.update({text: len(names) for text, names in named.items()})
    for kinds in outcomes()["folder"].values():
        counts.update("runs" if kind in KNOWN else "other" for kind in kinds.values())
    run, lora, every = counts["runs"], counts[LORA], counts.total()
    page = (ROOT / "docs/mindformers.md").read_text(encoding="utf-8")
    prose = " ".join(page[page.index("## Yaml files") : page.index("- Keys for training")].split())
    assert f"contain {every} yaml files of decoder models. {run} of them pass" in prose
    assert f"and {lora} more with a checkpoint that has LoRA weights" in prose
    assert run + lora == every
    repository = prose.split("MindFormers' repository")[1]
    held = [result for _, result, _ in mindformers_repository.files()]
    run = held.count("runs")
    foreign = sum("is not supported" in result for result in held)
    assert f"has {len(held)} more to predict or export with: {run} pass it, {foreign}" in repository
    assert len(held) == run + foreign


def test_each_file_of_the_repository_is_taken_or_names_the_missing(tmp_path: Path) -> None:
    files = list(mindformers_repository.files())
    recorded = {name: text for name, text, _ in files}
    path = tmp_path / "file.yaml"
    now = {name: mindformers_repository.outcome(raw, path) for name, _, raw in files}
    assert {name: text.partition("; expected one of")[0] for name, text in now.items()} == recorded
    assert len(recorded) == len(files) and mindformers_repository.FILE.stat().st_size < 120_000


ALWAYS = {"seq_length": 64, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
ALWAYS |= {"use_past": True}  # by native kernels, which compile nothing
SIZES = {
    **{"hidden_size": 128, "num_layers": 2, "num_heads": 8, "n_kv_heads": 2, "max_length": 32},
    **{"intermediate_size": 96, "num_attention_heads": 8, "ffn_hidden_size": 96},
    **{"vocab_size": 300, "padded_vocab_size": 300, "kv_channels": 16},
    **{"multi_query_group_num": 2, "max_decode_length": 16},
}


EXPERTS = {"expert_num": 16, "moe_intermediate_size": 32, "first_k_dense_replace": 1}


def test_files_of_the_repository_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of each set of keys, of small sizes, with random weights and the byte tokenizer."""
    path, kinds = tmp_path / "file.yaml", set[str]()
    for name, result, raw in mindformers_repository.files():
        settings = raw["model"].get("model_config", {})
        kind = " ".join(sorted(key for key in settings if key not in IGNORED))
        tuned = settings.get("pet_config") or {}  # LoRA's weights are not random
        if result != "runs" or kind in kinds or tuned.get("pet_type") == "lora":
            continue
        kinds.add(kind)
        small = {key: size for key, size in SIZES.items() if key in settings}
        model = {**raw["model"], "model_config": {**settings, **small, **ALWAYS}}
        fewer = (
            {"moe_config": raw["moe_config"] | EXPERTS}
            if "n_group" in (raw.get("moe_config") or {})
            else {}
        )
        config = {**raw, "model": model, "processor": None, **fewer}
        path.write_text(yaml.dump(config, Dumper=yaml.CSafeDumper))
        line = [*mindformers_repository.LINE, *mindformers_repository.MORE]
        code = main(["--config", str(path), *line, "max_new_tokens=2", "do_sample=false"])
        assert code == 0, f"{name}: {capsys.readouterr().err}"
    assert len(kinds) >= 10


@pytest.mark.parametrize("release", outcomes()["sizes"])
def test_each_file_is_taken_or_names_the_missing(
    mindformers_package: Packages, release: str
) -> None:
    configs, found = mindformers_package(release), {}
    for name in (name for name, folder in files_of_ours(configs) if not folder):
        try:
            given = ["--load_checkpoint", "x.ckpt", "--predict_data", "hello"]
            line = ["--config", str(configs / f"{name}.yaml"), *HERE, *given]
            config, _ = resolve_line(parse(line, heads()))
            pet = config.model.model_config.pet_config
            found[name] = LORA if pet is not None and pet.pet_type == "lora" else "runs"
        except ConfigError as error:
            found[name] = error.message
    expected = {
        name: text for text, names in outcomes()["sizes"][release].items() for name in names
    }
    assert found.keys() == expected.keys()
    exact = {"runs", LORA}
    wrong = {
        name: found[name]
        for name, text in expected.items()
        if (text != found[name] if exact & {text, found[name]} else text not in found[name])
    }
    assert wrong == {}


CLASSES = {
    "BloomConfig": "BloomLMHeadModel",
    "ChatGLM2Config": "ChatGLM2ForConditionalGeneration",
    "GLMConfig": "GLMChatModel",
    "GPT2Config": "GPT2LMHeadModel",
    "LlamaConfig": "LlamaForCausalLM",
    "PanguAlphaConfig": "PanguAlphaHeadModel",
    "Qwen3Config": "Qwen3ForCausalLM",
    "Qwen3MoeConfig": "Qwen3MoeForCausalLM",
}


def parameters_of_classes(sources: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each config class of ours in a release, and its constructor's parameters with their defaults;
    None for one that is not a literal."""
    for path in sorted(sources.rglob("*config*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                (init,) = (
                    one
                    for one in node.body
                    if isinstance(one, ast.FunctionDef) and one.name == "__init__"
                )
                names = [one.arg for one in init.args.args][-len(init.args.defaults) :]
                values = zip(names, init.args.defaults, strict=True)
                yield node.name, {name: _literal(value) for name, value in values}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp):  # 2560 * 4
        return _literal(node.left) * _literal(node.right)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


@pytest.mark.parametrize("release", outcomes()["sizes"])
def test_all_parameters_of_config_classes_are_known(
    mindformers_package: Packages, release: str, tmp_path: Path
) -> None:
    found = dict(parameters_of_classes(mindformers_package(release).parent / "mindformers"))
    assert found.keys() >= {"LlamaConfig", "ChatGLM2Config"}
    for name, parameters in found.items():
        settings = {"seq_length": 64, "type": name, **parameters}
        model = {"arch": {"type": CLASSES[name]}, "model_config": settings}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"run_mode": "predict", "model": model}))
        resolve_line(parse(["--config", str(path), *HERE, *RANDOM], heads()))
        settings["hidden_dropout_prop"] = 0.1
        path.write_text(yaml.safe_dump({"run_mode": "predict", "model": model}))
        with pytest.raises(ConfigError, match="hidden_dropout_prop"):
            resolve_line(parse(["--config", str(path), *HERE, *RANDOM], heads()))


@pytest.mark.parametrize("release", outcomes()["folder"])
def test_each_file_of_a_folder_runs(
    mindformers_package: Packages, release: str, tmp_path: Path
) -> None:
    configs, expected = mindformers_package(release), outcomes()["folder"][release]
    assert {name for name, folder in files_of_ours(configs) if folder} == expected.keys()
    for name, kind in expected.items():
        folder = REFERENCE / kind
        if kind == "telechat3":  # a Llama of that name
            config = json.loads((REFERENCE / "llama/config.json").read_text(encoding="utf-8"))
            folder = tmp_path / kind
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        line = ["--config", str(configs / f"{name}.yaml"), *HERE, *RANDOM]
        config, _ = resolve_line(parse([*line, "--pretrained_model_dir", str(folder)], heads()))
        assert locate(config.source).model.architecture == kind


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("1.0.2", "bloom/run_bloom_560m"),
        ("1.0.2", "gpt2/run_gpt2"),
        ("1.0.2", "llama2/predict_llama2_70b_910b"),
        ("1.3.2", "codellama/predict_codellama_34b"),
        ("1.3.2", "gpt2/predict_gpt2_small_fp16"),
        ("1.3.2", "llama2/predict_llama2_13b_rtn"),
    ],
)
def test_some_files_really_run_with_small_sizes(
    mindformers_package: Packages, release: str, name: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 320}
    if name.startswith(("llama2", "codellama")):
        sizes |= {"n_kv_heads": 2, "multiple_of": 16}
    if name.startswith("gpt2"):
        sizes |= {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    else:
        sizes["seq_length"] = 64
    flags = [
        word for key, value in sizes.items() for word in (f"--model.model_config.{key}", value)
    ]
    line = ["--config", mindformers_package(release) / f"{name}.yaml", *HERE, *RANDOM, *flags]
    more = ["processor.tokenizer.type=ByteTokenizer", f"output_dir={tmp_path}", "max_new_tokens=3"]
    more += ["processor.tokenizer.tokenizer_file=null"]
    assert main([*map(str, line), *more, "verbosity=0"]) == 0
    result = json.loads((tmp_path / "latest/result.json").read_text(encoding="utf-8"))
    assert 0 < result["results"][0]["generated_tokens"] <= 3
