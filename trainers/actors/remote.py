"""Calls of endpoints; nothing is imported before the first call, so that a process can prepare for Monarch."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

from forge_env.errors import ForgeError, InfrastructureError


class ActorDiedError(InfrastructureError):
    """The process of the actor that was called has ended, hangs, or can't be reached."""


class FurtherActorDiedError(InfrastructureError):
    """The actor that was called lives, and says that another one died, which it had called in its turn."""


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


async def result(call: Awaitable[Any]) -> Any:
    """What a remote call returns; what it raises is raised here as it was raised there.

    Raises:
        ActorDiedError: the process that was to answer is gone. The call may have been carried out, or not.
        FurtherActorDiedError: the endpoint itself raised `ActorDiedError`.
    """
    from monarch.actor import ActorError

    try:
        return await call
    except ActorError as error:  # its text has the traceback of the other process
        if isinstance(error.exception, ActorDiedError):
            raise FurtherActorDiedError(error.exception.message, fix=error.exception.fix) from error
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
