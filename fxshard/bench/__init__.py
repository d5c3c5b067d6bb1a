"""Measurements against peers, in one run. ``python -m fxshard.bench.train --help``"""
