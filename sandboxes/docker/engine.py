"""Sandboxes as Docker containers. Each container is one sandbox, and is reused after it was wiped and checked."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from docker.errors import APIError, ImageNotFound

from forge_env.concurrency import to_its_end
from forge_env.errors import SandboxError, UsageError
from forge_env.sandbox import Images, Inventory, RunningSandbox, SandboxSpec
from sandboxes import owner
from sandboxes.box import Box
from sandboxes.docker import daemon
from sandboxes.docker import seccomp as own_seccomp
from sandboxes.docker.attachment import attach
from sandboxes.docker.daemon import FOLDER_PREFIX
from sandboxes.docker.options import SOCKET_NAME, container_options, random_uid
from sandboxes.docker.reaper import bury, end_container, is_running, reap, remove_stale_folders, running
from sandboxes.images import BUNDLED
from sandboxes.images.build import (
    chosen_base,
    ensure_image,
    ensure_packages,
    ensure_seeds,
    images_kept,
    prune_images,
)
from sandboxes.pool import MAX_USES, RESERVE_MB, RUNNER_MB, PooledEngine

START_TIMEOUT_S = 30
UNSEEN = "bind source path does not exist"
"""Part of the daemon's error message if it can't see the socket folder."""
_MAX_SOCKET_PATH = 100


class DockerEngine(PooledEngine, Images, Inventory):
    """Sandboxes in hardened containers.

    Args:
        docker_host: the daemon (default: $DOCKER_HOST, else this machine's): `tcp://HOST:PORT` with the TLS folder of
            DOCKER_CERT_PATH, or `ssh://[USER@]HOST[:PORT]`. Runners are then attached to through the API.
        base_image: public base of the bundled image (default: $FORGE_ENV_BASE_IMAGE, else this machine's Python).
        runtime: an OCI runtime that the daemon knows, such as `runsc`.
        cpus: CPUs one sandbox may use.
        seccomp: `own` (an allow-list tighter than Docker's), or `docker` for Docker's default profile.
        concurrency: most sandboxes alive at once; by default four per CPU.
        warm: sandboxes to start ahead; by default one per CPU.
        max_uses: leases after which a sandbox is replaced by a new one.
    """

    name = "docker"

    def __init__(
        self,
        *,
        docker_host: str | None = None,
        base_image: str | None = None,
        runtime: str | None = None,
        cpus: float = 1.0,
        seccomp: str = "own",
        concurrency: int | None = None,
        warm: int | None = None,
        max_uses: int = MAX_USES,
    ) -> None:
        super().__init__(concurrency=concurrency, warm=warm, max_uses=max_uses)
        if seccomp not in ("own", "docker"):
            raise UsageError(f"seccomp={seccomp!r} is not a valid profile", fix="use 'own' or 'docker'")
        daemon.check_host(docker_host or "")
        self.docker_host = docker_host
        self.base_image = base_image
        self.runtime = runtime
        self.cpus = cpus
        self.owner = owner.this_process()
        self.seccomp = seccomp
        self._daemon: daemon.Daemon | None = None
        self._images: dict[SandboxSpec, asyncio.Task[str]] = {}
        self._undead: set[str] = set()  # names of containers that may exist although removing or starting them failed

    @classmethod
    def unavailable_reason(cls) -> str | None:  # noqa: D102
        return daemon.unavailable_reason()

    def unusable_reason(self) -> str | None:  # noqa: D102
        return daemon.unavailable_reason(self.docker_host)

    @classmethod
    def version(cls) -> str:  # noqa: D102
        return daemon.ask(lambda client: f"Docker {client.version()['Version']}", "")

    @classmethod
    def reap_abandoned(cls) -> int:  # noqa: D102
        remove_stale_folders()
        removed: list[str] = daemon.ask(reap, [])
        return len(removed)

    @classmethod
    def prune(cls) -> list[str]:  # noqa: D102
        return daemon.ask(prune_images, [])

    @classmethod
    def storage(cls) -> str:  # noqa: D102
        return daemon.ask(images_kept, "")

    @classmethod
    def running(cls) -> list[RunningSandbox]:  # noqa: D102
        return daemon.ask(running, [])

    async def build(self, image: str | SandboxSpec | None = None) -> str:  # noqa: D102
        await self._connect()
        return await self._image(image if isinstance(image, SandboxSpec) else SandboxSpec(image or BUNDLED))

    async def _prepare(self) -> None:
        await self._connect()
        await asyncio.to_thread(reap, self._client)
        await asyncio.to_thread(remove_stale_folders)
        await self._image(SandboxSpec())

    async def _connect(self) -> None:
        if self._daemon is None:
            options = {"max_pool_size": self.concurrency + 4}
            self._daemon = await asyncio.to_thread(daemon.connect, self.docker_host, **options)

    async def close(self) -> None:  # noqa: D102
        await super().close()
        connected, self._daemon = self._daemon, None
        if connected is not None:
            await asyncio.to_thread(self._bury, connected.client)
            await asyncio.to_thread(connected.close)

    @property
    def _connected(self) -> daemon.Daemon:
        assert self._daemon is not None
        return self._daemon

    @property
    def _client(self) -> Any:
        return self._connected.client

    def _has_room(self, spec: SandboxSpec) -> bool:
        """For a remote daemon, whose free memory is unknown: whether all limits together fit its machine's memory."""
        if self._daemon is None or not self._daemon.remote:
            return super()._has_room(spec)
        return (self._alive + 1) * (spec.memory_mb + RUNNER_MB) + RESERVE_MB <= self._daemon.memory_mb

    def _seccomp_profile(self) -> str | None:
        if not self._connected.seccomp or self.seccomp != "own" or self.runtime is not None:
            return None
        return str(own_seccomp.profile_file()) if self._connected.podman else own_seccomp.profile()

    async def _image(self, spec: SandboxSpec) -> str:
        """The tag of a sandbox's image, built if missing. Concurrent callers share one build."""
        key = SandboxSpec(spec.image, base=spec.base, packages=spec.packages, writable=spec.writable)
        if key not in self._images or (self._images[key].done() and self._images[key].exception()):
            if not chosen_base(self.base_image):
                daemon.check_base(self._connected)
            self._images[key] = asyncio.ensure_future(self._built(key))
        return await asyncio.shield(self._images[key])

    async def _built(self, spec: SandboxSpec) -> str:
        if spec.writable:
            plain = await self._image(replace(spec, writable=()))
            return await asyncio.to_thread(ensure_seeds, self._client, plain, spec.writable)
        if spec.packages:
            plain = await self._image(replace(spec, packages=()))
            return await asyncio.to_thread(ensure_packages, self._client, plain, spec.packages)
        return await asyncio.to_thread(ensure_image, self._client, spec.image, self.base_image, spec.base)

    async def _make_box(self, spec: SandboxSpec) -> Box:
        image = await self._image(spec)
        name = f"{FOLDER_PREFIX}{os.urandom(6).hex()}"
        box = Box(name, spec, functools.partial(self._end, self._client, name))
        try:
            if not self._connected.remote:
                try:
                    await self._start_beside(box, image)
                except _ApartError:
                    self._daemon = replace(self._connected, apart=True)
                else:
                    return box
            if spec.proxied:  # the remote machine would have to pass us a listening socket
                fix = (
                    "use network=True, or a local daemon; if forge-env runs in a container, start it with -v /tmp:/tmp"
                )
                raise UsageError("'allow' needs a Docker daemon that sees this machine's files", fix=fix)
            await self._start_attached(box, image)
        except _ImageGoneError:
            self._images.clear()  # pruned by another process: the next attempt builds it again
            raise
        return box

    async def _start_beside(self, box: Box, image: str) -> None:
        """Start a box on this machine, whose runner connects to a Unix socket of ours."""
        with _socket_folder() as folder, socket.socket(socket.AF_UNIX) as server:
            path = os.path.join(folder, SOCKET_NAME)
            server.bind(path)
            server.listen(1)
            server.setblocking(False)
            # The container's root may not override file modes. Other users can't enter the folder's parent.
            os.chmod(path, 0o666)
            await self._start(box, image, folder)
            await self._until_ready(box, _meet(server, box))

    async def _start_attached(self, box: Box, image: str) -> None:
        """Start a box on another machine and attach to its standard streams."""
        loop = asyncio.get_running_loop()

        def attach_first() -> None:
            asyncio.run_coroutine_threadsafe(attach(self._connected, box.name, box.connection), loop).result()

        await self._start(box, image, None, attach_first)
        await self._until_ready(box, box.ready())

    async def _start(
        self, box: Box, image: str, socket_folder: str | None, before: Callable[[], None] = lambda: None
    ) -> None:
        options = container_options(
            image,
            box.spec,
            owner=self.owner,
            uid=random_uid(remapped=self._connected.remapped),
            socket_folder=socket_folder,
            cpus=self.cpus,
            runtime=self.runtime,
            seccomp_profile=self._seccomp_profile(),
            podman=self._connected.podman,
        )
        starting = asyncio.to_thread(self._start_container, box.name, options, before)
        await to_its_end(asyncio.ensure_future(starting))

    async def _until_ready(self, box: Box, ready: Coroutine[Any, Any, None]) -> None:
        """Wait for a started runner while its container runs, and destroy the box if it does not become ready."""
        task = asyncio.ensure_future(ready)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not (await asyncio.wait([task], timeout=1.0))[0]:
                    if not await asyncio.to_thread(is_running, self._client, box.name):
                        raise SandboxError(f"container {box.name} ended before its runner answered")
            task.result()
        except BaseException as error:  # also when cancelled: no container may be left behind
            task.cancel()
            await box.destroy()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"container {box.name} did not answer within {START_TIMEOUT_S} s") from None
            raise

    def _start_container(self, name: str, options: dict[str, Any], before: Callable[[], None]) -> None:
        self._bury(self._client)
        api = self._client.api
        try:
            api.create_container_from_config(options, name=name)
            before()
            api.start(name)
        except ImageNotFound as error:
            raise _ImageGoneError(f"the image {options['Image']} is gone") from error
        except (SandboxError, *daemon.DAEMON_ERRORS) as error:
            self._undead.add(name)  # it may exist even if the answer denies it or was lost
            self._bury(self._client)
            if isinstance(error, SandboxError):
                raise
            if isinstance(error, APIError) and UNSEEN in str(error.explanation):
                raise _ApartError(f"the Docker daemon does not see {options['HostConfig']['Mounts']}") from error
            if isinstance(error, APIError):
                raise SandboxError(f"Docker refused a container: {error.explanation or error}") from error
            raise SandboxError(f"the connection to the Docker daemon was lost: {error}") from error

    async def _end(self, client: Any, name: str) -> None:
        if not await asyncio.to_thread(end_container, client, name):
            self._undead.add(name)

    def _bury(self, client: Any) -> None:
        """Remove the containers in `_undead`."""
        for name in list(self._undead):
            if bury(client, name):
                self._undead.discard(name)


class _ApartError(SandboxError):
    """The daemon's socket is local, but the daemon can't see our files."""


class _ImageGoneError(SandboxError):
    """The image was removed after it was looked up."""


async def _meet(server: socket.socket, box: Box) -> None:
    """Wait until the runner has connected and is ready."""
    channel, _ = await asyncio.get_running_loop().sock_accept(server)
    await box.join(channel)


@contextlib.contextmanager
def _socket_folder() -> Iterator[str]:
    """A temporary folder for one socket, removed once the runner has connected. No other user can enter its parent."""
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
