"""The machine and this process: environment, devices, memory, signals. Independent of models."""
