"""Control groups for embedded sandboxes, where this process may make them: usually as root.

One group per sandbox and hierarchy, below this process's own, so that whatever bounds us bounds them. Both versions of
the interface are spoken. Where groups can't be made, rlimits and a sum over processes are all there is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sandboxes import owner
from sandboxes.engine import CPU_PERIOD_US, PIDS, RUNNER_MB

PREFIX = "forge-env-"
_CONTROLLERS = ("memory", "pids", "cpu")


_left_over: set[Path] = set()
"""Groups of this process's former sandboxes that are not gone yet: a killed launcher ends before what it held."""


@dataclass(frozen=True)
class Groups:
    """The groups of one sandbox. A process joins by writing itself into each folder's `cgroup.procs`."""

    folders: tuple[Path, ...]
    memory: Path
    """The one that counts kills for want of memory."""
    unified: bool

    def remove(self) -> None:
        """Remove them, once their last process has ended. One that is still busy is tried again with the next."""
        _left_over.update(self.folders)
        for folder in list(_left_over):
            if _removed(folder):
                _left_over.discard(folder)


def create(memory_mb: int, cpus: float) -> Groups | None:
    """New groups with limits, or None where this process may make none."""
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
    """Remove the groups of owners that are certainly dead. Returns how many sandboxes they were of."""
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
    """Let groups below `folder` have the controllers, which the kernel refuses a folder with processes but the root."""
    missing = set(_CONTROLLERS) - set((folder / "cgroup.subtree_control").read_text().split())
    if missing:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _unescaped(path: str) -> str:
    """A path of the kernel's list of mounts, in which spaces, tabs, line feeds and backslashes are octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _own_folders() -> dict[str, Path]:
    """This process's own folder for each controller; with version 2 alone one for all, under the empty name."""
    mounts: dict[str, tuple[str, Path]] = {}
    for line in filter(None, Path("/proc/self/mountinfo").read_text(errors="surrogateescape").split("\n")):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ")[:3]
        root, place = map(_unescaped, left.split(" ")[3:5])
        if kind == "cgroup":
            mounts.update(dict.fromkeys(set(options.split(",")) & set(_CONTROLLERS), (root, Path(place))))
        elif kind == "cgroup2":
            mounts[""] = (root, Path(place))
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
