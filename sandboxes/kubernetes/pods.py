"""Pod manifests of sandboxes, with all unneeded features disabled, and the program that loads the runner into a pod."""

from __future__ import annotations

import functools
import struct
import textwrap
from typing import Any

from forge_env.sandbox import SandboxSpec
from sandboxes import owner
from sandboxes.docker.options import random_uid
from sandboxes.images import cache
from sandboxes.pool import RUNNER_MB, SCRATCH_MB
from sandboxes.runner.config import RunnerConfig

CONTAINER = "sandbox"
NETWORK_LABEL = "forge_env_network"
POLICY = "forge-env-sandboxes"
LIFETIME_S = 24 * 3600
"""Maximum lifetime of a pod, even if its owner dies; the pool then replaces its sandbox."""
LENGTH = struct.Struct("!I")
OPEN_NETWORK = "this pod reaches the network"
_RUNNER_FOLDER = "/opt/forge_env"

BOOT = textwrap.dedent(f"""
    import os, runpy, select, socket, struct, sys, time
    def closed():
        place = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        try:
            socket.create_connection(place, 1).close()
        except OSError:
            return True
    if sys.argv[2] == "none":  # the rules of a new pod may take a moment to hold
        end = time.monotonic() + 10
        while not closed():
            if time.monotonic() > end:
                sys.exit("{OPEN_NETWORK}")
            select.select([], [], [], 0.2)
    for path, mode in (("/work", 0o700), ("/work-judge", 0o700), ("/tmp", 0o1777), ("{_RUNNER_FOLDER}", 0o755)):
        os.chmod(path, mode)
    def read(size):
        data = b""
        while len(data) < size:
            if not select.select([0], [], [], 120)[0] or not (chunk := os.read(0, size - len(data))):
                sys.exit("nobody sent a runner")
            data += chunk
        return data
    with open("{_RUNNER_FOLDER}/runner.zip", "wb") as file:
        file.write(read(struct.unpack("{LENGTH.format}", read({LENGTH.size}))[0]))
    sys.path[0] = file.name
    del sys.argv[2]
    runpy.run_module("{cache.RUNNER_PACKAGE}", run_name="__main__", alter_sys=True)
    """)
"""The pod's first program. Its image only needs Python: the runner arrives over standard input."""


@functools.lru_cache(maxsize=1)
def runner_archive() -> bytes:
    """The first bytes sent to a pod: the length of the runner's zip file, then the file."""
    archive = cache.runner_zip()
    return LENGTH.pack(len(archive)) + archive


def pod_spec(
    image: str,
    spec: SandboxSpec,
    *,
    cpus: float,
    cpu_request: float,
    runtime_class: str | None,
    further: dict[str, Any],
) -> dict[str, Any]:
    """A `PodSpec` (https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1).

    It satisfies the Baseline level of the Pod Security Standards. Root inside is used by the runner only, which may
    change its user id and, before the first program, the owner of the work folders. Standard input is closed when the
    first attached connection is, which ends the runner and thus the pod.
    """
    runner = RunnerConfig(isolation="uid", uid=random_uid(remapped=False), chown=True, preload=spec.preload)
    memory = f"{spec.memory_mb + RUNNER_MB}Mi"
    folders = {"/work": spec.disk_mb, "/work-judge": spec.disk_mb, "/tmp": SCRATCH_MB, _RUNNER_FOLDER: 4}
    names = {path: path.strip("/").replace("/", "-").replace("_", "-") for path in folders}
    container = {
        "name": CONTAINER,
        "image": image,
        "command": ["python3", "-s", "-c", BOOT, runner.dumps(), "open" if spec.network else "none"],
        "workingDir": "/",
        "stdin": True,
        "stdinOnce": True,
        "env": [{"name": "PYTHONHASHSEED", "value": "0"}, {"name": "LANG", "value": "C.UTF-8"}],
        "resources": {
            "requests": {"cpu": f"{cpu_request:g}", "memory": memory},
            "limits": {"cpu": f"{cpus:g}", "memory": memory},
        },
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["SETUID", "SETGID", "CHOWN"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": names[path], "mountPath": path} for path in folders],
    }
    return {
        "containers": [container],
        "volumes": [
            {"name": names[path], "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}}
            for path, size in folders.items()
        ],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFETIME_S,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        **({"runtimeClassName": runtime_class} if runtime_class else {}),
        **further,
    }


def box_manifest(name: str, pod: dict[str, Any], *, owned_by: str, network: bool, group: str) -> dict[str, Any]:
    """The object to create for a sandbox: a `Sandbox` if agent-sandbox's API `group` is served, otherwise a pod.

    The controller of agent-sandbox (https://agent-sandbox.sigs.k8s.io) creates a pod with the same name.
    """
    labels = {owner.LABEL: owned_by, NETWORK_LABEL: "open" if network else "none"}
    metadata = {"name": name, "labels": labels}
    if not group:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
    template = {"metadata": {"labels": labels}, "spec": pod}
    return {"apiVersion": group, "kind": "Sandbox", "metadata": metadata, "spec": {"podTemplate": template}}


def network_policy() -> dict[str, Any]:
    """A policy that forbids all traffic (https://kubernetes.io/docs/concepts/services-networking)."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "podSelector": {"matchLabels": {NETWORK_LABEL: "none"}},
            "policyTypes": ["Ingress", "Egress"],
        },
    }
