"""Calls of endpoints; nothing is imported before the first call, so that a process can prepare for Monarch."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any


async def result(call: Awaitable[Any]) -> Any:
    """What a remote call returns; what it raises is raised here as it was raised there."""
    from monarch.actor import ActorError

    try:
        return await call
    except ActorError as error:
        if isinstance(error.exception, Exception):
            raise error.exception from error
        raise  # a task cancelled there is no cancellation here


async def agreed(call: Awaitable[Any]) -> Any:
    """What all ranks of one actor return alike, of which the first's is taken; errors as in `result`."""
    _, value = next(iter((await result(call)).items()))
    return value
