"""Random models and training loops, run sharded and plain and compared (``python -m fxshard.fuzz``)."""
