"""`forge-env hacks`: look for rewards that were not earned."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from forge_env.cli.command import Parser
from forge_env.errors import PluginError, UsageError
from forge_env.machine import user_path
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.hacks.findings import Findings, Judge

WIDTH = 80
"""Maximum columns of a line."""
SHOWN = 8
"""Maximum overpaid episodes listed; together with examples of signs, at most twice as many."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    from forge_env.hacks.findings import SAMPLE

    parser.description = (
        "Look for reward hacking in a run, an evaluation, or a folder of transcripts (trajectories, ATIF, OpenAI "
        "messages): a reward that rises faster than hidden tests or held-out scores, episodes that a second judge "
        "scores lower, and suspicious commands and texts of the agent."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of a run, an evaluation or transcripts")
    parser.add_argument(
        "--visible",
        metavar="METRIC",
        help="score that the agent can see (default: a metric named visible, or the reward)",
    )
    parser.add_argument(
        "--hidden",
        metavar="METRIC",
        help="score that it can't see (default: a metric named hidden, or the held-out score)",
    )
    parser.add_argument(
        "--judge", metavar="MODULE:FUNCTION", help="second judge: a function that maps a Trajectory to a score"
    )
    parser.add_argument(
        "--sample", type=int, default=SAMPLE, metavar="N", help="number of rewarded episodes that it scores"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--catalogue", action="store_true", help="also print the catalogue of signs")


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    from forge_env.hacks.findings import find

    if args.sample < 1:
        raise UsageError(f"--sample {args.sample} is not a number of episodes", fix="use 1 or more")
    judge = None if args.judge is None else load_judge(args.judge)
    root = recorded_folder(args.folder)
    findings = find(root, visible=args.visible, hidden=args.hidden, judge=judge, sample=args.sample)
    if args.json:
        json.dump(findings.as_json(), sys.stdout, indent=2, default=str)
        print()
        return 0
    for line in lines(findings, catalogue=args.catalogue):
        print(line)
    return 0


def recorded_folder(text: str) -> Path:
    """The folder that a command line names, in `runs/` if it isn't in the current folder."""
    for path in (user_path(text), Path("runs") / text):
        if path.exists():
            return path.absolute()
    raise UsageError(f"{one_line(text)} does not exist", fix="give a run, an evaluation, or a folder of transcripts")


def load_judge(name: str) -> Judge:
    """The function that `--judge` names."""
    from forge_env.plugins import load_plugin

    judge = load_plugin("forge_env.judges", name)
    if not callable(judge):
        raise PluginError(f"--judge {name} can't be called", fix="name a function of a Trajectory that returns a score")
    return cast("Callable[[Any], float]", judge)


def lines(found: Findings, *, catalogue: bool = False) -> Iterator[str]:
    """Format the findings in lines of `WIDTH` columns, with the verdict last."""
    if catalogue:
        yield from _catalogue()
    yield from _gap(found)
    yield from _judged(found)
    yield from _signs(found)
    yield from _named(found)
    notes = [f"{found.left_out:,} episodes were not searched"] if found.left_out else []
    notes += [f"{found.damaged:,} records can't be read"] if found.damaged else []
    yield from notes
    yield from _wrapped(f"{found.name}: {found.words}")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        " ".join(visible(text).split()), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = f"{one_line(cells[0], widths[0]):<{widths[0]}}"
    return " ".join(
        [first, *(f"{one_line(cell, width):>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))]
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _gap(found: Findings) -> Iterator[str]:
    if not found.windows:
        return
    widths = (14, 9, 16, 16, 8, 8)
    yield _row(["steps", "episodes", found.visible_name, found.hidden_name or "hidden", "gap", "±"], widths)
    for row in found.windows:
        steps = f"{row.first} to {row.last}" if row.last else "all"
        error = "-" if row.gap is None else _number(row.stderr)
        cells = [steps, f"{row.episodes:,}", _number(row.visible), _number(row.hidden), _number(row.gap), error]
        yield _row(cells, widths)
    if not found.hidden_name:
        yield from _wrapped("No hidden score; choose a metric with --hidden, or a second judge with --judge.")
    yield ""


def _judged(found: Findings) -> Iterator[str]:
    if (judged := found.judged) is None:
        return
    yield from _wrapped(
        f"Second judge on {judged.episodes} rewarded episodes: mean score {judged.mean_judged:.3f}, mean reward "
        f"{judged.mean_reward:.3f}; {judged.overpaid} scored below their reward"
        + (f"; failed on {judged.failed}, first: {one_line(judged.why)}" if judged.failed else "")
    )
    yield ""


def _signs(found: Findings) -> Iterator[str]:
    if not found.signs:
        return
    widths = (24, 9, 14, 20)
    yield _row(["sign", "episodes", "mean reward", "same task, without"], widths)
    for sign in found.signs:
        yield _row([sign.sign, f"{sign.episodes:,}", _number(sign.reward), _number(sign.others)], widths)
        yield from _wrapped(sign.reason, "    ")
    yield ""


def _named(found: Findings) -> Iterator[str]:
    named = [*found.paid[:SHOWN], *found.examples][: 2 * SHOWN]
    for example in named:
        score = "" if example.other is None else f", hidden or judged {example.other:.3f}"
        reward = "" if example.reward is None else f": reward {example.reward:.3f}{score}"
        yield one_line(f"{example.sign}: {example.id} ({example.task}){reward}", WIDTH)
        if example.text:
            yield f"    {one_line(example.text, WIDTH - 4)}"
    if named:
        yield ""


def _catalogue() -> Iterator[str]:
    from forge_env.hacks.catalogue import CATALOGUE

    for sign in CATALOGUE:
        yield from _wrapped(f"{sign.name} ({sign.where}): {sign.reason}")
    yield ""
