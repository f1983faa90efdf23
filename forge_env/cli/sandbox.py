"""`forge-env sandbox run|build|ps|reap|bench|audit`: the command line's parser; the work is in `sandbox_commands`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

LIMITS_HELP = "wall_s, cpu_s, memory_mb, processes, file_size_mb, open_files, output_bytes"


def add_parser(commands: Any) -> None:
    """Add `sandbox` and its commands to an argparse subparsers object."""
    sandbox = commands.add_parser("sandbox", help="run code in a sandbox, and look after sandboxes")
    actions = sandbox.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    run = actions.add_parser(
        "run",
        help="run a program in a sandbox",
        description="Run a Python program (or a .sh script) in a fresh sandbox; ends with the program's exit code "
        "(124: timed out, 137: out of memory or killed).",
    )
    run.add_argument("file", metavar="FILE", help="a .py or .sh file, or - for Python on standard input")
    run.add_argument(
        "--limit", action="append", default=[], metavar="KEY=VALUE", help=f"bounds on the program: {LIMITS_HELP}"
    )
    run.add_argument("--image", default="python", help="image to run in (default: python)")
    run.add_argument("--network", action="store_true", help="let the program reach the network")
    run.add_argument(
        "--allow", action="append", default=[], metavar="HOST[:PORT]", help="let it reach this host over HTTP and HTTPS"
    )
    _finish(run, "run_program")

    build = actions.add_parser("build", help="build the image where it is missing")
    build.add_argument("--image", help="image, or folder with a Dockerfile, to put the runner into (default: python)")
    build.add_argument("--base-image", help="public base of the bundled image, such as python:3.12-slim")
    _finish(build, "run_build")

    ps = actions.add_parser("ps", help="list running sandboxes")
    ps.set_defaults(run=_lazy("run_ps"))
    reap = actions.add_parser("reap", help="remove what dead owners left")
    reap.add_argument("--images", action="store_true", help="and the images of other versions that nobody uses")
    reap.set_defaults(run=_lazy("run_reap"))

    bench = actions.add_parser("bench", help="measure sandboxes on this machine")
    bench.add_argument("--seconds", type=float, default=5.0, help="length of the throughput part (default: 5)")
    bench.add_argument("--concurrency", type=int, default=None, help="sandboxes at once (default: two per CPU)")
    _finish(bench, "run_bench")

    audit = actions.add_parser(
        "audit",
        help="attack a sandbox on this machine and print what held",
        description="Run the catalogue of hostile programs (about 160; one to three minutes) against a sandbox of this "
        "machine, beside a neighbour that must not notice, and print what held. Ends with 1 when something did not. "
        "Run it after changing the kernel, the daemon or an image, as the user who will run sandboxes.",
    )
    audit.add_argument(
        "--group", action="append", metavar="GROUP", help="only escape, starvation, leftovers, network or cheating"
    )
    audit.add_argument("--attack", action="append", metavar="NAME", help="only this program; --list shows the names")
    audit.add_argument("--list", action="store_true", help="list the programs and what they try; run nothing")
    _finish(audit, "run_audit")


def _finish(parser: argparse.ArgumentParser, function: str) -> None:
    parser.add_argument("--engine", default="auto", help="auto (default), docker, local")
    parser.set_defaults(run=_lazy(function))


def _lazy(function: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        result: int = getattr(import_module("forge_env.cli.sandbox_commands"), function)(args)
        return result

    return run
