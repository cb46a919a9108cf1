"""Ids in, ids out, for several prompts padded to one length: batch_generate.py [MODEL]."""

from __future__ import annotations

import sys

from lite_runner import AutoConfig, AutoModel, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2_135m"
texts = ["中国的首都是", "你好", "请介绍一下华为", "I love Beijing, because"]

config = AutoConfig.from_pretrained(name)
config.batch_size = len(texts)
config.use_past = True
config.seq_length = 256

model = AutoModel.from_config(config)
tokenizer = AutoTokenizer.from_pretrained(name)
input_ids = tokenizer(texts, max_length=config.seq_length, padding="max_length")["input_ids"]
output = model.generate(input_ids, max_length=64, do_sample=False)
print(tokenizer.decode(output, skip_special_tokens=True))
