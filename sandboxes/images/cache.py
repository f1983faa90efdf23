"""The cache of root filesystems and runners for this machine, each built once and named by its content."""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import io
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from sandboxes.images import rootfs

_KINDS = ("rootfs-*", "runner-*", "packages-*", "seccomp-*.json")


def cache_folder() -> Path:
    """Folder of built root filesystems, runners and package layers: $XDG_CACHE_HOME/forge-env."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "forge-env"


def ensure_rootfs() -> Path:
    """The root filesystem for this machine, built once and cached (1 to 5 s the first time)."""
    return ensure(f"rootfs-{rootfs.fingerprint()}", rootfs.build)


RUNNER_PACKAGE = "_forge_env_runner"
"""Name of `sandboxes.runner` inside a sandbox, chosen not to shadow any module of a program."""


def ensure_runner() -> Path:
    """A folder with only the runner package, byte-compiled, built once and cached."""
    digest = hashlib.sha256(f"{sys.version} {RUNNER_PACKAGE}".encode())
    for path in runner_files():
        digest.update(path.name.encode() + path.read_bytes())
    return ensure(f"runner-{digest.hexdigest()[:16]}", _build_runner)


def runner_files() -> list[Path]:
    """Source files of the runner package."""
    return sorted((Path(__file__).parents[1] / "runner").glob("*.py"))


def runner_zip(more: Mapping[str, bytes] | None = None) -> bytes:
    """The runner package as a zip file that Python can import from, with `more` files by name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in runner_files():
            archive.write(path, f"{RUNNER_PACKAGE}/{path.name}")
        for name, data in (more or {}).items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _build_runner(folder: Path) -> None:
    (folder / RUNNER_PACKAGE).mkdir()
    for path in runner_files():
        rootfs.copy(str(path), str(folder / RUNNER_PACKAGE / path.name))
    compileall.compile_dir(str(folder), ddir="/opt/forge_env", quiet=2)


def ensure(name: str, build_into: Callable[[Path], None]) -> Path:
    """The cached folder `name`, filled by `build_into` if missing and not pruned while this process is alive."""
    cache = cache_folder()
    target = cache / name
    if _hold(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o755)  # sandboxes reach it as other users, without traversing its parents
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            for stale in cache.glob("building-*"):  # we hold the lock, so their builder is dead
                shutil.rmtree(stale, ignore_errors=True)
            building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
            try:
                build_into(building)
                building.chmod(0o755)
                building.rename(target)
            except BaseException:  # also on Ctrl-C: no partial folder may be left
                shutil.rmtree(building, ignore_errors=True)
                raise
        _hold(target)  # before releasing the lock, while no process can prune it
    return target


_held: dict[Path, int] = {}
"""Folders in use by this process, with the descriptors that hold a shared lock on them."""


def _hold(folder: Path) -> bool:
    """Take a shared lock on a folder so that no process prunes it. Returns whether it exists."""
    if folder in _held:
        return folder.is_dir()
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not os.fstat(descriptor).st_nlink or not folder.is_dir():  # removed before it was locked
        os.close(descriptor)
        return False
    _held[folder] = descriptor
    return True


def _removed(path: Path) -> bool:
    """Remove a file, or a folder that no process holds. Returns whether it was removed."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return True
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def contents() -> tuple[str, int]:
    """Description of the cache's contents, for display, and its size in MiB."""
    folder = cache_folder()
    names = {"rootfs": "root filesystems", "runner": "runners", "packages": "layers of packages"}
    counts = {text: len(list(folder.glob(f"{kind}-*"))) for kind, text in names.items()}
    paths = [path for kind in names for top in folder.glob(f"{kind}-*") for path in top.rglob("*")]
    size = sum(path.lstat().st_blocks * 512 for path in paths)
    return ", ".join(f"{count} {text}" for text, count in counts.items()), size >> 20


def prune() -> list[str]:
    """Remove entries built for other versions that no living process uses. Returns their paths."""
    cache = cache_folder()
    if not cache.is_dir():
        return []
    ensure_rootfs(), ensure_runner()  # those of this version stay
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sorted(str(path) for kind in _KINDS for path in cache.glob(kind) if _removed(path))
