"""Completions, perplexities and comparisons of runs; the run folder and printed text."""
