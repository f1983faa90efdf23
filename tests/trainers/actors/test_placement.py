"""Every actor gets GPUs of its own."""

from __future__ import annotations

import os

import pytest

from forge_env import machine
from forge_env.errors import ForgeError
from trainers.actors.placement import Placement


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"{os.getpid()}"  # other tests run beside these
    found = [machine.GPU(str(number), f"GPU-{own}-{number}", "H200", 139.0) for number in range(3)]
    monkeypatch.setattr(machine, "gpus", lambda: list(found))


def taken(placement: Placement, count: int) -> list[int]:
    given = placement.take(count, "generator")["CUDA_VISIBLE_DEVICES"]
    return [int(name.rpartition("-")[2]) for name in given.split(",")]


def test_gpus_are_given_once() -> None:
    placement = Placement()
    assert [taken(placement, count) for count in (1, 2)] == [[0], [1, 2]]
    with pytest.raises(ForgeError, match="1 GPUs are needed, 0 are free"):
        placement.take(1, "trainer")
    placement.close()


def test_roles_may_share_gpus() -> None:
    """Each role has its own of them, and another run gets none."""
    placement, other = Placement(shared=True), Placement()

    def given(count: int, role: str) -> str:
        return placement.take(count, role)["CUDA_VISIBLE_DEVICES"]

    both, first, second = given(2, "trainer"), given(1, "generator"), given(1, "generator")
    assert both == f"{first},{second}"
    assert taken(other, 1) == [2]
    placement.close()
    assert len(machine.unclaimed_gpus()) == 2
    other.close()


def test_two_runs_share_no_gpu() -> None:
    """The second gets what the first has left, until that has ended."""
    first, second = Placement(), Placement()
    assert taken(first, 1) == [0]
    assert taken(second, 2) == [1, 2]
    assert machine.unclaimed_gpus() == []
    first.close()
    assert [gpu.index for gpu in machine.unclaimed_gpus()] == ["0"]
    third = Placement()
    assert taken(third, 1) == [0]
    second.close()
    third.close()


def test_who_wants_none_is_told_nothing() -> None:
    assert Placement().take(0, "trainer") == {}
