"""Weights as integers: quantizing, rounding, and checkpoints that hold them."""
