"""The real mindformers 1.0.2 on mindspore 2.0.0, ready to import, on CPU and without chatter.

Import this before mindformers. tools/export.py imports models that its wheel does not hold; none of
them is used by bloom, gpt2 or llama on CPU.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_WORKER = Path(__file__).resolve().parent.parent / "lite_runner/backends/mindformers/worker.py"
_spec = spec_from_file_location("mindformers_worker", _WORKER)
assert _spec is not None and _spec.loader is not None
_worker = module_from_spec(_spec)
_spec.loader.exec_module(_worker)
_worker.import_mindspore("CPU")

for name in ("research", "research.baichuan2"):
    sys.modules[name] = ModuleType(name)
for name, model in (
    ("research.baichuan2.baichuan2_7b", "Baichuan7BV2ForCausalLM"),
    ("research.baichuan2.baichuan2_13b", "Baichuan13BV2ForCausalLM"),
):
    sys.modules[name] = ModuleType(name)
    setattr(sys.modules[name], model, None)
