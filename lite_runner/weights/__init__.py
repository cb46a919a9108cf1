"""Checkpoints: readers of every format, the names in each, and writers that leave no half file."""
