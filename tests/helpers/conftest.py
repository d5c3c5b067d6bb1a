"""A process that has had no crew, whatever tests before have done."""

from __future__ import annotations

from unittest import mock

import pytest

from fxshard.helpers import crew


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Stands for the class of crews, in a process that has had none."""
    monkeypatch.setenv(crew.VARIABLE, "3")
    monkeypatch.setattr(crew, "_hired", [])
    monkeypatch.setattr(crew, "_started", [])
    monkeypatch.setattr(crew, "Crew", mock.Mock(side_effect=lambda count, device: mock.Mock(count=count)))
    return crew.Crew  # type: ignore[return-value]
