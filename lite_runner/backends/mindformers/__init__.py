"""The real MindFormers, in a worker process with a Python of its own."""
