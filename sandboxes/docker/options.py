"""The flags a sandbox container is created with: everything off that a program does not need."""

from __future__ import annotations

import os
from typing import Any

from forge_env.sandbox import SandboxSpec
from forge_env.sandbox.protocol import PROXY_PORT
from sandboxes.engine import CPU_PERIOD_US, PIDS, RUNNER_MB, SCRATCH_MB
from sandboxes.images.cache import RUNNER_PACKAGE
from sandboxes.images.packages import has_pytest
from sandboxes.runner.config import RunnerConfig

SOCKET_FOLDER = "/run/forge_env"
SOCKET_NAME = "s"
INODES_PER_MB = 64
MOST_FILES = 4096


def tmpfs(size_mb: int, uid: int | None, mode: str, *, programs: bool = False, podman: bool = False) -> str:
    """Mount options of one writable folder; `programs`: that may hold some."""
    options = f"rw,nosuid,nodev,{'exec,' if programs else ''}size={size_mb}m,mode={mode}"
    if podman:  # it knows neither inodes nor owners
        return options
    owner = f",uid={uid},gid={uid}" if uid is not None else ""
    return f"{options},nr_inodes={size_mb * INODES_PER_MB}{owner}"


def container_options(
    image: str,
    spec: SandboxSpec,
    *,
    owner: str,
    uid: int,
    socket_folder: str | None,
    cpus: float,
    runtime: str | None,
    seccomp_profile: str | None,
    podman: bool = False,
) -> dict[str, Any]:
    """The body of Docker's `POST /containers/create`.

    Root inside exists for the runner alone, with only the right to become someone else; programs run as `uid`
    (and `uid + 1` to judge them), a range that no other container has, since the kernel counts processes per user
    across containers. Without a `socket_folder` the runner's channel is its standard input and output, to be attached
    to: it ends with whoever attaches first.
    """
    connect = f"{SOCKET_FOLDER}/{SOCKET_NAME}" if socket_folder else ""
    runner = RunnerConfig(isolation="uid", connect=connect, uid=uid, chown=podman)
    runner.proxy_port = PROXY_PORT if spec.proxied else 0
    runner.pytest, runner.preload, runner.writable = has_pytest(spec), spec.preload, spec.writable
    security = ["no-new-privileges"] + ([f"seccomp={seccomp_profile}"] if seccomp_profile else [])
    memory = (spec.memory_mb + RUNNER_MB) << 20
    ulimits = [{"Name": "core", "Soft": 0, "Hard": 0}]
    if podman:  # what it would set by itself may be more than its service has
        ulimits += [{"Name": name, "Soft": MOST_FILES, "Hard": MOST_FILES} for name in ("nofile", "nproc")]
    return {
        "Image": image,
        "Cmd": ["python3", "-s", "-m", RUNNER_PACKAGE, runner.dumps()],
        "Entrypoint": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": ["PYTHONHASHSEED=0", "LANG=C.UTF-8"],  # PYTHONPATH is the image's, the runner's folder first
        "Labels": {"forge_env": owner},
        "NetworkDisabled": not spec.network,
        **({} if socket_folder else {"OpenStdin": True, "StdinOnce": True}),
        "HostConfig": {
            "NetworkMode": "bridge" if spec.network else "none",
            "ReadonlyRootfs": True,
            "Tmpfs": {
                "/work": tmpfs(spec.disk_mb, uid, "0700", podman=podman),
                "/work-judge": tmpfs(spec.disk_mb, uid + 1, "0700", podman=podman),
                "/tmp": tmpfs(SCRATCH_MB, None, "1777", podman=podman),
                **{path: tmpfs(spec.disk_mb, uid, "0755", programs=True, podman=podman) for path in spec.writable},
            },
            "ShmSize": SCRATCH_MB << 20,
            "CapDrop": ["ALL"],
            "CapAdd": ["SETUID", "SETGID", *(["CHOWN"] if podman else [])],  # given up before the first program
            "SecurityOpt": security,
            "IpcMode": "private",
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": PIDS,
            # A closed connection would keep its port busy for the next user.
            "Sysctls": {"net.ipv4.tcp_max_tw_buckets": "0"},
            "CpuPeriod": CPU_PERIOD_US,
            "CpuQuota": int(cpus * CPU_PERIOD_US),
            "Ulimits": ulimits,
            "Mounts": [{"Type": "bind", "Source": socket_folder, "Target": SOCKET_FOLDER, "ReadOnly": True}]
            if socket_folder
            else [],
            "LogConfig": {"Type": "none"},
            "AutoRemove": True,
            **({"Runtime": runtime} if runtime else {}),
        },
    }


def random_uid(*, remapped: bool) -> int:
    """The first of sixteen user ids that no account and no other container is likely to have."""
    number = int.from_bytes(os.urandom(3), "big")
    return 20_000 + number % 2_500 * 16 if remapped else 0x50000000 + number * 16
