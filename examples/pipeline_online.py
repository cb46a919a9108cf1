"""Complete three prompts at once: pipeline_online.py [MODEL]."""

from __future__ import annotations

import sys

from lite_runner import AutoModel, AutoTokenizer, build_context, pipeline

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2_135m"
inputs = ["I love Beijing, because", "LLaMA is a", "Huawei is a company that"]

build_context({"context": {"mode": 0}, "parallel": {}, "parallel_config": {}})
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModel.from_pretrained(name, use_past=True)
text_generation = pipeline(task="text_generation", model=model, tokenizer=tokenizer)
for output in text_generation(inputs, max_length=64, do_sample=False):
    print(output)
