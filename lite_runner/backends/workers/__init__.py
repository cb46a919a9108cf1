"""Worker processes with a Python of their own, for libraries that cannot be in this one."""
