"""What benchmarks stand in for still looks like the real thing."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("monarch")  # of the training stack

from benchmarks.simulated import SimulatedGenerator
from trainers.generator.generator import Generator


def parameters(cls: type, endpoint: str) -> list[str]:
    method = getattr(cls, endpoint)
    return list(inspect.signature(getattr(method, "_method", method)).parameters)


@pytest.mark.parametrize("endpoint", ["generate", "abort"])
def test_a_simulated_generator_is_asked_as_a_real_one(endpoint: str) -> None:
    assert parameters(SimulatedGenerator, endpoint) == parameters(Generator, endpoint)
