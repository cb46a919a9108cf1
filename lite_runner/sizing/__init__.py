"""What a run takes: parameters, bytes of memory, several ranks."""
