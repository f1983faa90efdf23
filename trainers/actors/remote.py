"""Calls of endpoints; nothing is imported before the first call, so that a process can prepare for Monarch."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any, TypeGuard

from forge_env.errors import ForgeError, InfrastructureError


class ActorDiedError(InfrastructureError):
    """The process of an actor has ended, hangs, or can't be reached."""


class RemoteError(ForgeError):
    """An endpoint raised what can't be sent to another process; names its type and has its text."""


def sendable(error: Exception) -> Exception:
    """The error itself where another process can read it, else a `RemoteError` in its place."""
    from monarch._src.actor.pickle import flatten, unflatten  # as it is sent

    try:
        values, written = flatten(error, lambda _: False)
        unflatten(written.freeze(), values)
    except Exception:  # noqa: BLE001 - whatever its own methods raise
        return RemoteError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    return error


def is_death(error: BaseException) -> TypeGuard[ActorDiedError]:
    """Whether a call failed because its actor died; an endpoint may itself raise `ActorDiedError`, of another."""
    from monarch.actor import ActorError

    return isinstance(error, ActorDiedError) and not isinstance(error.__cause__, ActorError)


async def result(call: Awaitable[Any]) -> Any:
    """What a remote call returns; what it raises is raised here as it was raised there.

    Raises:
        ActorDiedError: the process that was to answer is gone. The call may have been carried out, or not.
    """
    from monarch.actor import ActorError

    try:
        return await call
    except ActorError as error:  # its text has the traceback of the other process
        if isinstance(error.exception, Exception):
            raise error.exception from error
        raise  # a task cancelled there is no cancellation here
    except RuntimeError as error:  # Monarch's SupervisionError has no public name; an endpoint's own is an ActorError
        raise ActorDiedError(why_ended(str(error))) from error


async def agreed(call: Awaitable[Any]) -> Any:
    """What all ranks of one actor return alike, of which the first's is taken; errors as in `result`."""
    _, value = next(iter((await result(call)).items()))
    return value


def why_ended(report: str) -> str:
    """Monarch's report of a death in words."""
    last = (report.strip().splitlines() or ["for no known reason"])[-1].strip()
    if killed := re.search(r"Killed\(sig=(\d+)\)", last):
        memory = " (which is also what the kernel sends when memory runs out)" if killed[1] == "9" else ""
        return f"its process was killed by signal {killed[1]}{memory}"
    if "timeout waiting for message" in last:
        return "its process has stopped, or its host is lost: it does not answer"
    return last
