"""Options that sandbox containers are created with; every feature that programs do not need is disabled."""

from __future__ import annotations

import os
from typing import Any

from forge_env.sandbox import SandboxSpec
from forge_env.sandbox.spec import PROXY_PORT
from sandboxes.images.cache import RUNNER_PACKAGE
from sandboxes.images.packages import has_pytest
from sandboxes.pool import CPU_PERIOD_US, PIDS, RUNNER_MB, SCRATCH_MB
from sandboxes.runner.config import RunnerConfig

SOCKET_FOLDER = "/run/forge_env"
SOCKET_NAME = "s"
INODES_PER_MB = 64
MOST_FILES = 4096


def tmpfs(size_mb: int, uid: int | None, mode: str, *, programs: bool = False, podman: bool = False) -> str:
    """Mount options of one writable folder; with `programs`, files in it may be executed."""
    options = f"rw,nosuid,nodev,{'exec,' if programs else ''}size={size_mb}m,mode={mode}"
    if podman:  # Podman supports neither inode limits nor owners
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

    Root inside is used by the runner only. Programs run as `uid`, their judge as `uid + 1`, ids of no other container:
    the kernel counts processes per user. Without a `socket_folder`, the runner's channel is its standard streams.
    """
    connect = f"{SOCKET_FOLDER}/{SOCKET_NAME}" if socket_folder else ""
    runner = RunnerConfig(isolation="uid", connect=connect, uid=uid, chown=podman)
    runner.proxy_port = PROXY_PORT if spec.proxied else 0
    runner.pytest, runner.preload, runner.writable = has_pytest(spec), spec.preload, spec.writable
    security = ["no-new-privileges"] + ([f"seccomp={seccomp_profile}"] if seccomp_profile else [])
    memory = (spec.memory_mb + RUNNER_MB) << 20
    ulimits = [{"Name": "core", "Soft": 0, "Hard": 0}]
    if podman:  # Podman's defaults may exceed its service's own limits
        ulimits += [{"Name": name, "Soft": MOST_FILES, "Hard": MOST_FILES} for name in ("nofile", "nproc")]
    return {
        "Image": image,
        "Cmd": ["python3", "-s", "-m", RUNNER_PACKAGE, runner.dumps()],
        "Entrypoint": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": ["PYTHONHASHSEED=0", "LANG=C.UTF-8"],  # the image sets PYTHONPATH, with the runner's folder first
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
            "CapAdd": ["SETUID", "SETGID", *(["CHOWN"] if podman else [])],  # dropped before the first program runs
            "SecurityOpt": security,
            "IpcMode": "private",
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": PIDS,
            # Without this, a closed connection would keep its port busy for the sandbox's next user.
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
    """The first of sixteen consecutive user ids, unlikely to belong to an account or another container."""
    number = int.from_bytes(os.urandom(3), "big")
    return 20_000 + number % 2_500 * 16 if remapped else 0x50000000 + number * 16
