"""Exporting a model: the spec, output paths, the writer, and the proof that it computes alike."""
