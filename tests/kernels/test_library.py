"""The library of the operators, where the set-up made none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner import kernels
from lite_runner.errors import EnvironmentFault


def test_what_was_not_built_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "operators.so")
    with pytest.raises(EnvironmentFault, match=r"were not built: no operators\.so") as caught:
        kernels.library.__wrapped__()  # past what is kept of the true one
    assert "C++ compiler" in caught.value.hint
