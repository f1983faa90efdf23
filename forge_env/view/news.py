"""Change notifications for open pages, which then reload their content; meanwhile the rest of their run is indexed."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from forge_env.view.index import AT_ONCE
from forge_env.view.runs import Runs, RunView
from forge_env.watching import changes

LEAST_S = 1.0
"""Minimum seconds between two checks for changes: a live run writes many times a second."""
NEWEST = 20
"""Runs of a list that are watched."""
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
                if await asyncio.to_thread(_index, run):
                    await _first(anext(changed), ending)
                now = await asyncio.to_thread(_mark, runs, run)
                if now != before:
                    before, quiet = now, 0
                    yield f"event: news\ndata: {json.dumps(now)}\n\n"
                elif (quiet := quiet + 1) % QUIET == 0:
                    yield ": still here\n\n"
                await asyncio.wait((ending,), timeout=LEAST_S)
    finally:
        ending.cancel()


async def _first(coming: Awaitable[None], ending: asyncio.Future[Any]) -> None:
    """Wait for a change, or for the end."""
    waiting = asyncio.ensure_future(coming)
    try:
        await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def _index(run: RunView | None) -> bool:
    """Read more records without index rows; return whether there are no further ones."""
    if run is None or "index" not in run.__dict__:
        return True
    with suppress(OSError, sqlite3.Error):  # the page shows why
        return run.index.progress().whole or not run.index.update(AT_ONCE)
    return True


def _folders(runs: Runs, run: RunView | None) -> list[Path]:
    """List the folders to watch for changes of a page."""
    if run is not None:
        return [run.root, run.root / "trajectories"]
    return [runs.root, *(runs.path(name) for name in runs.names()[0][:NEWEST])]


def _mark(runs: Runs, run: RunView | None) -> str:
    """Return a value that changes whenever the content of the page does."""
    if run is not None:
        indexed = run.index.progress() if "index" in run.__dict__ else None
        return f"{run.stamp()} {run.state} {'' if indexed is None else indexed.indexed}"
    return " ".join(run.stamp() for name in runs.names()[0][:NEWEST] if (run := runs.get(name)))
