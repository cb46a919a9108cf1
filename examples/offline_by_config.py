"""An exported model by an InferConfig: offline_by_config.py MODEL GRAPH.mindir."""

from __future__ import annotations

import sys

from lite_runner import AutoTokenizer, InferConfig, InferTask

name, path = sys.argv[1:]
lite_config = InferConfig(
    prefill_model_path=path, model_type="mindir", model_name=name, infer_seq_length=256
)
tokenizer = AutoTokenizer.from_pretrained(name)
lite_pipeline = InferTask.get_infer_task("text_generation", lite_config, tokenizer=tokenizer)
print(lite_pipeline("I love Beijing, because", max_length=64, add_special_tokens=False))
