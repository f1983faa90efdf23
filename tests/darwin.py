"""Make this process resemble one on macOS, as far as this project's code can tell.

For its code, `sys.platform` and `platform.system` say Darwin, and /proc, /sys and /dev/shm don't exist; libraries,
which have builds of their own for macOS, still see this machine. Calls that only Linux has are gone. It can't show what
macOS itself does differently.

    environment = {"PYTHONPATH": str(site_folder(tmp_path))}
"""

from __future__ import annotations

import builtins
import ctypes
import io
import os
import platform
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[1]) + os.sep
ABSENT = ("/proc", "/sys", "/dev/shm", "/etc/machine-id", "/var/lib/dbus")
GONE = {
    os: "sched_getaffinity sched_setaffinity pidfd_open memfd_create eventfd unshare setns O_PATH O_TMPFILE getrandom"
    " sched_setscheduler copy_file_range splice O_DIRECT posix_fadvise sched_getparam prlimit",
    signal: "pidfd_send_signal sigtimedwait",
    socket: "SO_PEERCRED TCP_KEEPIDLE SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE AF_VSOCK",
    resource: "prlimit RLIMIT_OFILE RLIMIT_SIGPENDING RLIMIT_MSGQUEUE",
    select: "epoll",
}
SYMBOLS = {"prctl", "inotify_init1", "inotify_add_watch", "unshare", "setns", "mount", "umount2", "capset", "syscall"}


def is_ours(name: str) -> bool:
    """Whether a source file is this project's."""
    return name.startswith(ROOT) and "site-packages" not in name and name != __file__


def asked_by_us() -> bool:
    """Whether the innermost frame outside the standard library is this project's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith((os.path.dirname(os.__file__) + os.sep, "<")):
            return is_ours(name)
        if "site-packages" in name:
            return False
        frame = frame.f_back
    return False


class Platform(str):
    """`sys.platform`: `darwin` when this project's code compares it."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return ("darwin" if is_ours(sys._getframe(1).f_code.co_filename) else str(self)) == other

    def __ne__(self, other: object) -> bool:
        return ("darwin" if is_ours(sys._getframe(1).f_code.co_filename) else str(self)) != other


def absent(path: object) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return any(text == top or text.startswith(f"{top}/") for top in ABSENT) and asked_by_us()


def hide(module: Any, name: str) -> None:
    real = getattr(module, name)

    def call(path: Any, *args: Any, **options: Any) -> Any:
        if absent(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *args, **options)

    setattr(module, name, call)


class Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in SYMBOLS:
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


def become() -> None:
    for module, names in GONE.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
        hide(os, name)
    hide(builtins, "open")
    hide(io, "open")  # what pathlib calls
    ctypes.CDLL = Library
    real_bind = socket.socket.bind

    def bind(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_UNIX and str(address).startswith("\0"):
            raise OSError(2, "No such file or directory")  # no abstract sockets
        real_bind(self, address)

    socket.socket.bind = bind
    real_system = platform.system
    platform.system = lambda: "Darwin" if is_ours(sys._getframe(1).f_code.co_filename) else real_system()
    sys.platform = Platform(sys.platform)


def site_folder(parent: Path) -> Path:
    """Create a folder which makes every Python process that has it in PYTHONPATH call `become`."""
    folder = parent / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"""
import importlib.util
import sys
spec = importlib.util.spec_from_file_location("darwin", {__file__!r})
sys.modules["darwin"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.become()
""")
    return folder
