"""Checkpoints cut for several ranks: strategies, shards, merging and resharding."""
