"""Layers that repeat: found in a captured graph, traced once, and put back."""
