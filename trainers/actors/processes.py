"""Processes for actors, on this machine."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import monarch.actor
from monarch.actor import ProcMesh, this_host

from trainers.actors.stacks import offer_stack

STOP_S = 10.0
"""How long processes may take to end by themselves."""
SELDOM = (50_000, 20, 50)
"""How often the garbage collector looks, in its own terms; these processes make few circles."""
logger = logging.getLogger(__name__)


def _prepare(variables: Mapping[str, str]) -> None:
    """The first thing that a new process does."""
    os.environ.update(variables)
    offer_stack()
    gc.set_threshold(*SELDOM)  # an eighth of the time of all imports went there


async def start_processes(count: int, name: str, environment: Mapping[str, str] | None = None) -> ProcMesh:
    """`count` processes that end with this one; end them with `stop_processes`."""
    mesh: ProcMesh = this_host().spawn_procs(
        per_host={"procs": count}, bootstrap=partial(_prepare, dict(environment or {})), name=name
    )
    try:
        await mesh.initialized
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


def settle_heap() -> None:
    """Let the garbage collector pass over all that is loaded by now, and look less often.

    Libraries leave a million objects that live as long as the process; walking them took a fifth of the generator's
    time.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # at the end of the process some libraries complain of what is still there
    gc.set_threshold(*SELDOM)
