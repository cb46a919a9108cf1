"""Exporting a model: the spec, the output paths, the writer and its verification."""
