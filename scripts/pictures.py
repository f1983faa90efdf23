"""The pictures of the pages in docs/view, taken anew: `make pictures ARGS=runs/first`.

    python scripts/pictures.py RUN [--out FOLDER] [--all]

RUN is a finished training run of a recipe that uses a tool. Three runs more are made up (tests/forge_env/view/made.py):
one that learned, one that collapsed, one whose reward is hacked. `--all` takes every view of all four in each width,
light and dark, to look at; docs/view holds a few of them. It needs Chromium, as the tests of the pages do.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.forge_env.view.made import training_run  # noqa: E402

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
Scheme = Literal["light", "dark"]
READY = {"[data-charts]": "[data-charts][data-drawn]", "[data-timeline]": "[data-timeline][data-drawn]"}
READY["[data-tokens]"] = "[data-tokens][data-painted]"
"""Selector of an asynchronous element -> selector that matches once it is drawn."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: its name, the path of the page, and the viewport."""

    name: str
    path: str
    width: int = 1280
    height: int = 900
    scheme: Scheme = "light"


def make_runs(root: Path) -> None:
    """Create the three made-up runs, under neutral names."""
    training_run(root / "run-a", steps=40, groups=4, start=0.35, end=0.85, seed=11)
    training_run(root / "run-b", steps=40, groups=4, start=0.6, end=0.15, seed=12)
    training_run(root / "run-c", steps=40, groups=4, start=0.3, end=0.95, seed=13, hacked=True)
    for name in ("run-a", "run-c"):  # only run-b has a doubtful entry in its contract
        path = root / name / "contract.jsonl"
        lines = [line for line in path.read_text().splitlines(keepends=True) if '"doubtful"' not in line]
        path.write_text("".join(lines))


def chosen(run: str, episode: str, group: str) -> list[Picture]:
    """The pictures in docs/view."""
    return [
        Picture("runs", "/", height=420),
        Picture("overview", run),
        Picture("trajectories", f"{run}/trajectories?kind=train&sort=-reward"),
        Picture("trajectory", episode),
        Picture("tokens", f"{episode}?tab=tokens", scheme="dark"),
        Picture("group", group),
        Picture("time", f"{run}/time"),
        Picture("learned", "/run/run-a"),
        Picture("collapsed", "/run/run-b", scheme="dark"),
        Picture("hacked", "/run/run-c"),
        Picture("phone", "/run/run-c", 360, 1500, "dark"),
        Picture("wide", run, 2560, 1300, "dark"),
    ]


def everything(run: str, episode: str, group: str) -> list[Picture]:
    """Every view, in every width, light and dark."""
    views = {
        "runs": "/", "a": "/run/run-a", "b": "/run/run-b", "c": "/run/run-c", "run": run,
        "list": f"{run}/trajectories", "failures": "/run/run-c/trajectories?outcome=unsolved", "episode": episode,
        "tokens": f"{episode}?tab=tokens", "raw": f"{episode}?tab=raw", "group": group, "time": f"{run}/time",
        "evaluations": f"{run}/evaluations", "recipe": f"{run}/recipe", "log": f"{run}/log",
        "compare": "/compare?runs=run-a,run-b",
    }  # fmt: skip
    schemes: tuple[Scheme, ...] = ("light", "dark")
    return [
        Picture(f"{name}-{width}-{scheme}", path, width, {360: 2600, 1280: 1600, 2560: 1400}[width], scheme)
        for name, path in views.items()
        for width in (360, 1280, 2560)
        for scheme in schemes
    ]


@contextmanager
def shown(root: Path, **environment: str) -> Iterator[tuple[str, Browser]]:
    """Start `forge-env view` on a folder with extra environment variables; yields its first address and a browser."""
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


def take(browser: Browser, address: str, pictures: list[Picture], out: Path) -> None:
    """Take screenshots of the pages of a server."""
    for picture in pictures:
        context = browser.new_context(
            viewport={"width": picture.width, "height": picture.height},
            color_scheme=picture.scheme,
            reduced_motion="reduce",
        )
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(address)
        page.goto(address.partition("/?")[0] + picture.path)
        page.wait_for_selector("body[data-ready]")
        for there, in_the_end in READY.items():
            if page.locator(there).count():
                page.wait_for_selector(in_the_end)
        page.screenshot(path=out / f"{picture.name}.png")
        context.close()


def addresses(browser: Browser, address: str, run: str) -> tuple[str, str]:
    """Paths of an episode with a tool call, and of a group with different rewards."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    page.goto(address.partition("/?")[0] + f"{run}/trajectories?kind=train&outcome=full&sort=calls")
    episode = page.locator("[data-row]").first.get_attribute("data-row")
    page.goto(address.partition("/?")[0] + f"{run}/trajectories?kind=train&outcome=wrong&sort=calls")
    for row in [row.get_attribute("data-row") for row in page.locator("[data-row]").all()]:
        page.goto(address.partition("/?")[0] + (row or "/"))
        if page.locator(".group .pill.good").count() > 1:
            break
    group = page.locator("[data-group]").get_attribute("href")
    context.close()
    assert episode is not None
    assert group is not None
    return episode, group


def main() -> None:
    """Create the runs and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished training run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "view")
    parser.add_argument("--all", action="store_true", help="every view, in every width, light and dark")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]", "-", args.run.resolve().name)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "runs"
        shutil.copytree(args.run, root / name)
        make_runs(root)
        with shown(root, FORGE_ENV_CACHE=str(Path(temporary) / "cache"), HOME=temporary) as (address, browser):
            episode, group = addresses(browser, address, f"/run/{name}")
            taken = (everything if args.all else chosen)(f"/run/{name}", episode, group)
            take(browser, address, taken, args.out)
    print(f"{len(taken)} pictures in {args.out}")


if __name__ == "__main__":
    main()
