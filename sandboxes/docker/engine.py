"""Sandboxes as Docker containers. One container is one sandbox; it is reused after a wipe and a check."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_env.errors import SandboxError, SandboxUnavailableError, UsageError
from forge_env.sandbox import RunningSandbox, SandboxSpec
from sandboxes import owner
from sandboxes.box import Box
from sandboxes.connection import Connection
from sandboxes.docker import seccomp as own_seccomp
from sandboxes.docker.options import SOCKET_NAME, Daemon, container_options, random_uid
from sandboxes.docker.reaper import FOLDER_PREFIX, end_container, is_running, reap, remove_stale_folders, running
from sandboxes.engine import PooledEngine
from sandboxes.images.build import ensure_image

START_TIMEOUT_S = 30
_MAX_SOCKET_PATH = 100


class DockerBox(Box):
    """One container."""

    def __init__(self, container: str, spec: SandboxSpec, connection: Connection, client: Any) -> None:
        super().__init__(container[:12], spec, connection)
        self._container = container
        self._client = client
        self._removal: asyncio.Task[None] | None = None

    async def destroy(self) -> None:  # noqa: D102
        self.connection.close()
        if self._removal is None:
            self._removal = asyncio.ensure_future(asyncio.to_thread(end_container, self._client, self._container))
        await asyncio.shield(self._removal)


class DockerEngine(PooledEngine):
    """Sandboxes in hardened containers.

    Args:
        base_image: public base of the bundled image (default: $FORGE_ENV_BASE_IMAGE, else this machine's Python).
        runtime: an OCI runtime the daemon knows, such as `runsc`.
        cpus: CPUs one sandbox may use.
        seccomp: `own` (an allow-list tighter than Docker's), or `docker` for Docker's default profile.
        options: see `PooledEngine`.
    """

    name = "docker"

    def __init__(
        self,
        *,
        base_image: str | None = None,
        runtime: str | None = None,
        cpus: float = 1.0,
        seccomp: str = "own",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if seccomp not in ("own", "docker"):
            raise UsageError(f"seccomp is {seccomp!r}", fix="use 'own' or 'docker'")
        self.base_image = base_image
        self.runtime = runtime
        self.cpus = cpus
        self.owner = owner.this_process()
        self.seccomp = seccomp
        self._daemon = Daemon(seccomp=False, remapped=False)
        self._client: Any = None
        self._images: dict[str, asyncio.Task[str]] = {}

    @classmethod
    def unavailable_reason(cls) -> str | None:  # noqa: D102
        try:
            import docker
            import docker.errors
        except ImportError:
            return "the Python package 'docker' is missing (pip install docker)"
        try:
            client = docker.from_env(timeout=5)
            try:
                kind = client.info().get("OSType")
            finally:
                client.close()
        except (docker.errors.DockerException, OSError) as error:
            return f"no Docker daemon answers: {str(error)[:200]} (start it, or set DOCKER_HOST)"
        return None if kind == "linux" else f"the Docker daemon runs {kind} containers, not Linux ones"

    @classmethod
    def reap_abandoned(cls) -> int:  # noqa: D102
        remove_stale_folders()
        with _daemon() as client:
            return len(reap(client)) if client else 0

    @classmethod
    def running(cls) -> list[RunningSandbox]:  # noqa: D102
        with _daemon() as client:
            return running(client) if client else []

    async def build(self, image: str | None = None) -> str:  # noqa: D102
        await self._connect()
        return await self._image(image or SandboxSpec().image)

    async def _prepare(self) -> None:
        await self._connect()
        await asyncio.to_thread(reap, self._client)
        await asyncio.to_thread(remove_stale_folders)
        await self._image(SandboxSpec().image)

    async def _connect(self) -> None:
        import docker
        import docker.errors

        if self._client is None:
            try:
                self._client = await asyncio.to_thread(docker.from_env, max_pool_size=self.concurrency + 4)
                self._daemon = Daemon.of(await asyncio.to_thread(self._client.info))
            except docker.errors.DockerException as error:
                fix = "start it or set DOCKER_HOST"
                raise SandboxUnavailableError(f"no Docker daemon answers: {error}", fix=fix) from error

    async def close(self) -> None:  # noqa: D102
        await super().close()
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.close)

    def _seccomp_profile(self) -> str | None:
        return (
            own_seccomp.profile() if self._daemon.seccomp and self.seccomp == "own" and self.runtime is None else None
        )

    async def _image(self, name: str) -> str:
        if name not in self._images or (self._images[name].done() and self._images[name].exception()):
            build = functools.partial(ensure_image, self._client, name, self.base_image)
            self._images[name] = asyncio.ensure_future(asyncio.to_thread(build))
        return await asyncio.shield(self._images[name])

    async def _make_box(self, spec: SandboxSpec) -> Box:
        image = await self._image(spec.image)
        loop = asyncio.get_running_loop()
        connection = Connection()
        with _socket_folder() as folder:
            path = os.path.join(folder, SOCKET_NAME)
            server = await loop.create_unix_server(lambda: connection, path=path)
            os.chmod(path, 0o666)  # the folder's parent is ours alone; the container's root has no right to override
            options = container_options(
                image,
                spec,
                owner=self.owner,
                uid=random_uid(self._daemon),
                socket_folder=folder,
                cpus=self.cpus,
                runtime=self.runtime,
                seccomp_profile=self._seccomp_profile(),
            )
            container = await _finish(asyncio.to_thread(self._start_container, options))
            box = DockerBox(container, spec, connection, self._client)
            try:
                await self._wait_until_ready(connection, container)
            except BaseException:
                await box.destroy()
                raise
            finally:
                server.close()
        return box

    async def _wait_until_ready(self, connection: Connection, container: str) -> None:
        """Wait for the runner's first word. A container that died before it connected is noticed by looking."""
        for _ in range(START_TIMEOUT_S):
            await asyncio.wait([connection.ready], timeout=1.0)
            if connection.ready.done():
                return connection.ready.result()
            if not await asyncio.to_thread(is_running, self._client, container):
                raise SandboxError(f"container {container[:12]} ended before its runner answered")
        raise SandboxError(f"container {container[:12]} did not answer within {START_TIMEOUT_S} s")

    def _start_container(self, options: dict[str, Any]) -> str:
        import docker.errors
        import requests

        try:
            api = self._client.api
            container = str(api.create_container_from_config(options)["Id"])
            try:
                api.start(container)
            except BaseException:
                api.remove_container(container, force=True)
                raise
        except docker.errors.APIError as error:
            raise SandboxError(f"Docker refused a container: {error.explanation or error}") from error
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise SandboxError(f"the Docker daemon is lost: {error}") from error
        return container


async def _finish(work: Any) -> Any:
    """Await `work` to its end even when cancelled, so that what it makes is never lost track of."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@contextlib.contextmanager
def _daemon() -> Iterator[Any]:
    """A client for a moment, or None when no daemon answers."""
    import docker
    import docker.errors

    try:
        client = docker.from_env(timeout=5)
    except (docker.errors.DockerException, OSError):
        yield None
        return
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def _socket_folder() -> Iterator[str]:
    """A folder for one socket, there only until the runner has connected; the container sees it, others can't."""
    parent = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{owner.this_process()}-")
    if len(parent) > _MAX_SOCKET_PATH - 4:
        os.rmdir(parent)
        parent = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{owner.this_process()}-", dir="/tmp")
    try:
        folder = Path(parent, "c")
        folder.mkdir()
        folder.chmod(0o711)
        yield str(folder)
    finally:
        shutil.rmtree(parent, ignore_errors=True)
