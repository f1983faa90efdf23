"""The pages of `forge-env view` over a run of 100,000 episodes: processor time of the server.

    python -m benchmarks view [--episodes 100000] [--folder PATH]

The run is made up (tests/forge_env/view/made.py): 8 episodes a group, 60 groups a step. Each figure is the processor
time of all threads of the process that makes the page, the smallest of the repeats; the first one of a page computes
what the others take from the answers that are kept until the index changes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from benchmarks.report import record, table
from forge_env.trajectory import TrajectoryWriter
from forge_env.trajectory_index import index_path
from forge_env.view.app import Pages
from forge_env.view.index import RunIndex
from forge_env.view.runs import Runs
from forge_env.view.server import Guard
from tests.forge_env.view.made import GROUP, episode, training_run

GROUPS = 60
PORT = 7000


def make(folder: Path, episodes: int) -> None:
    """A run of so many training episodes, most of them in one file."""
    training_run(folder, steps=max(10, episodes // (GROUP * GROUPS)), groups=1)
    chance = random.Random(1)
    records = folder / "trajectories" / "train.jsonl"
    records.unlink()
    index_path(records).unlink()
    with TrajectoryWriter(records) as writer:
        for number in range(episodes):
            group, member = divmod(number, GROUP)
            writer.write(episode(group, member, group // GROUPS, 0.3 + 0.6 * number / episodes, chance))


def opened(folder: Path, cache: Path) -> float:
    """Seconds to index a run."""
    started = time.process_time()
    RunIndex(folder, cache).update()
    return time.process_time() - started


async def measured(act: Callable[[], Awaitable[object]], repeats: int) -> tuple[float, float]:
    """Seconds of the first time, and of the quickest of the others."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        await act()
        found.append(time.process_time() - started)
    return found[0], min(found[1:])


async def pages(root: Path, cache: Path, repeats: int) -> list[list[object]]:
    shown = Pages(Runs(root, cache))
    guard = Guard(shown.application(), "t" * 40, lambda: PORT)
    rows: list[list[object]] = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=f"http://127.0.0.1:{PORT}") as client:
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
            ("runs", "/"),
        ):

            async def get(path: str = path) -> None:
                answer = await client.get(path)
                assert answer.status_code in (200, 303), answer.text

            once, again = await measured(get, repeats)
            rows.append([what, f"{1000 * once:.0f}", f"{1000 * again:.0f}"])
    shown.indexer.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root, cache = Path(place) / "runs", Path(place) / "cache"
        make(root / "big", args.episodes)
        records = root / "big" / "trajectories" / "train.jsonl"
        size, index_size = records.stat().st_size, index_path(records).stat().st_size
        rows: list[list[object]] = [["opened from index rows", f"{1000 * opened(root / 'big', cache):.0f}", ""]]
        rows += asyncio.run(pages(root, cache, args.repeats))
        index_path(records).unlink()
        rows.insert(1, ["opened without", f"{1000 * opened(root / 'big', Path(place) / 'other'):.0f}", ""])
    lines = table(["what", "first, ms of CPU", "again"], rows)
    print("\n".join(lines))
    if args.record:
        about = f"{args.episodes:,} episodes, {size / 1e6:.0f} MB, and {index_size / 1e6:.0f} MB of index rows."
        note = (
            "Without index rows the pages are there at once and the records are read in the background, newest first."
        )
        record("view", "Pages over a run", "make bench ARGS='view --record'", [about, "", *lines, "", note])


if __name__ == "__main__":
    main()
