"""Work that ends early when the person asks the run to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from forge_env.run import Run

T = TypeVar("T")


async def unless_stopped(run: Run, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None when `run` is asked to stop first: then it is cancelled, and has ended."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(run.stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
