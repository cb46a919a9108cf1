"""An exported model by its files: offline_by_paths.py MODEL GRAPH.mindir [INCREMENT.mindir]."""

from __future__ import annotations

import sys

from lite_runner import AutoTokenizer, pipeline

name, *paths = sys.argv[1:]
lite_pipeline = pipeline(
    task="text_generation",
    model=tuple(paths),
    tokenizer=AutoTokenizer.from_pretrained(name),
    backend="mslite",
    model_name=name,
    infer_seq_length=256,
)
print(lite_pipeline("I love Beijing, because", max_length=64, add_special_tokens=False))
