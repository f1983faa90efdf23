"""A fixture for the viewer's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the time limits of searches, which a busy machine may exceed."""
    monkeypatch.setattr("forge_env.view.search.SEARCH_S", 1e9)
    monkeypatch.setattr("forge_env.view.search.WAIT_S", 1e9)
