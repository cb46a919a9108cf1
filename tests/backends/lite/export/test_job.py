"""The layout of a run or an export, by its model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lite_runner.architectures.spec import Decoder, Norm, Rotary
from lite_runner.backends.lite.export import job
from lite_runner.backends.lite.export.job import spec_of_run
from lite_runner.config.argv import parse
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.mindir.manifest import Layout
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve

NOT_IN_LITE = {
    "angles": "rotary positions differ between its layers",
    "norm": "queries and keys have another norm than RMSNorm",
}


@pytest.fixture(autouse=True)
def every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore Lite counts as set up; nothing is run in it."""
    monkeypatch.setattr(job, "why_unavailable", lambda *_arguments: None)


def layout_of(kind: str, *settings: str) -> Layout:
    words = ["backend=mslite", "predict_data=hi", "model=tiny_llama", *settings]
    config, _ = resolve(parse(words, heads()))
    files = locate(config.source)
    files = replace(files, model=changed(files.model, kind))
    return spec_of_run(config.settings, files, 1, 64).layout


def changed(model: Decoder, kind: str) -> Decoder:
    """A Llama with something else in its last layer."""
    last = model.blocks[-1]
    changes = {
        "nothing": {},
        "window": {"window": 8},
        "angles": {"rotary": Rotary(5.0)},
        "norm": {"qk_norm": Norm("layer", 1e-5)},
    }
    block = replace(last, attention=replace(last.attention, **changes[kind]))
    return replace(model, blocks=(*model.blocks[:-1], block))


@pytest.mark.parametrize("kind", ["nothing", "window"])
def test_lite_has_these(kind: str) -> None:
    assert layout_of(kind) == layout_of(kind, "engine=lite-worker") == "resizable"


@pytest.mark.parametrize("kind", NOT_IN_LITE)
def test_unsupported_models_get_another_layout_or_are_refused(kind: str) -> None:
    assert layout_of(kind) == "static_pair"
    for asked in ("engine=lite-worker", "export.layout=resizable"):
        with pytest.raises(ConfigError, match=NOT_IN_LITE[kind]):
            layout_of(kind, asked)


def test_without_mindspore_lite_it_is_said_why_there_is_a_pair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = EnvironmentFault("MindSpore Lite is not set up", "make lite")
    monkeypatch.setattr(job, "why_unavailable", lambda *_arguments: fault)
    assert layout_of("nothing") == "static_pair"
    assert "engine=auto: graph-cell, since MindSpore Lite is not set up" in capsys.readouterr().err
    assert layout_of("nothing", "export.layout=resizable") == "resizable"
