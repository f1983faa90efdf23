"""Searches that a busy machine doesn't cut short."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search is not cut short because the machine is busy."""
    monkeypatch.setattr("forge_env.view.search.SEARCH_S", 1e9)
    monkeypatch.setattr("forge_env.view.search.WAIT_S", 1e9)
