"""What `trainers.compat.monarch` assumes about Monarch."""

from __future__ import annotations

import pytest

from tests.trainers.compat.sources import parameters, source
from trainers.compat import monarch as compat

if compat.PACKAGE.installed is None:
    pytest.skip("Monarch is not installed", allow_module_level=True)


def test_the_root_actor_calls_the_hook_that_is_replaced() -> None:
    assert parameters("monarch._src.actor.supervision:unhandled_fault_hook") == ["failure"]
    text = source("monarch._src.actor.actor_mesh:RootClientActor.__supervise__")
    assert "from monarch.actor import unhandled_fault_hook" in text
    assert "unhandled_fault_hook(failure)" in text
