"""Private names of other packages: an upgrade fails here before it gives wrong results."""

from __future__ import annotations

import pytest

pytest.importorskip("torchstore")

import torchstore.api

from trainers.compat import torchstore as compat


def test_the_store_spawns_the_controller_with_asynchronous_endpoints() -> None:
    assert torchstore.api.Controller is compat.AsyncController
    for name in compat.SYNCHRONOUS:
        assert getattr(compat.AsyncController, name) is not getattr(compat.Controller, name)
