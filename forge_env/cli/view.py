"""`forge-env view`: show runs and evaluations in the browser."""

from __future__ import annotations

import argparse
import asyncio
import html
import sys
import tempfile
import webbrowser
from pathlib import Path

from forge_env.cli.command import Parser
from forge_env.errors import UsageError
from forge_env.interrupts import run_until_interrupted
from forge_env.machine import user_path

PORT = 7331


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Show runs and evaluations in the browser: episodes, curves, causes of reward changes, time. The server "
        "accepts connections from this machine only, needs no network, and changes nothing in the folder."
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="runs", help="folder of runs, or one run; omitted: runs"
    )
    parser.add_argument("--port", type=int, metavar="P", help=f"port to serve at (default: {PORT}, or a free one)")
    parser.add_argument("--no-browser", action="store_true", help="print the address instead of opening it")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    folder = user_path(args.folder).absolute()
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", fix="give the folder that holds your runs, or one of them")
    if args.port is not None and not 0 <= args.port < 65536:
        raise UsageError(f"{args.port} is not a port", fix="give a number from 1 to 65535")
    run_until_interrupted(_serve(folder, args.port, browser=not args.no_browser))
    return 0


async def _serve(folder: Path, port: int | None, *, browser: bool) -> None:
    from forge_env.view.app import Pages
    from forge_env.view.runs import Runs
    from forge_env.view.server import free_port, serve_pages

    with tempfile.TemporaryDirectory(prefix="forge-env-view-") as private:

        def ready(address: str) -> None:
            print(f"serving {folder} at {address} (Ctrl-C stops)", flush=True)
            if browser and sys.stdout.isatty():
                page = write_redirect(Path(private), address)
                asyncio.get_running_loop().run_in_executor(None, webbrowser.open, page.as_uri())

        chosen = free_port(PORT) if port is None else port
        await serve_pages(Pages(Runs(folder)), chosen, ready=ready)


def write_redirect(folder: Path, address: str) -> Path:
    """Write a page that leads the browser to `address`, whose token must not be among the browser's arguments.

    Every user of the machine can read those.
    """
    page = folder / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">', encoding="utf-8")
    return page
