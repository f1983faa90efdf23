"""What benchmarks stand in for still looks like the real thing, and what they look for is what a run leaves."""

from __future__ import annotations

import inspect
from mmap import mmap
from pathlib import Path
from uuid import uuid4

import pytest

pytest.importorskip("monarch")  # of the training stack

from benchmarks.chaos.runs import left_in_shared_memory, shared_memory
from benchmarks.simulated import SimulatedGenerator
from trainers.generator.generator import Generator


def parameters(cls: type, endpoint: str) -> list[str]:
    method = getattr(cls, endpoint)
    return list(inspect.signature(getattr(method, "_method", method)).parameters)


@pytest.mark.parametrize("endpoint", ["generate", "abort"])
def test_a_simulated_generator_is_asked_as_a_real_one(endpoint: str) -> None:
    assert parameters(SimulatedGenerator, endpoint) == parameters(Generator, endpoint)


def test_shared_memory_of_another_program_is_not_taken_for_ours() -> None:
    """Of one that was there before, mapped, and whose program has ended since."""
    theirs, ours = (Path("/dev/shm", f"forge-env-test-{uuid4().hex}") for _ in range(2))
    theirs.write_bytes(bytes(8))
    try:
        with theirs.open("r+b") as file, mmap(file.fileno(), 8):
            before = shared_memory()
        assert theirs.name not in left_in_shared_memory(before)
        ours.write_bytes(bytes(8))
        assert ours.name in left_in_shared_memory(before)
        with ours.open("r+b") as file, mmap(file.fileno(), 8):
            assert ours.name not in left_in_shared_memory(before)
    finally:
        theirs.unlink()
        ours.unlink(missing_ok=True)
