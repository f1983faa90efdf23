"""`forge-env list`: list all environments, including those that can't be loaded."""

from __future__ import annotations

import argparse
import json

from forge_env.cli.command import Parser
from forge_env.registry import list_environments


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    """Print every environment; for a broken one, print the reason."""
    entries = list_environments()
    if args.json:
        shown = ("name", "target", "source", "summary", "needs", "error")
        print(json.dumps([{key: getattr(entry, key) for key in shown} for entry in entries], indent=2))
        return 0
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        needs = f" (needs {', '.join(entry.needs)})" if entry.needs else ""
        if len(entry.needs) == 1:
            needs = f" (needs {entry.needs[0]}: {entry.name}:{entry.needs[0].upper()})"
        print(f"{entry.name:<{width}}  {entry.summary if entry.error is None else 'BROKEN: ' + entry.error}{needs}")
        print(f"{'':<{width}}  from {entry.source} ({entry.target})")
    if not entries:
        print("no environment is installed; write one: forge-env new my_env")
    return 0
