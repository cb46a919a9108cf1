"""The machine and its process: environment, devices, memory, signals. Knows nothing of models."""
