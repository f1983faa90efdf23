"""Every actor gets GPUs of its own."""

from __future__ import annotations

import pytest

from forge_env import machine
from forge_env.errors import ForgeError
from trainers.actors.placement import Placement


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [machine.GPU(str(number), f"GPU-{number}", "H200", 139.0) for number in range(3)]
    monkeypatch.setattr(machine, "gpus", lambda: found)


def test_gpus_are_given_once() -> None:
    placement = Placement()
    given = [placement.take(count)["CUDA_VISIBLE_DEVICES"] for count in (1, 2)]
    assert given == ["GPU-0", "GPU-1,GPU-2"]
    with pytest.raises(ForgeError, match="1 GPUs are needed and 0 are left"):
        placement.take(1)


def test_who_wants_none_is_told_nothing() -> None:
    assert Placement().take(0) == {}
