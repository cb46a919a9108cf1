"""Converting checkpoints and LoRA adapters between formats."""
