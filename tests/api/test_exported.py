"""The models that exported graphs, and what lies beside them, mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner import AutoConfig, AutoTokenizer, InferConfig, InferTask, pipeline
from lite_runner.api.exported import exported_config
from lite_runner.api.infer_config import files_of
from lite_runner.app import main
from lite_runner.errors import ArtifactError, ConfigError, RunnerError


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({}, ConfigError, "neither a manifest nor a yaml says which model"),
        ({"prefill_model_path": "y.mindir"}, ConfigError, "neither a manifest nor a yaml"),
        ({"model_name": "bloom"}, ConfigError, "model: got 'bloom'"),  # without graphs
        ({"model_name": "glm"}, ConfigError, "model: got 'glm'"),
        ({"prefill_model_path": "y.mindir", "model_name": "bloom"}, ArtifactError, "no MindIR"),
    ],
)
def test_a_model_that_cannot_be_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str],
    error: type[RunnerError],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("y.mindir").touch()
    with pytest.raises(error, match=said):
        exported_config(InferConfig(**fields))


def test_a_graph_that_is_missing(tmp_path: Path) -> None:
    missing = InferConfig(prefill_model_path=str(tmp_path / "x.mindir"), model_name="tiny_llama")
    with pytest.raises(ArtifactError, match="no such file"):
        InferTask.get_infer_task("text_generation", missing)


def test_a_name_is_a_run_with_backend_mslite() -> None:
    place = {"rank_id": 1, "device_id": 3}
    config = InferConfig(model_name="tiny_llama", infer_seq_length=128, target="CPU", **place)
    run = exported_config(config).run_config()
    assert (run.infer.rank_id, run.context.device_id) == (1, 3)
    assert (run.backend, run.infer.infer_seq_length) == ("mslite", 128)
    assert (run.model_name, run.context.device_target) == ("tiny_llama", "CPU")


def test_graphs_from_elsewhere_say_what_ours_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair with its manifest, without it by name, and with a yaml only."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    export = ["run_mode=export", "model=tiny_bloom", "export.layout=static_pair"]
    assert main([*export, "infer.infer_seq_length=48", "export_output=x"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("tiny_bloom")
    paths = tuple(map(str, files_of(Path("x")).values()))

    def said(model: str | tuple[str, ...], **settings: str) -> list[dict[str, list[str]]]:
        generate = pipeline(
            "text_generation", model, tokenizer=tokenizer, backend="mslite", **settings
        )
        return generate("I love Beijing", max_length=40)

    ours = said("x")
    assert len(ours[0]["text_generation_text"][0]) > len("I love Beijing")
    assert said(paths) == ours
    Path("x/manifest.json").unlink()
    assert said("x") == ours
    assert said(paths, model_name="tiny_bloom") == ours
    Path("x/tiny_bloom.yaml").unlink()
    assert said(paths, model_name="tiny_bloom") == ours
    # A family: its sizes are those of the graphs, which are asked for by the other name here.
    other = tuple(path.replace("_graph.mindir", "") for path in paths)
    assert said(other, model_name="bloom") == ours
    told = exported_config(InferConfig(*paths, model_name="bloom")).run_config().model_config()
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size"):
        wanted = AutoConfig.from_pretrained("tiny_bloom").run_config().model_config()
        assert getattr(told, name) == getattr(wanted, name)
    with pytest.raises(ArtifactError, match="which is a llama"):
        said(paths, model_name="tiny_llama")
