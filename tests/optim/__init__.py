"""Tests of the optimizers' mathematics, in one process."""
