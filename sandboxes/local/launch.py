"""The launcher of one embedded sandbox: creates namespaces and a root filesystem, then starts the runner.

`LocalEngine` runs it as a program, with the standard library only. As root it first switches to an unused user id, and
then does exactly what an ordinary user would do, so that even a broken sandbox is not root.
"""

from __future__ import annotations

import os  # `signal`, json and typing would each take a third of the start time
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from typing import Any

    from sandboxes.runner import kernel, root
else:
    import _signal

    sys.path.insert(0, os.path.abspath(next(word[7:] for word in sys.argv if word.startswith("runner="))))
    from _forge_env_runner import kernel, root

NEW_ROOT = "/tmp"
INNER_ID = 1000
PYTHON = "/usr/bin/python3"
REFUSED = 3
"""Exit status if the kernel refuses a call; stderr has the reason."""
_NUMBERS = ("control_fd", "owner_pid", "uid", "disk_mb", "scratch_mb", "unified")
INOTIFY = (("max_inotify_instances", "16"), ("max_inotify_watches", "8192"))
"""Limits of a sandbox, of the 128 instances and the watches that the kernel gives a user by default."""


def parse(words: list[str]) -> dict[str, Any]:
    """Parse the options from `name=value` words, as `LocalEngine` writes them."""
    options: dict[str, Any] = dict(word.split("=", 1) for word in words)
    for name in _NUMBERS:
        options[name] = int(options[name])
    options["cgroups"] = options["cgroups"].split(":") if options["cgroups"] else []
    options["writable"] = options["writable"].split(",") if options["writable"] else []
    return options


def main(options: dict[str, Any]) -> None:
    """Create the namespaces, fork the sandbox's init and wait for it. The current folder is the cache."""
    owner = os.pidfd_open(options["owner_pid"])
    for folder in options["cgroups"]:
        root.write(f"{folder}/cgroup.procs", "0")
    if options["uid"]:
        os.setgroups([])
        os.setresgid(options["uid"], options["uid"], options["uid"])
        os.setresuid(options["uid"], options["uid"], options["uid"])
        kernel.set_dumpable(True)  # otherwise /proc/self/uid_map would still belong to root
    user, group = os.getuid(), os.getgid()
    kernel.unshare(
        kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP | kernel.CLONE_NEWNET
    )  # fmt: skip
    root.write("/proc/self/setgroups", "deny")
    root.write("/proc/self/uid_map", f"{INNER_ID} {user} 1")
    root.write("/proc/self/gid_map", f"{INNER_ID} {group} 1")
    kernel.set_dumpable(False)
    init = os.fork()
    if init == 0:
        os.close(owner)
        _become_sandbox(options)
    os.close(options["control_fd"])
    _wait(init, owner)


def _wait(init: int, owner: int) -> None:
    """Wait for the sandbox's init and exit with its status, as its last process; kill it when the engine ends."""
    _signal.signal(_signal.SIGTERM, lambda *_: os.kill(init, _signal.SIGKILL))
    ended = os.pidfd_open(init)
    poll = select.poll()
    for fd in (ended, owner):
        poll.register(fd, select.POLLIN)
    if any(fd == owner for fd, _ in poll.poll()):
        os.kill(init, _signal.SIGKILL)
    _, status = os.waitpid(init, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _become_sandbox(options: dict[str, Any]) -> None:
    try:
        kernel.die_with_parent()
        kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        _make_root(options)
        root.pivot(NEW_ROOT)
        kernel.set_host_name("sandbox")
        root.raise_loopback()
        kernel.keep_capabilities_across_exec()
        environment = {"PYTHONPATH": "/opt/forge_env", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
        os.set_inheritable(options["control_fd"], True)
        # An absolute path, since Python would look up a bare name in PATH, which is not set, and use / as its prefix.
        os.execve(PYTHON, [PYTHON, "-s", "-m", "_forge_env_runner", options["config"]], environment)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(REFUSED)


def _make_root(options: dict[str, Any]) -> None:
    """Mount the cached root filesystem read-only, with fresh /proc, /dev and work folders."""
    if options["writable"]:
        _bind_one_by_one(options["rootfs"], options["writable"])
    else:
        _bind_read_only(options["rootfs"], NEW_ROOT)
    _bind_read_only(options["runner"], f"{NEW_ROOT}/opt/forge_env")
    if options["packages"]:
        _bind_read_only(f"{options['packages']}/site", f"{NEW_ROOT}/{options['site']}")
        _bind_read_only(f"{options['packages']}/bin", f"{NEW_ROOT}/{options['scripts']}")
    root.mount_kernel_folders(NEW_ROOT)
    _limit_inotify()
    folders = (
        ("work", options["disk_mb"], "0700"),
        ("work-judge", options["disk_mb"], "0700"),
        ("tmp", options["scratch_mb"], "1777"),
        ("dev/shm", options["scratch_mb"], "1777"),
        *((path.lstrip("/"), options["disk_mb"], "0755") for path in options["writable"]),
    )
    root.mount_folders(NEW_ROOT, ((folder, size_mb, f"mode={mode}") for folder, size_mb, mode in folders))
    root.finish_devices(NEW_ROOT)
    if options["memory_group"]:
        _show_memory_group(options["memory_group"], options["unified"])


def _limit_inotify() -> None:
    """Limit what the sandbox takes of the user's inotify instances and watches, which all its sandboxes share."""
    for name, value in INOTIFY:
        try:
            root.write(f"{NEW_ROOT}/proc/sys/user/{name}", value)
        except OSError:  # a kernel without inotify, or read-only settings in a container
            pass


def _bind_one_by_one(rootfs: str, folders: list[str]) -> None:
    """Create a read-only root with the cached root's entries and with `folders` as mount points."""
    kernel.mount("root", NEW_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64k,mode=0755")
    for entry in os.scandir(rootfs):
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), f"{NEW_ROOT}/{entry.name}")
        else:
            os.mkdir(f"{NEW_ROOT}/{entry.name}")
            _bind_read_only(entry.path, f"{NEW_ROOT}/{entry.name}")
    for folder in folders:
        os.makedirs(NEW_ROOT + folder, exist_ok=True)
    flags = kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(None, NEW_ROOT, None, flags)


def _show_memory_group(folder: str, unified: bool) -> None:
    """Mount the sandbox's control group, where the runner counts out-of-memory kills."""
    mount_point = f"{NEW_ROOT}/sys/fs/cgroup" + ("" if unified else "/memory")
    kernel.mount("sys", f"{NEW_ROOT}/sys", "tmpfs", kernel.MS_NOSUID, "size=16k,mode=0755")
    os.makedirs(mount_point)
    _bind_read_only(folder, mount_point)
    kernel.mount(None, f"{NEW_ROOT}/sys", None, kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID)


def _bind_read_only(source: str, target: str) -> None:
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    # An ordinary user may add restrictions to a mount, but not remove those it has.
    current_flags = kernel.mount_flags(target)
    flags = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | current_flags
    kernel.mount(None, target, None, flags)


if __name__ == "__main__":
    try:
        main(parse(sys.argv[1:]))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(REFUSED)
