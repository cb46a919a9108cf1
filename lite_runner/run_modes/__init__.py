"""What a run can do: one file a run mode, `run(config, folder) -> None`."""
