"""LoRA adapters: reading, writing, validation against a model, sharding, merging."""
