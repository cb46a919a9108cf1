"""What this machine can run: each check says what it found and the command that mends it."""
