"""Benchmarks of a model: a grid of settings, a process a cell, figures with their spread."""
