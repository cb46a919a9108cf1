"""Resolving a run before weights are read: backend, prompts, adapters, memory."""
