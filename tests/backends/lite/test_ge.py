"""GE options: conf/ge, overrides, and the user's own files."""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner import run_modes
from lite_runner.backends.lite.ge import (
    SECTIONS,
    GeConfig,
    compiles_with_ge,
    ge_config,
    in_folder,
    read_ini,
    render,
    unknown_sections,
)
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.system.files import MAX_FILE_BYTES
from tests.each import each

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
SESSION = "infer.ge_options.ge_session_options.ge"

# MindFormers' documentation of offline inference, "config.ini" of each device.
RECOMMENDED = {
    "atlas_800": """
[ascend_context]
plugin_custom_ops=All
provider=ge

[ge_session_options]
ge.externalWeight=1
ge.exec.atomicCleanPolicy=1
ge.event=notify
ge.exec.staticMemoryPolicy=2
ge.exec.precision_mode=must_keep_origin_dtype
""",
    "atlas_800t_a2": """
[ascend_context]
plugin_custom_ops=All
provider=ge

[ge_session_options]
ge.externalWeight=1
ge.exec.formatMode=1
ge.exec.atomicCleanPolicy=1
ge.event=notify
ge.exec.staticMemoryPolicy=2
ge.exec.precision_mode=must_keep_origin_dtype
""",
}


def parsed(text: str) -> dict[str, dict[str, str]]:
    """As Python's own parser reads an ini file."""
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    return {name: dict(parser.items(name)) for name in parser.sections()}


def given(*args: str) -> tuple[str, ...]:
    return ("backend=mslite", "model=tiny_llama", "predict_data=x", *args)


def session(config: RunConfig) -> Any:
    ge = ge_config(config.infer)
    assert ge is not None
    return ge.sections["ge_session_options"]


@pytest.mark.parametrize("device", RECOMMENDED)
def test_the_groups_have_the_recommended_options(device: str, resolve: Resolve) -> None:
    config = resolve(*given(f"ge={device}"))
    ge = ge_config(config.infer)
    assert ge is not None and ge.files == ()
    assert parsed(render(ge.sections)) == parsed(RECOMMENDED[device])
    # The snapshot that a rank reads says the same.
    assert ge_config(run_modes.from_dict(config.to_dict()).infer) == ge


def test_a_run_keeps_its_options_in_its_folder(tmp_path: Path, resolve: Resolve) -> None:
    """Not those that the processor's come before, nor a user's file, which is read as it is."""
    infer = resolve(*given("ge=atlas_800")).infer
    assert ge_config(in_folder(infer, tmp_path)) == GeConfig(files=(tmp_path / "config.ini",))
    assert parsed((tmp_path / "config.ini").read_text()) == parsed(RECOMMENDED["atlas_800"])
    (tmp_path / "config.ini").unlink()
    (tmp_path / "own.ini").write_text("[ascend_context]\n")
    for words in (("ge=none",), (), (f"infer.ge_config_path={tmp_path / 'own.ini'}",)):
        infer = resolve(*given(*words)).infer
        assert in_folder(infer, tmp_path) is infer
    assert not (tmp_path / "config.ini").exists()


@pytest.mark.parametrize(("group", "preset"), [("auto", "auto"), ("none", None)])
def test_no_group_but_a_device_sets_any(resolve: Resolve, group: str, preset: str | None) -> None:
    config = resolve(*given(f"ge={group}"))
    assert (config.infer.ge_preset, config.infer.ge_options) == (preset, None)
    assert ge_config(config.infer) is None
    assert resolve(*given()).infer.ge_preset == "auto"


def test_defaults_of_lite_are_noted(tmp_path: Path) -> None:
    precision, weights = GeConfig().unset()
    assert "force_fp16" in precision and "norms, and the mask of attention" in precision
    assert weights.startswith("without ge.externalWeight the two graphs")
    assert GeConfig(sections=parsed(RECOMMENDED["atlas_800"])).unset() == []
    files = tmp_path / "a.ini", tmp_path / "b.ini"
    files[0].write_text("[ge_global_options]\nge.exec.precision_mode=allow_fp32_to_fp16\n")
    files[1].write_text("[ge_session_options]\nge.event=notify\n")
    assert GeConfig(files=files).unset() == [weights]


def test_any_option_can_be_set_added_and_left_out(resolve: Resolve) -> None:
    options = session(
        resolve(
            *given("ge=atlas_800t_a2"),
            f"{SESSION}.exec.precision_mode=force_fp16",
            f"{SESSION}.exec.formatMode=null",
            f"{SESSION}.opSelectImplmode=high_precision",
            f"++{SESSION}.event=a=b, [c]",
            f"--{SESSION}.externalWeight",
            "0",
        )
    )
    assert options == {
        "ge.externalWeight": "0",
        "ge.exec.atomicCleanPolicy": "1",
        "ge.exec.staticMemoryPolicy": "2",
        "ge.exec.precision_mode": "force_fp16",
        "ge.event": "a=b, [c]",
        "ge.opSelectImplmode": "high_precision",
    }


def test_a_section_can_be_added_to_a_group_and_to_none(resolve: Resolve) -> None:
    shape = "ids:1,2;valid:1"
    for group in ("atlas_800", "none"):
        setting = f"infer.ge_options.ge_graph_options.ge.inputShape={shape}"
        ge = ge_config(resolve(*given(f"ge={group}", setting)).infer)
        assert ge is not None
        assert ge.sections["ge_graph_options"] == {"ge.inputShape": shape}


def test_options_of_a_file(resolve: Resolve, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "infer:\n  ge_options:\n    ge_session_options:\n      ge: {a: 1, b: 2.5, c: true, d: x}\n"
    )
    options = session(resolve(*given("--config", str(file), f"{SESSION}.b=3")))
    assert options == {"ge.a": "1", "ge.b": "3", "ge.c": "true", "ge.d": "x"}


@each(
    ("setting", "expected"),
    [
        (f"{SESSION}.event.x=1", f"{SESSION}.event is 'notify', not a section"),
        (f"{SESSION}.exec=1", f"{SESSION}.exec: a section; its keys are set one by one"),
        (f"{SESSION}..x=1", "expected names of letters"),
        ("infer.ge_options.ge_sesion_options.ge.x=1", "did you mean ge_session_options?"),
        ("infer.ge_options.ascend_context=1", "infer.ge_options.ascend_context: a section"),
        ("infer.ge_options.ge_graph_options=1", "got '1', expected a section of options"),
        ("infer.ge_options=1", "infer.ge_options: got 1, expected a section or null"),
        ("infer.ge_options={ascend_context: {a: [1]}}", "ascend_context.a: got [1], expected a s"),
        ("infer.ge_options={ascend_context: {a.b: 1}}", "got the name 'a.b', expected letters"),
        (f"{SESSION}.x=a\nb", "x: got 'a\\nb', expected one line of text"),
        (f"+{SESSION}.x=1", "leave out the +"),
        (f"~{SESSION}.exec.formatMode", "formatMode=null leaves it open"),
    ],
)
def test_settings_that_cannot_be(setting: str, expected: str, faults: Faults) -> None:
    assert expected in faults(*given("ge=atlas_800", setting))


def test_a_yaml_that_contains_itself(faults: Faults, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("infer:\n  ge_options: &a\n    ascend_context: *a\n")
    assert "a value holds itself" in faults(*given("--config", str(file)))


def test_an_own_file_is_used_unchanged(resolve: Resolve, tmp_path: Path) -> None:
    paths = [tmp_path / "prefill.ini", tmp_path / "inc.ini"]
    for path in paths:
        path.write_text(RECOMMENDED["atlas_800"])
    one = ge_config(resolve(*given(f"infer.ge_config_path={paths[0]}")).infer)
    two = ge_config(resolve(*given(f"infer.ge_config_path=[{paths[0]},{paths[1]}]")).infer)
    assert one is not None and (one.files, one.sections) == ((paths[0],), {})
    assert two is not None and two.files == tuple(paths)


def test_files_that_cannot_be(faults: Faults, tmp_path: Path) -> None:
    good, absent = tmp_path / "good.ini", tmp_path / "absent.ini"
    good.write_text("[ascend_context]\nprovider=ge\n")
    key = "infer.ge_config_path"
    errors = faults(*given(f"{key}=[{good},{absent}]"))
    assert errors == f"{key}: {absent}: No such file or directory"
    assert "got 3 files, expected one, or two" in faults(*given(f"{key}=[{good},{good},{good}]"))
    assert "ge=none" in faults(*given("ge=atlas_800", f"{key}={good}"))
    assert "Is a directory" in faults(*given(f"{key}={tmp_path}"))
    assert "null byte" in faults(*given(f"{key}=a\0b"))


def test_ge_options_have_no_effect_online(faults: Faults, tmp_path: Path) -> None:
    good = tmp_path / "good.ini"
    good.write_text("[ascend_context]\n")
    online = ("model=tiny_llama", "predict_data=x", "backend=ms")
    assert "ge has an effect only with backend=mslite" in faults(*online, "ge=atlas_800")
    errors = faults(*online, f"infer.ge_config_path={good}")
    assert "infer.ge_config_path has an effect only with backend=mslite" in errors


def test_only_lite_on_ascend_uses_them() -> None:
    assert compiles_with_ge("lite", "Ascend")
    assert not any(compiles_with_ge(*of) for of in (("lite", "CPU"), ("graph-cell", "Ascend")))


def test_a_yaml_for_both_kinds_of_a_run_says_nothing_of_ge_online(
    resolve: Resolve, notes: Callable[..., list[str]], tmp_path: Path
) -> None:
    """As the documents' yaml, which has a section infer and a model to predict with."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "trainer: {model_name: tiny_bloom}\n"
        "model: {model_config: {is_sample_acceleration: True}, arch: {type: BloomLMHeadModel}}\n"
        "infer: {prefill_model_path: a.mindir, increment_model_path: b.mindir,"
        " infer_seq_length: 64, ge_config_path: missing.ini}\n"
    )
    given = ("--config", str(file), "predict_data=x")
    config = resolve(*given)
    assert (config.infer.prefill_model_path, config.infer.ge_config_path) == ("", "")
    assert not config.model.model_config.is_sample_acceleration
    (note,) = notes(*given)
    assert "prefill_model_path" in note and "is_sample_acceleration" in note


def test_unknown_sections_of_a_file_are_a_note(
    notes: Callable[..., list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "own.ini"
    file.write_text("[ascend_context]\nprovider=ge\n[ge_sessions]\na=1\n[more]\n")
    note = f"{file}: MindSpore Lite has no section [ge_sessions], [more], and ignores what is in it"
    assert notes(*given(f"infer.ge_config_path={file}")) == [note]
    assert unknown_sections(read_ini(file)) == ["ge_sessions", "more"]
    assert unknown_sections(SECTIONS) == []


def test_lines_before_the_first_section_are_ignored_with_a_note(
    notes: Callable[..., list[str]], tmp_path: Path
) -> None:
    """context.cfg of MindFormers' documentation of BLOOM, letter by letter."""
    file = tmp_path / "context.cfg"
    text = "provider=ge\n\n[ge_session_options]\nge.externalWeight=1\nge.exec.formatMode=1\n"
    file.write_text(text)
    session = {"ge.externalWeight": "1", "ge.exec.formatMode": "1"}
    assert read_ini(file) == {"ge_session_options": session}
    (note,) = notes(*given(f"infer.ge_config_path={file}"))
    assert note.startswith(f"{file}: provider=ge before the first [section], where MindSpore Lite")
    file.write_text("# none\n" + text.partition("\n")[0])
    assert read_ini(file) == {}


def test_lite_reads_the_same_sections(tmp_path: Path) -> None:
    file = tmp_path / "own.ini"
    file.write_text(
        "# a comment\n[ascend_context]\n  provider = ge\n  Provider=GE\nx=a=b;c # d\ny=\n"
        "[DEFAULT]\nz=1\n"
    )
    assert read_ini(file) == {
        "ascend_context": {"provider": "ge", "Provider": "GE", "x": "a=b;c # d", "y": ""},
        "DEFAULT": {"z": "1"},
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"# x\nprovider\n[a]\n", "line 2: got 'provider', expected name=value"),
        (b"x=1\n[a]\nno value\n", "line 3: got 'no value', expected name=value"),
        (b"[a]\nx=1\nx=2\n", "line 3: x is given twice in [a]"),
        (b"[a]\n[b]\n[a]\n", "line 3: the section [a] is given twice"),
        (b"[a]\nno value\n", "line 2: got 'no value', expected name=value"),
        (b"[a\nx=1\n", "line 1: got '[a', expected [section]"),
        (b"[a]\nx=\xff\n", "not a text in UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), f"more than {MAX_FILE_BYTES} bytes"),
    ],
    ids=["before", "lines", "option", "section", "value", "bracket", "bytes", "size"],
)
def test_a_broken_file(content: bytes, expected: str, tmp_path: Path, faults: Faults) -> None:
    file = tmp_path / "broken.ini"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_ini(file)
    assert expected in faults(*given(f"infer.ge_config_path={file}"))
