"""A run resolved once, before a weight is read: backend, prompts, adapters, memory."""
