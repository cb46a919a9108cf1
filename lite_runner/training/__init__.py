"""Fine-tuning on the CPU, in NumPy."""
