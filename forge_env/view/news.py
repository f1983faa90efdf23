"""Telling a page that is looked at of changes; it then asks for what it shows again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from forge_env.view.runs import Runs, RunView
from forge_env.watching import changes

LEAST_S = 1.0
"""Seconds between two looks at what was written: a live run writes many times a second."""
QUIET = 10
"""Looks without news after which a sign of life is sent."""


async def news(runs: Runs, run: RunView | None, ended: asyncio.Event) -> AsyncIterator[str]:
    """Server-sent events: one whenever something is written, a sign of life now and then, until `ended` is set.

    Args:
        runs: all of them.
        run: the one that is looked at; None: the list.
        ended: when no more is told.
    """
    before = await asyncio.to_thread(_mark, runs, run)
    yield "retry: 2000\nevent: hello\ndata: {}\n\n"
    ending = asyncio.ensure_future(ended.wait())
    quiet = 0
    try:
        async with aclosing(changes(_folders(runs, run))) as told:
            while not ending.done():
                coming = asyncio.ensure_future(anext(told))
                try:
                    await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not coming.done():
                        coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
                now = await asyncio.to_thread(_mark, runs, run)
                if now != before:
                    before, quiet = now, 0
                    yield f"event: news\ndata: {json.dumps(now)}\n\n"
                elif (quiet := quiet + 1) % QUIET == 0:
                    yield ": still here\n\n"
                await asyncio.wait((ending,), timeout=LEAST_S)
    finally:
        ending.cancel()


def _folders(runs: Runs, run: RunView | None) -> list[Path]:
    """Where something is written when a page has news."""
    if run is not None:
        return [run.root, run.root / "trajectories"]
    return [runs.root, *(runs.path(name) for name in runs.names(most=20).names)]


def _mark(runs: Runs, run: RunView | None) -> str:
    """Changes with what a page shows."""
    if run is not None:
        indexed = run.index.progress() if "index" in run.__dict__ else None
        return f"{run.stamp()} {run.is_held} {'' if indexed is None else indexed.indexed}"
    found = [(name, run.stamp()) for name in runs.names(most=20).names if (run := runs.get(name))]
    return f"{hash(tuple(found)) & 0xFFFFFFFFFFFF:x}"
