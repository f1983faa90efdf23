"""`forge-env score`: score an evaluation's transcripts again with the current version of the environment."""

from __future__ import annotations

import argparse
import sys

from forge_env.cli.command import Parser, report_error
from forge_env.cli.eval import finish, show
from forge_env.evaluation.evaluation import Evaluation
from forge_env.evaluation.rescoring import rescore
from forge_env.evaluation.tables import counted
from forge_env.interrupts import INTERRUPTED, TERM_GRACE_S, run_until_interrupted, say
from forge_env.visible import visible


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = "Send the recorded messages to the current version of the environment, and score the result."
    parser.add_argument("folder", metavar="DIR", help="folder of an evaluation")
    parser.add_argument("-o", "--out", metavar="DIR", help="folder of the new scores (default: DIR-rescored)")


def run(args: argparse.Namespace) -> int:
    """Score the transcripts of a folder again."""
    out = args.out or f"{args.folder.rstrip('/')}-rescored"
    running: list[Evaluation] = []
    work = rescore(args.folder, out, stream=sys.stderr, on_start=running.append)
    try:
        rescored = run_until_interrupted(work, finish=lambda: finish(running), grace_s=TERM_GRACE_S)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    show(rescored.result)
    print(f"{counted(len(rescored.changed), 'score')} changed; forge-env compare {args.folder} {out}")
    for name, before, now in rescored.changed[:20]:
        print(f"  {visible(name)}: {before:g} -> {now:g}")
    if rescored.diverged:
        print(f"in {counted(len(rescored.diverged), 'sample')} the environment answered differently than recorded")
    if rescored.result.error is not None:
        report_error(rescored.result.error)
    for damage in rescored.damage:
        say(f"forge-env: {damage}")
    if rescored.unscored:
        say(f"forge-env: {counted(len(rescored.unscored), 'sample')} could not be scored again:")
        for name, reason in list(rescored.unscored.items())[:5]:
            say(f"  {name}: {reason}")
        say(f"  -> all are in {out}/rescored.json; the figures are of the others")
    return 0 if rescored.result.summary.status == "complete" and not rescored.unscored else 1
