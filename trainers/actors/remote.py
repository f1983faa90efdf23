"""Results and errors of endpoint calls. Monarch is imported at the first call, so that a process can prepare for it."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

from forge_env.errors import ForgeError, InfrastructureError


class ActorDiedError(InfrastructureError):
    """The called actor's process has ended, hangs, or can't be reached."""


class FurtherActorDiedError(InfrastructureError):
    """The called actor is alive and reports that another actor, which it had called, died."""


class RemoteError(ForgeError):
    """Replaces an error that can't be sent to another process; contains the error's type and text."""


def sendable(error: Exception) -> Exception:
    """Return the error itself if it can be sent to another process, otherwise a `RemoteError`."""
    from monarch._src.actor.pickle import flatten, unflatten  # used to send messages

    try:
        values, written = flatten(error, lambda _: False)
        unflatten(written.freeze(), values)
    except Exception:  # noqa: BLE001 - its own methods may raise anything
        return RemoteError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    return error


async def result(call: Awaitable[Any]) -> Any:
    """Return a remote call's result; an error of the endpoint is raised here with its original type.

    Raises:
        ActorDiedError: the called process died. The call may or may not have been carried out.
        FurtherActorDiedError: the endpoint itself raised `ActorDiedError`.
    """
    from monarch.actor import ActorError

    try:
        return await call
    except ActorError as error:  # its text contains the other process's traceback
        if isinstance(error.exception, ActorDiedError):
            raise FurtherActorDiedError(error.exception.message, fix=error.exception.fix) from error
        if isinstance(error.exception, Exception):
            raise error.exception from error
        raise  # e.g. a task cancelled there, which must not cancel the caller
    except RuntimeError as error:  # Monarch's SupervisionError has no public name; an endpoint's own is an ActorError
        raise ActorDiedError(why_ended(str(error))) from error


async def agreed(call: Awaitable[Any]) -> Any:
    """Return the result of a call that all ranks answer alike, taken from the first; errors as in `result`."""
    _, value = next(iter((await result(call)).items()))
    return value


def why_ended(report: str) -> str:
    """Describe a death in words, from Monarch's report."""
    last = (report.strip().splitlines() or ["for no known reason"])[-1].strip()
    if killed := re.search(r"Killed\(sig=(\d+)\)", last):
        memory = " (which is also what the kernel sends when memory runs out)" if killed[1] == "9" else ""
        return f"its process was killed by signal {killed[1]}{memory}"
    if "timeout waiting for message" in last:
        return "its process has stopped, or its host is lost: it does not answer"
    return last
