"""fxshard inside the tools that people train with. Each module needs its tool installed, and imports it."""
