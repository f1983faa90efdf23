"""Measure the pages of `forge-env view` on a run of 100,000 episodes: processor time of server and browser.

    python -m benchmarks view [--episodes 100000] [--folder PATH] [--record]

The run is synthetic (tests/forge_env/view/made.py): 8 episodes per group, 60 groups per step. Each value is the
processor time of all threads of the server process for one page, as the minimum of the repeats. The first request of a
page computes answers that later requests take from a cache, which is valid until the index changes; its value is the
minimum over three servers. "After a change" is again a first request, after 8 new episodes. Resources that the server
loads before the first request (templates, numpy, lexers) have a separate row.

32,000 tokens are drawn in headless Chromium: processor time of the page's main thread (script, style, layout and paint,
as in the DevTools protocol's TaskDuration), from the click on "Tokens" until they are coloured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

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


@contextmanager
def shown(root: Path, **environment: str) -> Iterator[tuple[str, Browser]]:
    """Start `forge-env view` on a folder with extra environment variables; yields its first address and a browser."""
    from playwright.sync_api import sync_playwright

    command = [Path(sys.executable).with_name("forge-env"), "view", root, "--no-browser", "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process,
        sync_playwright() as playwright,
    ):
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rsplit(" at ", 1)[1].split()[0]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            yield address, browser
            browser.close()
        finally:
            process.terminate()


def drawn(root: Path, cache: Path, path: str, repeats: int) -> tuple[float, float]:
    """Return the milliseconds of page work to draw the tokens of an episode, and to recolour them."""

    def worked(session: CDPSession) -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1000 * float(next(item["value"] for item in metrics if item["name"] == "TaskDuration"))

    first, again = [], []
    with shown(root, FORGE_ENV_CACHE=str(cache)) as (address, browser):
        for _ in range(repeats):
            page = browser.new_page()
            page.set_default_timeout(60_000)
            page.goto(address, wait_until="load")
            page.goto(address.partition("/?")[0] + path, wait_until="load")
            page.wait_for_selector("body[data-ready]")
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = worked(session)
            page.get_by_role("link", name="Tokens").click()
            page.wait_for_selector("[data-tokens][data-painted]")
            page.screenshot()
            first.append(worked(session) - before)
            before = worked(session)
            page.get_by_label("policy version").check()
            page.wait_for_url("**colour=version**")
            again.append(worked(session) - before)
            page.close()
    return min(first), min(again)


def append(folder: Path, version: int) -> None:
    """Append 8 episodes of a new group to the run."""
    records = folder / "trajectories" / "train.jsonl"
    number = records.stat().st_size
    chance = random.Random(number)
    with TrajectoryWriter(records) as writer:
        for member in range(GROUP):
            writer.write(episode(1_000_000_000 + number, member, version, 0.9, chance))


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


async def pages(root: Path, cache: Path, repeats: int, version: int) -> list[list[object]]:
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
        changed = []
        for _ in range(repeats):
            append(root / "big", version)
            started = time.process_time()
            assert (await client.get("/run/big")).status_code == 200
            changed.append(time.process_time() - started)
        rows.insert(2, ["overview after a change", f"{1000 * min(changed):.0f}", ""])
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
        version = args.episodes // (GROUP * GROUPS)
        rows += smallest([asyncio.run(pages(root, cache / str(n), args.repeats, version)) for n in range(SERVERS)])
        tokens, recoloured = drawn(root, cache, LONG, args.repeats)
        rows.append(["32,000 tokens, in the browser", f"{tokens:.0f}", ""])
        rows.append(["coloured by something else", f"{recoloured:.0f}", ""])
        index_path(records).rename(Path(scratch) / "index")
        rows.insert(1, ["opened without", f"{1000 * opened(root / 'big', 1):.0f}", ""])
        shutil.move(Path(scratch) / "index", index_path(records))
    loaded = sum(len(content) for name, content in static_files().items() if not name.endswith(".txt"))
    return [
        f"{args.episodes:,} episodes, {size / 1e6:.0f} MB, and {index_size / 1e6:.0f} MB of index rows.",
        "",
        *table(["what", "first, ms of CPU", "again"], rows),
        "",
        "Without index rows the pages are there at once and the records are read in the background. Of the 32,000 "
        "tokens the turns in sight are drawn; the others are when they come into sight. On two cores, what others do "
        "beside it makes these figures larger.",
        "",
        f"Scripts, styles and pictures of a page weigh {loaded / 1000:.0f} kB, not compressed.",
    ]


if __name__ == "__main__":
    main("Pages over a run", measure, episodes=100_000, repeats=6, folder="")
