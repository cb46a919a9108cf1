"""MindSpore networks built from a model description, and the network of the native kernels."""
