"""What runs an exported graph: MindSpore Lite in process or in a worker, or MindSpore itself."""
