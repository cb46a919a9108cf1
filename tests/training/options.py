"""The defaults of conf/run_mode/finetune.yaml."""

from __future__ import annotations

from typing import Any

import yaml

from tests.paths import ROOT

OPTIONS: dict[str, Any] = yaml.safe_load(
    (ROOT / "conf/run_mode/finetune.yaml").read_text(encoding="utf-8")
)["finetune"]
