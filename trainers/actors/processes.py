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
from typing import Any

import monarch.actor
from monarch.actor import HostMesh, ProcMesh, this_host

from forge_env.errors import ForgeError
from forge_env.job.addresses import Address
from forge_env.machine import SELDOM, showing
from forge_env.redaction import learn_environment, redacting
from trainers.actors.gloo import GLOO_NETWORK, LOOPBACK
from trainers.actors.lease import Lease
from trainers.actors.sockets import keep_private
from trainers.actors.stacks import offer_stack

keep_private()  # before anything can start Monarch, here and in the processes that import this

WORKER = "FORGE_ENV_WORKER"
"""By this variable a process on another host knows of which worker it is (`forge_env.cli.worker`)."""
LOG = "FORGE_ENV_LOG"
"""By this one, where it prints."""
ADDRESS = "FORGE_ENV_ADDRESS"
"""By this one, at which address the others reach its host."""
STOP_S = 10.0
"""How long processes may take to end by themselves."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a process of another host has to know, since it inherits nothing from here.

    Attributes:
        gpus: ids of those that it and its siblings on that host use; rank r the r-th.
        log: where it prints.
        folder: in which it works.
        address: of its host's worker.
    """

    gpus: Sequence[str]
    log: Path
    folder: Path
    address: Address


@dataclass(frozen=True, slots=True)
class Ground:
    """Other hosts, on which processes can be started.

    Attributes:
        mesh: Monarch's.
        hosts: how many.
        name: theirs.
        settings: by the worker of each host.
        lost: of each host, done when it is.
    """

    mesh: HostMesh
    hosts: int
    name: str
    settings: Mapping[str, Setting]
    lost: Sequence[asyncio.Future[None]]

    @property
    def address(self) -> str:
        """Of the first host."""
        return next(iter(self.settings.values())).address.plain_host


def _prepare(variables: Mapping[str, str], settings: Mapping[str, Setting], on_one_host: bool) -> None:
    """The first thing that a new process does."""
    if (setting := settings.get(os.environ.get(WORKER, ""))) is not None:
        _settle(setting)
    os.environ.update(variables)
    learn_environment()
    sys.stdout, sys.stderr = redacting(sys.stdout), redacting(sys.stderr)
    if on_one_host:
        os.environ.setdefault(GLOO_NETWORK, LOOPBACK)
    offer_stack()
    gc.set_threshold(*SELDOM)  # an eighth of the time of all imports went there


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


def name_processes(pids: Sequence[int], ground: Ground | None) -> str:
    """Processes, for people."""
    where = "" if ground is None else f" on host {ground.name}"
    return f"process {', '.join(map(str, pids))}{where}"


def own_log(otherwise: Path) -> Path:
    """Where this process logs: with what it prints, on another host than the controller's; else as said."""
    return Path(os.environ.get(LOG, otherwise))


def own_host() -> str:
    """Number and name of the host that this process is on; empty where the run has one."""
    return Path(os.environ.get(LOG, "")).stem


def host_address() -> Address | None:
    """By which the other hosts of the run reach this one's worker; None where all its processes are on one host."""
    text = os.environ.get(ADDRESS)
    return None if text is None else Address.of(text)


async def start_processes(
    count: int, name: str, environment: Mapping[str, str] | None = None, ground: Ground | None = None
) -> ProcMesh:
    """`count` processes that end with this one; end them with `stop_processes`.

    Args:
        count: on all hosts together.
        name: of all.
        environment: variables that they have besides those of this process, or of the worker on another host.
        ground: the other hosts; None: this one.

    Raises:
        ForgeError: they did not begin in Monarch's time.
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
            fix="if the machine is busy with other programs, end some of them, or let Monarch wait for longer: "
            "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE=10m",
        ) from error
    except BaseException:  # cancelled too: no process may be left
        await stop_processes(mesh)
        raise
    return mesh


def survive_deaths() -> None:
    """Log deaths of processes, and no more: whoever started a process watches it (`ForgeActor.watch`).

    Monarch's own answer is to interrupt this process's main thread, which looks like somebody's Ctrl-C.
    """
    monarch.actor.unhandled_fault_hook = _log_fault


def _log_fault(failure: Any) -> None:
    logger.debug("%s: %s", failure.mesh_name, failure.report())


async def end_of(pid: int) -> None:
    """Wait until a process of this machine has ended; the kernel tells at once."""
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
    """End processes; what does not end by itself is killed.

    Args:
        mesh: the processes.
        pids: those of them that are on this machine.
        dead: they have failed, so that none of them is asked to end first.
    """
    if dead:
        _kill(pids)
    lease: Lease | None = getattr(mesh, "_forge_lease", None)
    if lease is not None:
        lease.end()
    try:
        async with asyncio.timeout(STOP_S):
            await mesh.stop()
    except Exception as error:  # noqa: BLE001 - boundary of Monarch: whatever it says of processes that are gone, or hang
        logger.debug("while ending processes %s: %s", pids, error)
        _kill(pids)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def settle_imports() -> None:
    """Let the garbage collector pass over what is imported by now.

    Libraries collect garbage while they start, vLLM's engine five times. Each time is half a second of walking over a
    million objects that live as long as the process.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # at the end of the process some libraries complain of what is still there


def settle_heap() -> None:
    """Let the garbage collector pass over all that is loaded by now, and look less often.

    Walking over it took a fifth of the generator's time.
    """
    gc.collect()
    settle_imports()
    gc.set_threshold(*SELDOM)


def leave_as_it_stands() -> None:
    """Let this process end, with code 0, when all is done that `atexit` is told from here on.

    Python would free its objects one by one first, which is three seconds of a generator's end and two of a trainer's.
    What is in the buffers of open files is written. Where environments run, Python has to do it: they may leave more
    open than files.
    """
    atexit.register(_leave, os.getpid())


def _leave(pid: int) -> None:
    if pid == os.getpid():  # not a fork, which would lose its own code
        logging.shutdown()
        _write_open_files()
        os._exit(0)


def _write_open_files() -> None:
    gc.unfreeze()  # what is frozen isn't listed
    objects = gc.get_objects()
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):  # in this order: text goes through a buffer
        for each in objects:
            if type(each) is kind:  # `isinstance` would run code of objects that stand for others
                with suppress(OSError, ValueError):  # closed, or its disk is full
                    each.flush()
