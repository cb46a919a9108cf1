"""LoRA adapters: reading, writing, fitting to a model, cutting for ranks, merging."""
