"""An exported model by its folder: offline_by_folder.py MODEL FOLDER."""

from __future__ import annotations

import sys

from lite_runner import AutoTokenizer, pipeline

name, folder = sys.argv[1:]
lite_pipeline = pipeline(
    task="text_generation",
    model=folder,
    tokenizer=AutoTokenizer.from_pretrained(name),
    backend="mslite",
    model_name=name,
    infer_seq_length=256,
)
print(lite_pipeline("I love Beijing, because", max_length=64, add_special_tokens=False))
