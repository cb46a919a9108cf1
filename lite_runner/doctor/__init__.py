"""Diagnostics of this machine: each check says what it found and the command that mends it."""
