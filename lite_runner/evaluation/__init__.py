"""Perplexity of a model on a text: the keys of run_mode=eval, its plan, the scoring."""
