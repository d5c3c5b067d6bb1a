"""Optimizers over flat shards."""
