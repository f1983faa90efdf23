"""Sandboxes as pods of a Kubernetes cluster. Each pod is one sandbox, and is reused after it was wiped and checked."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any

from forge_env.concurrency import to_its_end
from forge_env.errors import SandboxError, SandboxUnavailableError
from forge_env.sandbox import SandboxSpec
from sandboxes import owner
from sandboxes.box import Box
from sandboxes.images import BUNDLED
from sandboxes.images.build import BASE_IMAGE_VARIABLE
from sandboxes.kubernetes.cluster import find_cluster
from sandboxes.kubernetes.pods import OPEN_NETWORK, POLICY, box_manifest, network_policy, pod_spec, runner_archive
from sandboxes.pool import MAX_USES, RemoteEngine

if TYPE_CHECKING:
    from sandboxes.kubernetes.api import Api

DEFAULT_IMAGE = "python:3.12-slim"
_AGENT_SANDBOX = "agents.x-k8s.io"
_PLURAL = {"Pod": "pods", "Sandbox": "sandboxes"}


class KubernetesEngine(RemoteEngine):
    """Sandboxes in hardened pods, created through agent-sandbox if it is installed.

    Args:
        context: context of the kubeconfig (default: its current one, else the service account of this pod).
        namespace: where pods are created (default: the context's).
        base_image: image with Python 3.9 or newer (default: $FORGE_ENV_BASE_IMAGE, else python:3.12-slim).
        runtime_class: runtime class of the pods, such as `gvisor`.
        cpus: CPUs one sandbox may use.
        cpu_request: CPUs reserved for one sandbox; the cluster must have them free.
        pod: extra fields of every pod's spec, such as `{nodeSelector: ..., tolerations: ..., imagePullSecrets: ...}`.
        start_timeout_s: seconds until a pod must be running, including the pull of its image.
        concurrency: most sandboxes alive at once; by default four per CPU of this machine.
        warm: sandboxes to start ahead; by default one per CPU.
        max_uses: leases after which a sandbox is replaced by a new one.
    """

    name = "kubernetes"
    automatic = False  # clusters are shared, so this engine must be chosen explicitly
    instead_of_allow = "use network=True and a NetworkPolicy of yours"

    def __init__(
        self,
        *,
        context: str | None = None,
        namespace: str | None = None,
        base_image: str | None = None,
        runtime_class: str | None = None,
        cpus: float = 1.0,
        cpu_request: float = 0.1,
        pod: dict[str, Any] | None = None,
        start_timeout_s: float = 180.0,
        concurrency: int | None = None,
        warm: int | None = None,
        max_uses: int = MAX_USES,
    ) -> None:
        super().__init__(concurrency=concurrency, warm=warm, max_uses=max_uses)
        self.context = context
        self.namespace = namespace
        self.base_image = base_image or os.environ.get(BASE_IMAGE_VARIABLE) or DEFAULT_IMAGE
        self._pod_options: dict[str, Any] = {"runtime_class": runtime_class, "cpus": cpus, "cpu_request": cpu_request}
        self._further = pod or {}
        self._start_timeout_s = start_timeout_s
        self._owner = owner.this_process()
        self._group = ""  # API group of agent-sandbox, if it is installed
        self._api: Api | None = None
        self._undead: set[str] = set()  # names of pods whose removal was not confirmed

    @classmethod
    def unavailable_reason(cls) -> str | None:  # noqa: D102
        return cls().unusable_reason()

    def unusable_reason(self) -> str | None:
        """Why no pod can be created: no cluster, no answer, or a missing right."""
        try:
            import websockets.client  # noqa: F401

            from sandboxes.kubernetes.api import check_rights

            check_rights(find_cluster(self.context, self.namespace))
        except ImportError:
            return 'it needs websockets: pip install "forge-env[kubernetes]"'
        except (SandboxUnavailableError, SandboxError) as error:
            return str(error)
        return None

    async def _prepare(self) -> None:
        from sandboxes.kubernetes.api import Api

        cluster = await asyncio.to_thread(find_cluster, self.context, self.namespace)
        self._api = Api(cluster)
        versions = await self._api.find(f"/apis/{_AGENT_SANDBOX}")
        self._group = versions["preferredVersion"]["groupVersion"] if versions else ""
        if self._group and not await self._api.may("create", "sandboxes", _AGENT_SANDBOX):
            self._group = ""
        await self._api.create("/apis/networking.k8s.io/v1", "networkpolicies", network_policy(), POLICY)
        await self._reap()

    @property
    def _connected(self) -> Api:
        assert self._api is not None
        return self._api

    async def _reap(self) -> None:
        """Remove pods of dead owners, and pods that have ended, whatever their owner."""
        kind = "Sandbox" if self._group else "Pod"
        for pod in await self._connected.list(self._base, _PLURAL[kind], owner.LABEL):
            ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
            if ended or owner.is_dead(pod["metadata"]["labels"].get(owner.LABEL, "")):
                await self.remove(pod["metadata"]["name"])

    @property
    def _base(self) -> str:
        return f"/apis/{self._group}" if self._group else "/api/v1"

    async def close(self) -> None:  # noqa: D102
        await super().close()
        api, self._api = self._api, None
        if api is not None:
            try:
                for name in list(self._undead):
                    await self._remove(api, name)
            finally:
                await api.close()

    async def remove(self, name: str) -> None:
        """Remove a pod. If the cluster does not confirm it, removal is retried later."""
        self._undead.add(name)
        await self._remove(self._connected, name)

    async def _remove(self, api: Api, name: str) -> None:
        with contextlib.suppress(SandboxError, SandboxUnavailableError):
            await api.delete(self._base, "sandboxes" if self._group else "pods", name)
            self._undead.discard(name)

    async def _make_box(self, spec: SandboxSpec) -> Box:
        for name in list(self._undead):
            await self._remove(self._connected, name)
        image = self.base_image if spec.image == BUNDLED else spec.image
        name = f"forge-env-{os.urandom(6).hex()}"
        box = Box(name, spec, functools.partial(self.remove, name))
        pod = pod_spec(image, spec, further=self._further, **self._pod_options)
        manifest = box_manifest(box.name, pod, owned_by=self._owner, network=spec.network, group=self._group)
        creating = self._connected.create(self._base, _PLURAL[manifest["kind"]], manifest, box.name)
        try:
            await to_its_end(asyncio.ensure_future(creating))
            async with asyncio.timeout(self._start_timeout_s):
                await self._start(box)
        except BaseException as error:  # also when cancelled: no pod may be left behind
            await box.destroy()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"pod {box.name} did not start within {self._start_timeout_s:g} s") from None
            if OPEN_NETWORK in str(error):
                raise SandboxUnavailableError(
                    "pods reach the network although a NetworkPolicy forbids it: the cluster enforces none",
                    fix="use a network plugin that enforces them, or SandboxSpec(network=True)",
                ) from None
            raise
        return box

    async def _start(self, box: Box) -> None:
        from sandboxes.kubernetes.attachment import attach

        await self._connected.until_running(box.name)
        await attach(self._connected.cluster, box.name, box.connection)
        box.connection.send(runner_archive())
        await box.ready()
