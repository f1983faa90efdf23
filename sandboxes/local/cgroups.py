"""Control groups for embedded sandboxes, if this process may create them (usually as root).

Each sandbox gets one group per hierarchy, below this process's own groups, so that our limits apply to sandboxes too.
Both versions of the interface are supported. Without groups, only rlimits and a sum over processes limit a sandbox.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sandboxes import owner
from sandboxes.pool import CPU_PERIOD_US, PIDS, RUNNER_MB

PREFIX = "forge-env-"
_CONTROLLERS = ("memory", "pids", "cpu")


_left_over: set[Path] = set()
"""Groups of this process's former sandboxes, not removed yet: a killed launcher ends before the processes below it."""


@dataclass(frozen=True)
class Groups:
    """The control groups of one sandbox. A process joins by writing itself into each folder's `cgroup.procs`."""

    folders: tuple[Path, ...]
    memory: Path
    """The group that counts out-of-memory kills."""
    unified: bool

    def remove(self) -> None:
        """Remove the groups. Those that still have processes are retried by the next call, for whichever sandbox."""
        _left_over.update(self.folders)
        for folder in list(_left_over):
            if _removed(folder):
                _left_over.discard(folder)


def create(memory_mb: int, cpus: float) -> Groups | None:
    """Create groups with limits. Returns None if this process may not."""
    name = f"{PREFIX}{owner.this_process()}-{os.urandom(4).hex()}"
    parents = _own_folders()
    unified = "" in parents
    made: list[Path] = []
    try:
        if unified:
            _delegate(parents[""])
        for parent in dict.fromkeys(parents.values()):
            folder = parent / name
            folder.mkdir()
            made.append(folder)
        for controller, file, value in _settings(unified, memory_mb, cpus):
            (parents[controller] / name / file).write_text(value)
    except (OSError, KeyError):
        for folder in made:
            _removed(folder)
        return None
    return Groups(tuple(made), parents["" if unified else "memory"] / name, unified)


def reap() -> int:
    """Remove the groups of owners that are certainly dead. Returns the number of sandboxes they belonged to."""
    names = set()
    for parent in _own_folders().values():
        for folder in parent.glob(f"{PREFIX}*"):
            if owner.is_dead(folder.name.removeprefix(PREFIX).rpartition("-")[0]) and _removed(folder):
                names.add(folder.name)
    return len(names)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # busy
        return False
    return True


def _settings(unified: bool, memory_mb: int, cpus: float) -> list[tuple[str, str, str]]:
    """Controller, file and content of each limit."""
    memory, quota = str((memory_mb + RUNNER_MB) << 20), int(cpus * CPU_PERIOD_US)
    if unified:
        return [
            ("", "memory.max", memory),
            ("", "memory.swap.max", "0"),
            ("", "pids.max", str(PIDS)),
            ("", "cpu.max", f"{quota} {CPU_PERIOD_US}"),
        ]
    return [
        ("memory", "memory.limit_in_bytes", memory),
        ("memory", "memory.swappiness", "0"),
        ("pids", "pids.max", str(PIDS)),
        ("cpu", "cpu.cfs_period_us", str(CPU_PERIOD_US)),
        ("cpu", "cpu.cfs_quota_us", str(quota)),
    ]


def _delegate(folder: Path) -> None:
    """Enable the controllers for groups below `folder`. The kernel refuses this for non-root groups with processes."""
    missing = set(_CONTROLLERS) - set((folder / "cgroup.subtree_control").read_text().split())
    if missing:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _unescaped(path: str) -> str:
    """Decode a path of the kernel's mount list, where spaces, tabs, newlines and backslashes are octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _own_folders() -> dict[str, Path]:
    """This process's group folder for each controller; with version 2 only, a single one under the empty name."""
    mounts: dict[str, tuple[str, Path]] = {}
    for line in filter(None, Path("/proc/self/mountinfo").read_text(errors="surrogateescape").split("\n")):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ")[:3]
        root, mount_point = map(_unescaped, left.split(" ")[3:5])
        if kind == "cgroup":
            mounts.update(dict.fromkeys(set(options.split(",")) & set(_CONTROLLERS), (root, Path(mount_point))))
        elif kind == "cgroup2":
            mounts[""] = (root, Path(mount_point))
    if set(_CONTROLLERS) <= set(mounts):
        mounts.pop("", None)
    else:
        mounts = {name: mount for name, mount in mounts.items() if not name}
    folders = {}
    for line in filter(None, Path("/proc/self/cgroup").read_text(errors="surrogateescape").split("\n")):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in mounts:
                top, mounted = mounts[controller]
                inside = path.removeprefix(top) if top != "/" else path
                folders[controller] = mounted / inside.lstrip("/")
    return folders
