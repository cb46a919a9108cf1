"""Diagnostics of this machine: each check reports a finding and the command that fixes it."""
