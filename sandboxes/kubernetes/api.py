"""Client for the parts of a cluster's API that sandboxes need, with errors translated to ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx2

from forge_env.errors import SandboxError, SandboxUnavailableError
from sandboxes.kubernetes.cluster import Cluster

NEEDED = (("create", "pods", ""), ("list", "pods", ""), ("watch", "pods", ""), ("delete", "pods", ""))
ATTACHING = (("create", "pods", "attach"), ("get", "pods", "attach"))
"""Rights for attaching. API servers check `get` for a websocket, newer ones also `create`."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_TIMEOUT = httpx2.Timeout(30.0)
_BAD_STARTS = {
    *("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
}
"""Reasons of a waiting container that waiting longer does not resolve."""


class Api:
    """The parts of a cluster's API that sandboxes need. A refusal raises `SandboxUnavailableError`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._client = httpx2.AsyncClient(**_options(cluster))

    async def close(self) -> None:
        """Close the HTTP client."""
        await self._client.aclose()

    def _place(self, base: str, plural: str, name: str = "") -> str:
        return f"{base}/namespaces/{self.cluster.namespace}/{plural}" + (f"/{name}" if name else "")

    async def _ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        headers = await asyncio.to_thread(lambda: self.cluster.headers)  # may run a credential plug-in
        with told(self.cluster):
            return await self._client.request(method, path, headers=headers, **options)

    async def find(self, path: str) -> dict[str, Any] | None:
        """The object at `path`, or None if there is none."""
        answer = await self._ask("GET", path)
        if answer.status_code == httpx2.codes.NOT_FOUND:
            return None
        return checked(answer)

    async def may(self, verb: str, resource: str, group: str) -> bool:
        """Whether we have this right."""
        review = _review(verb, resource, "", self.cluster.namespace, group)
        return bool(checked(await self._ask("POST", _REVIEWS, json=review))["status"]["allowed"])

    async def list(self, base: str, plural: str, label: str) -> list[dict[str, Any]]:
        """All objects with this label."""
        objects: list[dict[str, Any]] = checked(
            await self._ask("GET", self._place(base, plural), params={"labelSelector": label})
        )["items"]
        return objects

    async def create(self, base: str, plural: str, body: dict[str, Any], name: str) -> None:
        """Create an object. One that already exists under this name is accepted."""
        answer = await self._ask("POST", self._place(base, plural), json=body)
        if answer.status_code == httpx2.codes.FORBIDDEN and await self.find(self._place(base, plural, name)):
            return  # already created by a user with the right to do so
        if answer.status_code != httpx2.codes.CONFLICT:
            checked(answer)

    async def delete(self, base: str, plural: str, name: str) -> None:
        """Delete an object and its dependents. It may be gone already."""
        options = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        answer = await self._ask("DELETE", self._place(base, plural, name), params=options)
        if answer.status_code != httpx2.codes.NOT_FOUND:
            checked(answer)

    async def until_running(self, pod: str) -> None:
        """Watch a pod until its container runs (https://kubernetes.io/docs/reference/using-api/api-concepts/#watch)."""
        while True:  # servers may end a watch at any time
            headers = await asyncio.to_thread(lambda: self.cluster.headers)
            options = {"watch": "1", "fieldSelector": f"metadata.name={pod}"}
            path = self._place("/api/v1", "pods")
            with told(self.cluster):
                async with self._client.stream("GET", path, params=options, headers=headers, timeout=None) as answer:
                    if answer.is_error:
                        await answer.aread()
                        checked(answer)
                    async for line in answer.aiter_lines():
                        if _runs(json.loads(line)):
                            return


def _review(verb: str, resource: str, subresource: str, namespace: str, group: str = "") -> dict[str, Any]:
    wanted = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "subresource": subresource}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": wanted},
    }


def check_rights(cluster: Cluster) -> None:
    """Raises `SandboxUnavailableError` unless we have all rights that pods need."""
    with told(cluster), httpx2.Client(headers=cluster.headers, **_options(cluster)) as client:
        for verb, resource, subresource in NEEDED + ATTACHING:
            review = _review(verb, resource, subresource, cluster.namespace)
            if not checked(client.post(_REVIEWS, json=review))["status"]["allowed"]:
                what = f"{resource}/{subresource}" if subresource else resource
                fix = "see the Role in docs/sandboxes/remote.md"
                text = f"not allowed to {verb} {what} in namespace {cluster.namespace!r}"
                raise SandboxUnavailableError(text, fix=fix)


def _options(cluster: Cluster) -> dict[str, Any]:
    """Options of an HTTP client. Environment variables for web proxies and certificates don't apply to the cluster."""
    return {"base_url": cluster.server, "verify": cluster.tls or True, "timeout": _TIMEOUT, "trust_env": False}


def _runs(event: dict[str, Any]) -> bool:
    """Whether a pod's event says that its container runs. Raises if it never will."""
    pod = event.get("object", {})
    if event.get("type") == "ERROR":
        raise SandboxError(f"the watch of a pod failed: {pod.get('message')}")
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if event.get("type") == "DELETED" or status.get("phase") in ("Succeeded", "Failed"):
        why = status.get("message") or status.get("reason") or "no reason given"
        raise SandboxError(f"pod {name} ended before its runner answered: {why}")
    for container in status.get("containerStatuses") or []:
        state = container.get("state", {})
        if "running" in state:
            return True
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in _BAD_STARTS:
            image = pod["spec"]["containers"][0]["image"]
            raise SandboxUnavailableError(
                f"a pod with the image {image} can't start: {waiting['reason']}: {waiting.get('message', '')}",
                fix="set base_image to an image that the cluster can pull",
            )
    return False


def checked(answer: httpx2.Response) -> dict[str, Any]:
    """The JSON object of a successful answer. Raises an error with the message of the API's `Status` otherwise."""
    if answer.is_success:
        content: dict[str, Any] = answer.json()
        return content
    try:
        message = answer.json().get("message") or answer.text
    except ValueError:
        message = answer.text
    text = f"the cluster answers {answer.status_code}: {message[:500]}"
    if answer.is_server_error or answer.status_code == httpx2.codes.TOO_MANY_REQUESTS:
        raise SandboxError(text)
    if answer.status_code == httpx2.codes.UNAUTHORIZED:
        raise SandboxUnavailableError(text, fix="log in again, or choose another context")
    raise SandboxUnavailableError(text)


@contextlib.contextmanager
def told(cluster: Cluster) -> Iterator[None]:
    """Turn connection errors into `SandboxError`."""
    try:
        yield
    except httpx2.HTTPError as error:
        raise SandboxError(
            f"the cluster at {cluster.server} can't be reached: {error or type(error).__name__}"
        ) from error
