"""Export a Llama of given sizes: trainer_export.py [OUTPUT_DIR]. Its weights are random."""

from __future__ import annotations

import sys

from lite_runner import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

output_dir = sys.argv[1] if len(sys.argv) > 1 else "outputs"
args = TrainingArguments(output_dir=output_dir, num_train_epochs=1, batch_size=2)
config = LlamaConfig(num_layers=2, hidden_size=32, num_heads=2, seq_length=512)
task = Trainer(task="text_generation", model=LlamaForCausalLM(config), args=args)
print(task.export())
