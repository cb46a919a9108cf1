"""An exported model by its name: offline_by_name.py [MODEL].

It is exported when there is none yet.
"""

from __future__ import annotations

import sys

from lite_runner import AutoTokenizer, pipeline

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2_135m"
lite_pipeline = pipeline(
    task="text_generation",
    model=name,
    tokenizer=AutoTokenizer.from_pretrained(name),
    backend="mslite",
    infer_seq_length=256,
)
print(lite_pipeline("I love Beijing, because", max_length=64, add_special_tokens=False))
