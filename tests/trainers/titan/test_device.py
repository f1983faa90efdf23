"""Memory that a CPU's trainer keeps between steps."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from trainers.titan import device

pytestmark = pytest.mark.stack


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.skipif(not hasattr(device.ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
def test_unused_memory_beyond_a_limit_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [torch.ones(2**14) for _ in range(3_200)]  # 200 MiB in blocks of 64 KiB
    held = blocks[::8]
    del blocks
    before = resident_mb()
    unused = device.unused_bytes()
    assert unused > 150 * 2**20
    device.Device("cpu").trim_memory()
    assert resident_mb() > before - 20  # below the limit nothing is returned
    monkeypatch.setattr(device, "MOST_UNUSED", unused - 50 * 2**20)
    device.Device("cuda").trim_memory()
    assert resident_mb() > before - 20
    device.Device("cpu").trim_memory()
    assert resident_mb() < before - 120
    assert device.unused_bytes() < unused - 120 * 2**20  # so the next step returns nothing
    assert all(float(block.sum()) == 2**14 for block in held)


def test_another_c_library_has_no_unused_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: sys)
    assert device.unused_bytes() == 0
    device.Device("cpu").trim_memory()
