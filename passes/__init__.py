"""The graph passes, one per file. ``pipeline.py`` is the list of what happens, in order."""
