"""The flags a sandbox container is created with: everything off that a program does not need."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from forge_env.sandbox import SandboxSpec
from sandboxes.images.runner.config import RunnerConfig

SOCKET_FOLDER = "/run/forge_env"
SOCKET_NAME = "s"
RUNNER_MB = 64
"""Memory of the runner itself, on top of what the spec grants the program."""
SCRATCH_MB = 32
INODES_PER_MB = 64
PIDS = 1024
"""Twice `MAX_PROCESSES`, for the two users of a container, and the runner's own."""
CPU_PERIOD_US = 100_000


def tmpfs(size_mb: int, uid: int | None, mode: str) -> str:
    """Mount options of one writable folder."""
    owner = f",uid={uid},gid={uid}" if uid is not None else ""
    return f"rw,nosuid,nodev,size={size_mb}m,nr_inodes={size_mb * INODES_PER_MB},mode={mode}{owner}"


@dataclass(frozen=True)
class Daemon:
    """What the daemon can do."""

    seccomp: bool
    remapped: bool
    """User ids of containers are mapped to others of the host, and few (userns-remap, rootless)."""

    @classmethod
    def of(cls, info: dict[str, Any]) -> Daemon:
        """From `docker info`."""
        options = info.get("SecurityOptions") or []
        remapped = any(option.startswith(("name=userns", "name=rootless")) for option in options)
        return cls(any(option.startswith("name=seccomp") for option in options), remapped)


def container_options(
    image: str,
    spec: SandboxSpec,
    *,
    owner: str,
    uid: int,
    socket_folder: str,
    cpus: float,
    runtime: str | None,
    seccomp_profile: str | None,
) -> dict[str, Any]:
    """The body of Docker's `POST /containers/create`.

    Root inside exists for the runner alone, with only the right to become someone else; programs run as `uid`
    (and `uid + 1` to judge them), a range that no other container has, since the kernel counts processes per user
    across containers.
    """
    runner = RunnerConfig(isolation="uid", connect=f"{SOCKET_FOLDER}/{SOCKET_NAME}", uid=uid)
    security = ["no-new-privileges"] + ([f"seccomp={seccomp_profile}"] if seccomp_profile else [])
    memory = (spec.memory_mb + RUNNER_MB) << 20
    return {
        "Image": image,
        "Cmd": ["python3", "-s", "-m", "runner", runner.dumps()],
        "Entrypoint": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": ["PYTHONPATH=/opt/forge_env", "PYTHONHASHSEED=0", "LANG=C.UTF-8"],
        "Labels": {"forge_env": owner},
        "NetworkDisabled": not spec.network,
        "HostConfig": {
            "NetworkMode": "bridge" if spec.network else "none",
            "ReadonlyRootfs": True,
            "Tmpfs": {
                "/work": tmpfs(spec.disk_mb, uid, "0700"),
                "/work-judge": tmpfs(spec.disk_mb, uid + 1, "0700"),
                "/tmp": tmpfs(SCRATCH_MB, None, "1777"),
            },
            "ShmSize": SCRATCH_MB << 20,
            "CapDrop": ["ALL"],
            "CapAdd": ["SETUID", "SETGID"],
            "SecurityOpt": security,
            "IpcMode": "private",
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": PIDS,
            # A closed connection would keep its port busy for the next user.
            "Sysctls": {"net.ipv4.tcp_max_tw_buckets": "0"},
            "CpuPeriod": CPU_PERIOD_US,
            "CpuQuota": int(cpus * CPU_PERIOD_US),
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            "Mounts": [{"Type": "bind", "Source": socket_folder, "Target": SOCKET_FOLDER, "ReadOnly": True}],
            "LogConfig": {"Type": "none"},
            "AutoRemove": True,
            **({"Runtime": runtime} if runtime else {}),
        },
    }


def random_uid(daemon: Daemon) -> int:
    """The first of sixteen user ids that no account and no other container is likely to have."""
    number = int.from_bytes(os.urandom(3), "big")
    return 20_000 + number % 2_500 * 16 if daemon.remapped else 0x50000000 + number * 16
