"""Parameters that the suite leaves out unless asked for with ``-m ''``: `make test-all` does."""

from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """One more value of a parameter, in between values that are always tried."""
    return pytest.param(*values, marks=pytest.mark.thorough)
