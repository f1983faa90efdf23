"""`forge-env compare`: statistical comparison of two evaluations."""

from __future__ import annotations

import argparse
import json
import sys

from forge_env.cli.command import Parser, number
from forge_env.config.evaluation import CONFIDENCE
from forge_env.evaluation import comparison
from forge_env.evaluation.tables import print_tables
from forge_env.interrupts import say


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Compare evaluation B with A on the tasks that both have: paired difference, interval and permutation test."
    )
    parser.add_argument("a", metavar="A", help="folder of the baseline")
    parser.add_argument("b", metavar="B", help="folder of the other evaluation")
    parser.add_argument("--score", help="reward, or the name of a metric (default: that of A)")
    parser.add_argument("--confidence", type=number, default=CONFIDENCE, help="confidence level of the intervals")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compare two folders."""
    result = comparison.compare_folders(args.a, args.b, score=args.score, confidence=args.confidence)
    for damage in result.damage:
        say(f"forge-env: {damage}")
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print_tables(comparison.tables(result), comparison.FOOTNOTES, sys.stdout)
    return 0
