"""Where root filesystems and runners for this machine are kept, each built once and named by its content."""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from sandboxes.images import rootfs

_KINDS = ("rootfs-*", "runner-*", "seccomp-*.json")


def cache_folder() -> Path:
    """Where built root filesystems are kept: $XDG_CACHE_HOME/forge-env."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "forge-env"


def ensure_rootfs() -> Path:
    """The root filesystem for this machine, built once and cached (1 to 5 s the first time)."""
    return _ensure(f"rootfs-{rootfs.fingerprint()}", rootfs.build)


def ensure_runner() -> Path:
    """A folder with the runner package alone, byte-compiled, built once and cached."""
    digest = hashlib.sha256(sys.version.encode())
    for path in runner_files():
        digest.update(path.name.encode() + path.read_bytes())
    return _ensure(f"runner-{digest.hexdigest()[:16]}", _build_runner)


def runner_files() -> list[Path]:
    """The runner's modules."""
    return sorted((Path(__file__).parents[1] / "runner").glob("*.py"))


def _build_runner(folder: Path) -> None:
    (folder / "runner").mkdir()
    for path in runner_files():
        rootfs.copy(str(path), str(folder / "runner" / path.name))
    compileall.compile_dir(str(folder), ddir="/opt/forge_env", quiet=2)


def _ensure(name: str, build_into: Callable[[Path], None]) -> Path:
    """The cached folder `name`, filled by `build_into` when missing; one builder at a time, never half built."""
    cache = cache_folder()
    target = cache / name
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o755)  # sandboxes reach it as other users, without passing through its parents
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            for stale in cache.glob("building-*"):  # the lock is ours: whoever made these is dead
                shutil.rmtree(stale, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
            try:
                build_into(building)
                building.chmod(0o755)
                building.rename(target)
            except BaseException:  # also a Ctrl-C: nothing half-built may be left
                shutil.rmtree(building, ignore_errors=True)
                raise
    return target


def prune(kept: Collection[str]) -> list[str]:
    """Remove whatever was built for other versions and is not among the names `kept`. Returns the paths."""
    cache = cache_folder()
    if not cache.is_dir():
        return []
    current = {ensure_rootfs().name, ensure_runner().name, *kept}
    removed = []
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in [path for kind in _KINDS for path in cache.glob(kind)]:
            if path.name not in current:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed.append(str(path))
    return sorted(removed)
