"""The Python API: MindFormers' names over the same parts as the command line.

`from lite_runner import pipeline, AutoModel, ...`; see examples/.
"""
