"""Processes for actors, on this machine or on other hosts."""

from __future__ import annotations

import asyncio
import atexit
import gc
import io
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from monarch.actor import HostMesh, ProcMesh, this_host

from forge_env.errors import ForgeError
from forge_env.job.addresses import Address
from forge_env.machine import SELDOM, showing
from forge_env.redaction import learn_environment, redacting
from trainers.actors.gloo import GLOO_NETWORK, LOOPBACK
from trainers.actors.lease import Lease
from trainers.actors.sockets import keep_private
from trainers.actors.stacks import offer_stack
from trainers.compat.monarch import on_unhandled_fault

keep_private()  # before anything can start Monarch, here and in the processes that import this

WORKER = "FORGE_ENV_WORKER"
"""Variable with the Monarch address of a process's worker, set on other hosts by `forge_env.cli.worker`."""
LOG = "FORGE_ENV_LOG"
"""Variable with the path of the log file that a process on another host prints to."""
ADDRESS = "FORGE_ENV_ADDRESS"
"""Variable with the address at which other hosts reach this host's worker."""
STOP_S = 10.0
"""Seconds that processes have to end before they are killed."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a process on another host, which inherits nothing from this one.

    Attributes:
        gpus: ids of the GPUs of the actor's processes on that host; rank r uses the r-th.
    """

    gpus: Sequence[str]
    log: Path
    folder: Path
    address: Address


@dataclass(frozen=True, slots=True)
class Ground:
    """Other hosts to start processes on.

    Attributes:
        settings: settings of each host's processes, by the Monarch address of its worker.
        lost: one future per host, done when the host is lost.
    """

    mesh: HostMesh
    hosts: int
    name: str
    settings: Mapping[str, Setting]
    lost: Sequence[asyncio.Future[None]]

    @property
    def address(self) -> str:
        """Address of the first host."""
        return next(iter(self.settings.values())).address.plain_host


def _prepare(variables: Mapping[str, str], settings: Mapping[str, Setting], on_one_host: bool) -> None:
    """Prepare a new process; runs first in it."""
    if (setting := settings.get(os.environ.get(WORKER, ""))) is not None:
        _settle(setting)
    os.environ.update(variables)
    learn_environment()
    sys.stdout, sys.stderr = redacting(sys.stdout), redacting(sys.stderr)
    if on_one_host:
        os.environ.setdefault(GLOO_NETWORK, LOOPBACK)
    offer_stack()
    gc.set_threshold(*SELDOM)  # with the default, an eighth of all import time was garbage collection


def _settle(setting: Setting) -> None:
    log = os.open(setting.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ[LOG] = str(setting.log)
    os.environ[ADDRESS] = str(setting.address)
    os.environ.update(showing(setting.gpus))
    if setting.folder.is_dir():
        os.chdir(setting.folder)
        sys.path.append(str(setting.folder))


def own_log(otherwise: Path) -> Path:
    """Log file of this process: on other hosts than the controller's the file that it prints to, here `otherwise`."""
    return Path(os.environ.get(LOG, otherwise))


def own_host() -> str:
    """Number and name of this process's host; empty if the run has only one host."""
    return Path(os.environ.get(LOG, "")).stem


def host_address() -> Address | None:
    """Address at which other hosts reach this host's worker; None if all processes of the run are on one host."""
    text = os.environ.get(ADDRESS)
    return None if text is None else Address.of(text)


async def start_processes(
    count: int, name: str, environment: Mapping[str, str] | None = None, ground: Ground | None = None
) -> ProcMesh:
    """Start processes, which end with this one at the latest; end them with `stop_processes`.

    Args:
        count: number of processes on all hosts together.
        environment: variables in addition to those of this process, or of the worker on another host.
    """
    host, hosts, settings = (this_host(), 1, {}) if ground is None else (ground.mesh, ground.hosts, ground.settings)
    prepare = partial(_prepare, dict(environment or {}), settings, on_one_host=ground is None or count == 1)
    mesh: ProcMesh = host.spawn_procs(per_host={"procs": count // hosts}, bootstrap=prepare, name=name)
    try:
        await mesh.initialized
        if ground is not None:
            mesh._forge_lease = Lease(mesh)
    except ValueError as error:
        await stop_processes(mesh)
        raise ForgeError(
            f"the processes of {name} did not start: {error}",
            fix="if the machine is busy with other programs, stop some of them, or raise Monarch's timeout: "
            "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE=10m",
        ) from error
    except BaseException:  # cancellation too: no process may be left
        await stop_processes(mesh)
        raise
    return mesh


def survive_deaths() -> None:
    """Only log deaths of processes: the code that started a process watches it (`ForgeActor.watch`)."""
    on_unhandled_fault(lambda failure: logger.debug("%s: %s", failure.mesh_name, failure.report()))


async def end_of(pid: int) -> None:
    """Wait until a process on this machine has ended; the kernel reports that immediately."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def stop_processes(mesh: ProcMesh, pids: Sequence[int] = (), *, dead: bool = False) -> None:
    """End processes; those that do not end within `STOP_S` are killed.

    Args:
        pids: ids of those on this machine.
        dead: the processes have failed: kill those on this machine at once.
    """
    if dead:
        _kill(pids)
    lease: Lease | None = getattr(mesh, "_forge_lease", None)
    if lease is not None:
        lease.end()
    try:
        async with asyncio.timeout(STOP_S):
            await mesh.stop()
    except Exception as error:  # noqa: BLE001 - boundary of Monarch: dead or hanging processes can cause any error
        logger.debug("stopping processes %s failed: %s", pids, error)
        _kill(pids)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def settle_imports() -> None:
    """Exclude everything imported so far from garbage collection.

    Libraries collect garbage while they start, vLLM's engine five times. Each collection takes half a second, to
    traverse a million objects that live as long as the process.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries complain about remaining objects at exit


def settle_heap() -> None:
    """Exclude everything loaded so far from garbage collection, which took a fifth of a generator's time."""
    gc.collect()
    settle_imports()
    gc.set_threshold(*SELDOM)


def leave_as_it_stands() -> None:
    """Make this process exit, with code 0, right after the `atexit` handlers that are registered from now on.

    This skips freeing Python's objects one by one, which takes three seconds in a generator and two in a trainer.
    Buffers of open files are still flushed. Don't use it in processes that run environments: these may leave open more
    than files, which only Python's normal exit closes.
    """
    atexit.register(_leave, os.getpid())


def _leave(pid: int) -> None:
    if pid == os.getpid():  # not in a forked process, which would lose its exit code
        logging.shutdown()
        _write_open_files()
        os._exit(0)


def _write_open_files() -> None:
    gc.unfreeze()  # get_objects() omits frozen objects
    objects = gc.get_objects()
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):  # text goes through a binary buffer
        for each in objects:
            if type(each) is kind:  # `isinstance` would run code of proxy objects
                with suppress(OSError, ValueError):  # closed, or its disk is full
                    each.flush()
