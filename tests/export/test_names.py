"""The folder that an export gets where the config names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.ranks import Ranks
from lite_runner.export import layout
from lite_runner.export.job import job_of_export
from lite_runner.export.names import output_paths
from lite_runner.model.locate import locate
from lite_runner.model.merged_adapter import with_adapter
from lite_runner.run_modes import heads, resolve
from tests.paths import FIXTURES

ADAPTERS = FIXTURES / "adapters/llama"


def named(*settings: str) -> str:
    """The name of the folder, once the config's checks have passed."""
    words = ["run_mode=export", "model=tiny_llama", "export.layout=dynamic", *settings]
    config, _ = resolve(parse(words, heads()))
    files = with_adapter(locate(config), config)
    job = job_of_export(config, files, Ranks(), slots=config.predict_batch_size or 1)
    folder = output_paths(job, "", overwrite=False).folder
    assert folder.parent == Path(config.output_dir)
    return folder.name


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "dynamic"),
        (["predict_batch_size=1", "infer.infer_seq_length=256"], "dynamic"),  # as without
        (["predict_batch_size=4"], "dynamic_b4"),
        (["infer.infer_seq_length=64"], "dynamic_s64"),
        (["predict_batch_size=2", "infer.infer_seq_length=64"], "dynamic_b2_s64"),
        (["export.layout=static_pair"], "static_pair"),
        (["export.target=Ascend", "export.layout=static_pair"], "static_pair_ascend"),
        (["model.model_config.compute_dtype=bfloat16"], "dynamic_bfloat16"),
        (["model.model_config.compute_dtype=float32"], "dynamic"),
        (["quant=a16w8"], "dynamic_a16w8"),
        (["quant=a16w8", "kv_cache=int8"], "dynamic_a16w8_kv-int8"),
        (["quant=a16w4", "quant_group=32"], "dynamic_a16w4-g32"),
        (["infer.enc_key=0123456789abcdef"], "dynamic_encrypted"),
        (
            ["export.layout=static_pair", "model.model_config.is_sample_acceleration=true"],
            "static_pair_sampled",
        ),
    ],
)
def test_an_export_is_named_by_what_it_is(settings: list[str], name: str) -> None:
    assert named(*settings) == f"tiny_llama_{name}"


@pytest.fixture
def every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore Lite counts as set up; nothing is run in it."""
    monkeypatch.setattr(layout, "why_unavailable", lambda *_arguments: None)


@pytest.mark.usefixtures("every_engine")
def test_a_graph_of_any_size_has_no_size_in_its_name() -> None:
    resizable = ["export.layout=resizable", "engine=lite-worker"]
    assert named(*resizable) == "tiny_llama_resizable"
    sizes = ["predict_batch_size=4", "infer.infer_seq_length=64"]
    assert named(*resizable, *sizes) == "tiny_llama_resizable"
    lite = [*resizable, "infer.model_type=mindir_lite"]
    assert named(*lite) == "tiny_llama_resizable_lite"
    assert named(*lite, "export.weight_fp16=true") == "tiny_llama_resizable_lite_float16"


def test_adapters_have_folders_of_their_own(tmp_path: Path) -> None:
    base = ["model=auto", f"load_checkpoint={FIXTURES}/reference/llama"]
    names = {named(*base, f"adapter_path={ADAPTERS}/{name}") for name in ("all", "ends")}
    # Two of one name, as every training run has its checkpoint-500.
    for run, source in (("a", "all"), ("b", "ends")):
        folder = tmp_path / run / "check point"
        folder.mkdir(parents=True)
        for file in (ADAPTERS / source).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        names.add(named(*base, f"adapter_path={folder}"))
    assert len(names) == 4
    assert all(name.startswith("llama_dynamic_") for name in names)
    assert sum("_check-point-" in name for name in names) == 2


def test_a_name_that_is_given_is_kept() -> None:
    config, _ = resolve(
        parse(["run_mode=export", "model=tiny_llama", "export_output=x/y", "quant=a16w8"], heads())
    )
    files = locate(config)
    job = job_of_export(config, files, Ranks(), slots=config.predict_batch_size or 1)
    assert output_paths(job, config.export_output, overwrite=False).folder == Path("x/y")
