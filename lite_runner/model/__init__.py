"""The model that a config means: its checkpoint, tokenizer, adapters, or an exported one."""
