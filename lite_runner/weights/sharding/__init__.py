"""Checkpoints sharded for several ranks: strategies, shards, merging and resharding."""
