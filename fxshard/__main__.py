"""``python -m fxshard``: the ``fxshard`` command from a checkout that is not installed."""

from fxshard.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
