"""The real MindFormers 1.0.2 on mindspore 2.0.0, in a worker process with a Python 3.9."""
