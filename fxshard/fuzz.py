"""``python -m fxshard.fuzz``: see ``fxshard.bench.fuzz``."""

from fxshard.bench.fuzz.__main__ import main

if __name__ == "__main__":
    main()
