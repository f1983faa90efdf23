"""The cluster, credentials and namespace to use, from a kubeconfig file or a pod's service account.

https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig and
https://kubernetes.io/docs/tasks/run-application/access-api-from-pod
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forge_env import redaction
from forge_env.errors import SandboxUnavailableError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PLUGIN_TIMEOUT_S = 60
_EARLY = datetime.timedelta(seconds=60)
"""How long before its expiry a token is replaced."""


@dataclass(frozen=True)
class Cluster:
    """Access to a cluster.

    Attributes:
        server: address of its API.
        namespace: where pods are created.
        tls: trusted authority and client certificate, if any; None for `http://`.
        token: returns the current bearer token; empty if none is needed.
    """

    server: str
    namespace: str
    tls: ssl.SSLContext | None
    token: Callable[[], str]

    @property
    def headers(self) -> dict[str, str]:
        """Authorization headers."""
        token = self.token()
        redaction.add(token, "kubernetes-token")
        return {"Authorization": f"Bearer {token}"} if token else {}


def find_cluster(context: str | None = None, namespace: str | None = None) -> Cluster:
    """The cluster of a context: by default of $KUBECONFIG or ~/.kube/config, else of this pod.

    Raises:
        SandboxUnavailableError: there is no cluster, or its configuration can't be used.
    """
    paths = [
        Path(name).expanduser() for name in os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep) if name
    ]
    existing = [path for path in paths if path.is_file()]
    if not existing and context is None and (SERVICE_ACCOUNT / "token").is_file():
        return _inside(namespace)
    if not existing:
        raise SandboxUnavailableError(
            f"no cluster: there is no {' or '.join(map(str, paths))}, and this is not a pod with a service account",
            fix="set KUBECONFIG",
        )
    return _of_files(existing, context, namespace)


def _inside(namespace: str | None) -> Cluster:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    name = f"[{host}]" if ":" in host else host
    return Cluster(
        f"https://{name}:{port}",
        namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip(),
        ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt")),
        lambda: (SERVICE_ACCOUNT / "token").read_text().strip(),  # the kubelet replaces it every hour
    )


def _of_files(paths: list[Path], context: str | None, namespace: str | None) -> Cluster:
    """Merge kubeconfig files. The first file that defines a name wins, as for kubectl."""
    entries: dict[str, dict[str, dict[str, Any]]] = {"clusters": {}, "users": {}, "contexts": {}}
    for path in reversed(paths):
        try:
            content = yaml.safe_load(path.read_text()) or {}
            for kind, known in entries.items():
                for entry in content.get(kind) or []:
                    known[entry["name"]] = {**(entry.get(kind[:-1]) or {}), "folder": path.parent}
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
            raise SandboxUnavailableError(f"{path} is not a kubeconfig file: {error}", fix="set KUBECONFIG") from error
        current = content.get("current-context") or ""
    name = context or current
    if name not in entries["contexts"]:
        known_names = ", ".join(entries["contexts"]) or "none"
        raise SandboxUnavailableError(
            f"no context {name!r} in {', '.join(map(str, paths))}", fix=f"choose a context (there: {known_names})"
        )
    chosen = entries["contexts"][name]
    try:
        cluster, user = entries["clusters"][chosen["cluster"]], entries["users"].get(chosen.get("user", ""), {})
        if "proxy-url" in cluster:
            raise SandboxUnavailableError(f"context {name!r} goes through a proxy, which isn't supported")
        server = str(cluster["server"]).rstrip("/")
    except KeyError as error:
        raise SandboxUnavailableError(f"context {name!r} lacks {error}", fix="see kubectl config view") from error
    token = _token(user)
    tls = _tls(cluster, user) if server.startswith("https://") else None
    return Cluster(server, namespace or chosen.get("namespace") or "default", tls, token)


def _data(entry: dict[str, Any], name: str) -> bytes | None:
    """Content of a file that an entry gives either in base64 (`NAME-data`) or as a path (`NAME`)."""
    if encoded := entry.get(f"{name}-data"):
        return base64.b64decode(encoded)
    return (entry["folder"] / entry[name]).read_bytes() if entry.get(name) else None


def _tls(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    try:
        authority = _data(cluster, "certificate-authority")
        context = ssl.create_default_context(cadata=authority.decode() if authority else None)
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        certificate, key = _data(user, "client-certificate"), _data(user, "client-key")
        if certificate and key:
            with tempfile.NamedTemporaryFile(prefix="forge-env-") as file:  # SSLContext only loads files
                file.write(certificate + b"\n" + key)
                file.flush()
                context.load_cert_chain(file.name)
    except (OSError, ValueError) as error:  # ssl errors are OSErrors
        raise SandboxUnavailableError(f"the certificates of the cluster can't be used: {error}") from error
    return context


def _token(user: dict[str, Any]) -> Callable[[], str]:
    if plugin := user.get("exec"):
        return _Plugin(plugin)
    if name := user.get("tokenFile"):
        return lambda: (user["folder"] / name).read_text().strip()
    return lambda: str(user.get("token") or "")


class _Plugin:
    """A credential plug-in: a command that prints tokens, as managed clusters use (client-go-credential-plugins)."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._found = ""
        self._until: datetime.datetime | None = None

    def __call__(self) -> str:
        if not self._found or (self._until and datetime.datetime.now(datetime.UTC) > self._until - _EARLY):
            self._ask()
        return self._found

    def _ask(self) -> None:
        version = self._spec.get("apiVersion", "client.authentication.k8s.io/v1")
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
        variables = {entry["name"]: entry["value"] for entry in self._spec.get("env") or []}
        redaction.learn(variables)
        command = [self._spec["command"], *(self._spec.get("args") or [])]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)},
                capture_output=True,
                check=True,
                timeout=_PLUGIN_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
            status = json.loads(done.stdout)["status"]
            self._found = status["token"]
            redaction.add(self._found, "kubernetes-token")
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            output = getattr(error, "stderr", None) or str(error).encode()
            last = redaction.redact(output.decode("utf-8", "replace")).strip().splitlines()[-1:] or ["no reason given"]
            raise SandboxUnavailableError(f"{command[0]} returned no token for the cluster: {last[0]}") from error
        ends = status.get("expirationTimestamp")
        self._until = datetime.datetime.fromisoformat(ends) if ends else None
