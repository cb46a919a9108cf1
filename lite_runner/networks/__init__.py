"""MindSpore's networks from a model's description, and the network of our own operators."""
