"""Engines run exported graphs: MindSpore Lite, in process or in a worker, or MindSpore itself."""
