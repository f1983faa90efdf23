"""`forge-env rehearse`: play a recipe's run without its GPUs, and name the keys to change."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import replace

from forge_env.cli.command import Parser, number
from forge_env.config.finding import read_run
from forge_env.config.reader import build, values
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.machine import user_path
from forge_env.run.rehearsal import Conditions, rehearse
from forge_env.visible import shown


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.usage = "forge-env rehearse FILE [--hosts N] [--like RUN | --stack] [--a.b VALUE | a.b=VALUE ...] [...]"
    parser.description = (
        "Simulate a recipe's run without its GPUs: the real loops and buffer, on a clock that takes the times of "
        "generation, training, tools and transfers from the plan or from a recorded run. Prints what goes wrong, with "
        "the key to change. With --stack, run all processes here, around a small model of the same family "
        "(docs/rehearsal.md). Exit code 1: something was found."
    )
    parser.word("FILE", "a YAML file, or the name of a bundled recipe (`forge-env config` lists them)")
    parser.keys(RunConfig)
    add = parser.add_argument
    add("--hosts", type=int, default=1, metavar="N", help="hosts")
    add("--gpus", metavar="NxKIND", help="GPUs of each host (default: 8xH100 if the recipe uses GPUs)")
    add("--cpus", type=int, metavar="N", help="processors of each host")
    add("--memory", type=number, metavar="GIB", help="main memory of each host")
    add("--disk", type=number, metavar="GIB", help="free space for the run folder")
    add("--disk-speed", type=number, default=1.0, metavar="GB/S", help="speed at which checkpoints are written")
    add("--prompt", type=int, metavar="N", help="tokens of an episode's first prompt")
    add("--reply", metavar="MEDIAN[:P95]", help="sampled tokens of an episode: median and 95th percentile")
    add("--turns", type=int, metavar="N", help="turns of an episode")
    add("--tool-s", type=number, metavar="X", help="seconds of the environment in each turn")
    add("--like", metavar="RUN", help="run folder whose lengths and times are used instead")
    add("--steps", type=int, metavar="N", help="training steps to simulate (default: 24)")
    add(
        "--stack",
        action="store_true",
        help="run the real processes on this machine's processors, with a small model; takes minutes",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Rehearse the recipe; return 1 if something was found."""
    conditions = _conditions(args)
    source = read_run(args.words[0], values(args.overrides, RunConfig), os.environ)
    config = build(RunConfig, source)
    output = sys.stderr if args.json else sys.stdout
    with source.locating():
        result = rehearse(
            config, replace(conditions, name=source.stem), lambda line: print(line, file=output, flush=True)
        )
    if args.json:
        json.dump(result.as_json(), sys.stdout, indent=1)
        print()
    else:
        print("\n".join(result.lines()))
    return int(bool(result.findings))


def _conditions(args: argparse.Namespace) -> Conditions:
    """Read the conditions.

    Raises:
        UsageError: a value is out of range.
    """
    for name in ("hosts", "cpus", "memory", "disk", "disk_speed", "prompt", "turns", "steps"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} {value:g} must be above 0")
    if args.tool_s is not None and args.tool_s < 0:
        raise UsageError(f"--tool-s {args.tool_s:g} must not be negative")
    if args.stack:
        simulated = ("gpus", "cpus", "memory", "disk", "prompt", "reply", "turns", "tool_s", "like", "steps")
        if given := [name for name in simulated if getattr(args, name) is not None]:
            flag = f"--{given[0].replace('_', '-')}"
            raise UsageError(f"{flag} is for simulations; --stack runs real processes", fix=f"leave {flag} out")
    lengths = [name for name in ("prompt", "reply", "turns", "tool_s") if getattr(args, name) is not None]
    if args.like is not None and lengths:
        flag = f"--{lengths[0].replace('_', '-')}"
        raise UsageError(f"{flag} and --like both say how long episodes are", fix=f"leave {flag} or --like out")
    reply, p95 = _reply(args.reply)
    names = ("hosts", "gpus", "cpus", "prompt", "turns", "tool_s", "steps", "stack")
    return Conditions(
        **{name: getattr(args, name) for name in names},
        memory_gb=args.memory,
        disk_gb=args.disk,
        disk_speed=args.disk_speed * 1e9,
        reply=reply,
        reply_p95=p95,
        like=None if args.like is None else user_path(args.like),
    )


def _reply(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    median, _, p95 = text.partition(":")
    if not re.fullmatch(r"0*[1-9][0-9]{0,9}(:[0-9]{1,10})?", text, re.ASCII):
        raise UsageError(f"--reply {shown(text)} is not MEDIAN or MEDIAN:P95", fix="for example --reply 900:2500")
    if p95 and int(p95) < int(median):
        raise UsageError(f"--reply {text}: the 95th percentile is below the median", fix=f"for example {p95}:{median}")
    return int(median), int(p95) if p95 else None
