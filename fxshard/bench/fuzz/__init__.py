"""A standing adversary: random models and training loops, sharded and plain, compared (``python -m fxshard.fuzz``)."""
