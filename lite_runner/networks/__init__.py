"""MindSpore networks built from a model description."""
