"""Change notifications for open pages, which then reload their content."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from forge_env.view.runs import Runs, RunView
from forge_env.watching import changes

LEAST_S = 1.0
"""Minimum seconds between two checks for changes: a live run writes many times a second."""
QUIET = 10
"""Number of checks without changes after which a keep-alive comment is sent."""


async def news(runs: Runs, run: RunView | None, ended: asyncio.Event) -> AsyncIterator[str]:
    """Yield server-sent events until `ended` is set: one after each change, and occasional keep-alive comments."""
    before = await asyncio.to_thread(_mark, runs, run)
    yield "retry: 2000\nevent: hello\ndata: {}\n\n"
    ending = asyncio.ensure_future(ended.wait())
    quiet = 0
    try:
        async with aclosing(changes(_folders(runs, run))) as changed:
            while not ending.done():
                coming = asyncio.ensure_future(anext(changed))
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
    """List the folders to watch for changes of a page."""
    if run is not None:
        return [run.root, run.root / "trajectories"]
    return [runs.root, *(runs.path(name) for name in runs.names(most=20).names)]


def _mark(runs: Runs, run: RunView | None) -> str:
    """Return a value that changes whenever the content of the page does."""
    if run is not None:
        indexed = run.index.progress() if "index" in run.__dict__ else None
        return f"{run.stamp()} {run.is_held} {'' if indexed is None else indexed.indexed}"
    stamps = [(name, run.stamp()) for name in runs.names(most=20).names if (run := runs.get(name))]
    return f"{hash(tuple(stamps)) & 0xFFFFFFFFFFFF:x}"
