"""Measure the pages of `forge-env view` on a run of 100,000 episodes: processor time of the server.

The run is made up, with 8 episodes per group and 60 groups per step (`tests/forge_env/view/made.py`). Each value is the
processor time of all threads of the server for one page, the minimum of the repeats. The first request of a page
computes answers that later ones take from a cache, until the index changes. Its value is the minimum over three
servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.frame import main, table
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn
from forge_env.trajectory_index import index_path
from forge_env.types import Message
from forge_env.view.app import Pages
from forge_env.view.index import RunIndex
from forge_env.view.rendering import static_files
from forge_env.view.runs import Runs
from forge_env.view.server import Guard
from tests.forge_env.view.made import GROUP, TOKENIZER, episode, reply, training_run

GROUPS = 60
LONG = "/run/long/t/eval/long"
"""Path of the page of the episode with 32,000 tokens."""
PORT = 7000
SERVERS = 3


def make(folder: Path, episodes: int) -> None:
    """Make a run with `episodes` training episodes, most of them in one file."""
    training_run(folder, steps=max(10, episodes // (GROUP * GROUPS)), groups=1)
    chance = random.Random(1)
    records = folder / "trajectories" / "train.jsonl"
    records.unlink()
    index_path(records).unlink()
    with TrajectoryWriter(records) as writer:
        for number in range(episodes):
            group, member = divmod(number, GROUP)
            writer.write(episode(group, member, group // GROUPS, 0.3 + 0.6 * number / episodes, chance))


def long_episode(folder: Path) -> None:
    """Make an evaluation with one episode of 32,000 sampled tokens in 16 turns."""
    chance = random.Random(2)
    turns = [
        Turn(
            [Message(role="user", content="Go on.")], reply(Message(role="assistant", content="On."), 2_000, 0, chance)
        )
        for _ in range(16)
    ]
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    with TrajectoryWriter(folder / "trajectories" / "eval.jsonl") as writer:
        writer.write(Trajectory("long", "made", "long", split="eval", turns=turns, reward=1.0))


def opened(folder: Path, repeats: int) -> float:
    """Return the seconds to index a run, as the minimum of the repeats."""
    times = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            started = time.process_time()
            RunIndex(folder, Path(cache)).update()
            times.append(time.process_time() - started)
    return min(times)


async def measured(act: Callable[[], Awaitable[object]], repeats: int) -> tuple[float, float]:
    """Return the seconds of the first call, and the minimum of the later ones."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        await act()
        times.append(time.process_time() - started)
    return times[0], min(times[1:])


def smallest(found: list[list[list[Any]]]) -> list[list[object]]:
    """Merge the rows of several servers: every value is the minimum over the servers."""
    result: list[list[object]] = []
    for what, *columns in (zip(*rows, strict=True) for rows in zip(*found, strict=True)):
        result.append([what[0], *("" if "" in same else min(same, key=float) for same in columns)])
    return result


async def pages(root: Path, cache: Path, repeats: int) -> list[list[object]]:
    """Measure the pages of one server that starts without an index."""
    shown = Pages(Runs(root, cache))
    started = time.process_time()
    shown.load()
    loaded = time.process_time() - started
    guard = Guard(shown.application(), "t" * 40, lambda: PORT)
    rows: list[list[object]] = [["loaded at the start of the server", f"{1000 * loaded:.0f}", ""]]
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(guard), base_url=f"http://127.0.0.1:{PORT}") as client:
        await client.get(f"/?token={'t' * 40}")
        first = (await client.get("/run/big/trajectories?kind=train")).text
        (name,) = re.findall(r'data-row="(/run/big/t/train/[^"]+)"', first)[:1]
        for what, path in (
            ("overview", "/run/big"),
            ("list", "/run/big/trajectories"),
            ("list by reward", "/run/big/trajectories?sort=-reward"),
            ("list, one outcome", "/run/big/trajectories?outcome=limit"),
            ("search, found often", "/run/big/trajectories?q=passed"),
            ("search, not there (one page of it)", "/run/big/trajectories?q=nowhere+in+it"),
            ("trajectory", name),
            ("group", "/run/big/g?kind=train&group=77"),
            ("32,000 tokens", f"{LONG}?tab=tokens"),
            ("runs", "/"),
        ):

            async def get(path: str = path) -> None:
                answer = await client.get(path)
                assert answer.status_code in (200, 303), answer.text

            once, again = await measured(get, repeats)
            rows.append([what, f"{1000 * once:.0f}", f"{1000 * again:.0f}"])
    return rows


def measure(args: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        root, cache = Path(args.folder or f"{scratch}/runs"), Path(scratch) / "cache"
        if not (root / "big").exists():
            make(root / "big", args.episodes)
            long_episode(root / "long")
        records = root / "big" / "trajectories" / "train.jsonl"
        size, index_size = records.stat().st_size, index_path(records).stat().st_size
        rows: list[list[object]] = [["opened from index rows", f"{1000 * opened(root / 'big', args.repeats):.0f}", ""]]
        rows += smallest([asyncio.run(pages(root, cache / str(n), args.repeats)) for n in range(SERVERS)])
    loaded = sum(len(content) for name, content in static_files().items() if not name.endswith(".txt"))
    return [
        *table(["what", "first, ms of CPU", "again"], rows),
        "",
        f"{args.episodes:,} episodes: {size / 1e6:.0f} MB of records, {index_size / 1e6:.0f} MB of index rows. "
        f"Scripts, styles and pictures of a page: {loaded / 1000:.0f} kB, not compressed.",
    ]


if __name__ == "__main__":
    main("Pages over a run", measure, episodes=100_000, repeats=6, folder="")
