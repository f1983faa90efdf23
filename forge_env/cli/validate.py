"""`forge-env validate`: check an environment and print every check as it finishes."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from forge_env.cli.command import Parser, add_environment, environment_options
from forge_env.figures import duration
from forge_env.interrupts import run_until_interrupted, say
from forge_env.loop_guard import LoopGuard
from forge_env.registry import make
from forge_env.sandbox.engines import LazyEngine
from forge_env.validation.checks import NUM_TASKS, Check, Validator
from forge_env.visible import visible

PATIENCE_S = 20.0
DOING = {"reset": "reset and setup", "environment": "step (tools, scoring)", "close": "close and cleanup"}
MARKS = {"ok": "ok", "note": "--", "open": "??", "failed": "!!"}


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    add_environment(parser)
    parser.add_argument("-n", "--num-tasks", type=int, default=NUM_TASKS, metavar="N", help="tasks of each split")


def run(args: argparse.Namespace) -> int:
    """Print every check as it finishes, then a verdict; return 1 if a check failed."""
    name, options = environment_options(args)
    checks = run_until_interrupted(_validate(name, options, args))
    print(f"\n{name}: {verdict(checks)}")
    return 1 if any(check.status == "failed" for check in checks) else 0


def verdict(checks: Sequence[Check]) -> str:
    """Summarize the checks; "sound" if all were made and none failed."""
    if failed := sum(check.status == "failed" for check in checks):
        return f"{failed} check(s) failed"
    if unmade := [check.name for check in checks if check.status == "open"]:
        return f"no check failed; not checked: {'; '.join(unmade)}"
    return "sound"


async def _validate(name: str, options: dict[str, Any], args: argparse.Namespace) -> list[Check]:
    checks: list[Check] = []
    async with LazyEngine(args.sandbox, docker_host=args.docker_host) as engine:
        validator = Validator(lambda: make(name, sandboxes=engine, **options), num_tasks=args.num_tasks)
        with LoopGuard(PATIENCE_S, 0.0, say, at_once=True), _reporting_slow_tasks(validator):
            async for check in validator.run():
                checks.append(check)
                print(f"{MARKS[check.status]} {check.name}: {visible(check.detail)}", flush=True)
    return checks


@contextmanager
def _reporting_slow_tasks(validator: Validator) -> Iterator[None]:
    """Print slow tasks from a thread, so that they are shown even if the environment blocks the event loop."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PATIENCE_S):
            task, doing, waited_s = validator.longest_wait()
            if waited_s >= PATIENCE_S:
                where = DOING.get(doing, doing)
                text = f"   task {task!r}: in {where} for {duration(waited_s)}; Ctrl-C stops"
                print(text, file=sys.stderr, flush=True)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
