"""GE options on Ascend: the preset of a processor, its overrides, and sources before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner.backends.lite.engine import engine_for, ge_of_run, ge_to_write
from lite_runner.backends.lite.engines import lite
from lite_runner.backends.lite.ge import GeConfig, ge_config
from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import Ranks
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve
from lite_runner.system import environment

FORMAT_MODE = "ge.exec.formatMode"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`machine("Ascend910B3")`: this one has such a processor, and a MindSpore Lite for it."""

    def become(soc: str) -> None:
        monkeypatch.setattr(environment, "ascend_devices", lambda: 1)
        monkeypatch.setattr(environment, "ascend_soc", lambda: soc)
        monkeypatch.setattr(lite, "available", lambda: True)

    return become


def config_of(*settings: str) -> RunConfig:
    line = ["model=tiny_llama", "backend=mslite", "predict_data=x", *settings]
    return resolve(parse(line, heads()))[0]


def session(ge: GeConfig | None) -> dict[str, str]:
    assert ge is not None and not ge.files
    return dict(ge.sections["ge_session_options"])


@pytest.mark.parametrize(
    ("soc", "preset"),
    [
        ("Ascend910B3", "atlas_800t_a2"),
        ("Ascend910B4-1", "atlas_800t_a2"),
        ("Ascend910_9391", "atlas_800t_a2"),
        ("Ascend910A", "atlas_800"),
        ("Ascend910B", "atlas_800"),
        ("Ascend910ProA", "atlas_800"),
    ],
)
def test_the_preset_of_a_processor(machine: Callable[[str], None], soc: str, preset: str) -> None:
    machine(soc)
    assert ge_of_run(config_of().infer) == ge_config(config_of(f"ge={preset}").infer)


def test_a_processor_without_recommended_options(machine: Callable[[str], None]) -> None:
    machine("Ascend310P3")
    assert ge_of_run(config_of().infer) is None
    own = config_of("infer.ge_options.ascend_context.provider=ge")
    assert ge_of_run(own.infer) == GeConfig(sections={"ascend_context": {"provider": "ge"}})


def test_options_override_the_preset(machine: Callable[[str], None]) -> None:
    machine("Ascend910B3")
    section = "infer.ge_options.ge_session_options"
    found = session(
        ge_of_run(config_of(f"{section}.{FORMAT_MODE}=null", f"{section}.ge.new=x").infer)
    )
    assert FORMAT_MODE not in found
    assert found["ge.new"] == "x" and found["ge.externalWeight"] == "1"


def test_sources_before_the_preset(machine: Callable[[str], None], tmp_path: Path) -> None:
    machine("Ascend910B3")
    beside, own = tmp_path / "config.ini", tmp_path / "own.ini"
    for path in (beside, own):
        path.write_text("[ascend_context]\nprovider=ge\n")
    given = config_of(f"infer.ge_config_path={own}")
    assert ge_of_run(given.infer, (beside,)) == GeConfig(files=(own,))
    assert ge_of_run(config_of().infer, (beside,)) == GeConfig(files=(beside,))
    assert FORMAT_MODE not in session(ge_of_run(config_of("ge=atlas_800").infer, (beside,)))
    assert ge_of_run(config_of("ge=none").infer, (beside,)) is None  # as it was asked for


def test_the_source_is_reported(
    machine: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    machine("Ascend910B3")
    engine = engine_for(config_of().settings, "static_pair")
    assert (engine.name, engine.ge) == ("lite", ge_config(config_of("ge=atlas_800t_a2").infer))
    stderr = capsys.readouterr().err
    assert stderr.strip() == "GE options: ge=atlas_800t_a2, for Ascend910B3"
    assert engine_for(config_of("ge=none").settings, "static_pair").ge is None
    precision, weights = capsys.readouterr().err.splitlines()
    assert "without ge.exec.precision_mode all float32 is computed in float16" in precision
    assert "without ge.externalWeight the two graphs" in weights


def test_config_files_beside_an_export(
    machine: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of()
    assert ge_to_write(config.infer, "Ascend") is None  # for a processor that is not here
    assert "no config.ini is written: a run takes the GE options" in capsys.readouterr().err
    assert ge_to_write(config.infer, "CPU") is None and capsys.readouterr().err == ""
    machine("Ascend910A")
    assert ge_to_write(config.infer, "Ascend") == ge_config(config_of("ge=atlas_800").infer)


def test_the_rank_table_of_a_job_goes_to_lite(
    machine: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launcher puts it in the environment of a rank; what the options name comes first."""
    machine("Ascend910B3")
    config, two = config_of(), Ranks(rank=1, tensor=2)
    monkeypatch.delenv("RANK_TABLE_FILE", raising=False)
    with pytest.raises(ConfigError, match=r"^parallel\.rank_table_file: 2 ranks share") as caught:
        engine_for(config.settings, "static_pair", ranks=two)
    assert caught.value.hint.startswith("parallel.rank_table_file=FILE; scripts/hccl_tools.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK_TABLE_FILE", "table.json")
    table = str(tmp_path / "table.json")
    for settings in ([], ["ge=none"]):
        ge = engine_for(config_of(*settings).settings, "static_pair", ranks=two).ge
        assert ge is not None and ge.rank_table == table
        sections = ge.of_graph(1)
        assert isinstance(sections, dict)
        assert sections["ascend_context"]["rank_table_file"] == table
        assert ("ge_session_options" in sections) == (settings == [])
    copies = engine_for(config.settings, "static_pair", ranks=Ranks(data=2)).ge
    assert copies == ge_of_run(config.infer)  # nothing in their graphs communicates
    own = config_of("infer.ge_options.ascend_context.rank_table_file=mine.json")
    assert engine_for(own.settings, "static_pair", ranks=two).ge == ge_of_run(own.infer)
    # The launcher, which plans before a rank has it in its environment.
    given = replace(config, parallel=replace(config.parallel, rank_table_file="given.json"))
    planned = engine_for(given.settings, "static_pair", ranks=two).ge
    assert planned is not None and planned.rank_table == str(tmp_path / "given.json")


def test_a_rank_that_was_started_by_hand_names_its_rank_table(
    machine: Callable[[str], None], tmp_path: Path
) -> None:
    """As MindFormers' document of Lite on several cards has it: a line of lite.ini."""
    machine("Ascend910B3")
    config = config_of("infer.rank_id=1")
    key = r"infer\.ge_options\.ascend_context\.rank_table_file"
    with pytest.raises(ConfigError, match=f"^{key}: 2 ranks share the model") as caught:
        engine_for(config.settings, "static_pair", sharing=2)
    setting = caught.value.hint.partition("=FILE")[0]
    assert engine_for(
        config_of("infer.rank_id=1", f"{setting}=x").settings, "static_pair", sharing=2
    )
    ini = tmp_path / "lite.ini"
    ini.write_text("[ascend_context]\nprovider=ge\n")
    config = config_of("infer.rank_id=1", f"infer.ge_config_path={ini}")
    with pytest.raises(ConfigError, match=key):
        engine_for(config.settings, "static_pair", sharing=2)
    ini.write_text(f"{ini.read_text()}rank_table_file=table.json\n")
    assert engine_for(config.settings, "static_pair", sharing=2).ge == GeConfig(files=(ini,))
