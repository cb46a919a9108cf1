"""Evaluation over tasks: their files, prompts, scores, and running them."""
