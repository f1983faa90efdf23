"""What a kubelet does to a pod's first process: root file system, volumes, privileges; see `cluster.py`."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from sandboxes.runner import kernel, root

CAPABILITIES = {"CHOWN": 0, "SETGID": 6, "SETUID": 7}
NEW_ROOT = "/tmp"


def main(plan: dict[str, Any]) -> None:
    (container,) = plan["spec"]["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"]["drop"] == ["ALL"]
    kernel.die_with_parent()
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount(plan["root"], NEW_ROOT, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.mount(None, NEW_ROOT, None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY)
    root.mount_kernel_folders(NEW_ROOT)
    kernel.mount("shm", f"{NEW_ROOT}/dev/shm", "tmpfs", 0, "size=64m,mode=1777")
    sizes = {volume["name"]: volume["emptyDir"]["sizeLimit"].removesuffix("i") for volume in plan["spec"]["volumes"]}
    for mounted in container["volumeMounts"]:  # an emptyDir in memory is root's, and everybody may write
        data = f"size={sizes[mounted['name']]},mode=0777"
        kernel.mount("tmpfs", NEW_ROOT + mounted["mountPath"], "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, data)
    root.pivot(NEW_ROOT)
    os.chdir(container["workingDir"])
    kernel.set_host_name(plan["spec"]["hostname"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket.fileno(), 0x8914, struct.pack("16sH22x", b"lo", 1))
    kept = {CAPABILITIES[name] for name in security["capabilities"]["add"]}
    for number in set(range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1)) - kept:
        kernel._prctl(kernel.PR_CAPBSET_DROP, number)
    kernel.keep_capabilities(*kept)
    if not security["allowPrivilegeEscalation"]:
        kernel.forbid_new_privileges()
    host, port = plan["api"]
    environment = {"PATH": "/usr/bin", "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
    environment |= {entry["name"]: entry["value"] for entry in container["env"]}
    os.execvpe(container["command"][0], container["command"], environment)


main(json.loads(sys.argv[1]))
