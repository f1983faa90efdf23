"""The first program in a cloud sandbox: makes namespaces and a read-only root, then becomes the runner.

`attachment.py` sends it as `__main__.py` of the runner's zip file and starts it as root of the virtual machine. The
programs that the runner starts get the same folders, rights and network as in a container.
"""

from __future__ import annotations

import os
import runpy
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandboxes.runner import kernel, root
else:
    from _forge_env_runner import kernel, root

NEW_ROOT = "/tmp"


def main(config: str, network: str, uid: int, disk_mb: int, scratch_mb: int) -> None:
    """Run the runner in a sandbox within this machine, and end when it does.

    `network` is `open`, or `none` for a loopback of its own. `uid` owns the work folder, `uid + 1` the judge's.
    """
    apart = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    kernel.unshare(apart | (kernel.CLONE_NEWNET if network == "none" else 0))
    if init := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) & 0xFF)
    kernel.die_with_parent()
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    for folder in ("/work", "/work-judge"):
        os.makedirs(folder, exist_ok=True)
    kernel.mount("/", NEW_ROOT, None, kernel.MS_BIND)  # without what is mounted below it
    read_only = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(None, NEW_ROOT, None, read_only)
    root.mount_kernel_folders(NEW_ROOT)
    folders = (
        ("work", disk_mb, f"mode=0700,uid={uid},gid={uid}"),
        ("work-judge", disk_mb, f"mode=0700,uid={uid + 1},gid={uid + 1}"),
        ("tmp", scratch_mb, "mode=1777"),
        ("dev/shm", scratch_mb, "mode=1777"),
    )
    root.mount_folders(NEW_ROOT, folders)
    root.finish_devices(NEW_ROOT)
    root.pivot(NEW_ROOT)
    kernel.set_host_name("sandbox")
    if network == "none":
        root.raise_loopback()
    kernel.keep_capabilities(kernel.CAP_SETUID, kernel.CAP_SETGID)
    sys.argv[1:] = [config]
    runpy.run_module("_forge_env_runner", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
