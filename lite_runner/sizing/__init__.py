"""Resource estimates: parameters, memory, tensor parallelism."""
