"""`forge-env config`: print a resolved recipe with documentation of every key."""

from __future__ import annotations

import argparse
import os

from forge_env.cli.command import Parser
from forge_env.config.finding import bundled_recipes, read_run
from forge_env.config.reader import build, render, values
from forge_env.config.recipe import RunConfig


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.usage = "forge-env config [FILE] [--a.b VALUE | a.b=VALUE ...]"
    parser.description = (
        "Print the complete recipe that `train` would run, with every key explained. Without FILE, list the bundled "
        "recipes."
    )
    parser.word("FILE", "a YAML file, or the name of a bundled recipe", required=False)
    parser.keys()


def run(args: argparse.Namespace) -> int:
    """Print the recipe, or the names of the bundled ones."""
    if not args.words:
        for name in bundled_recipes():
            print(name)
        return 0
    source = read_run(args.words[0], values(args.overrides, RunConfig), os.environ)
    print(render(build(RunConfig, source)), end="")
    return 0
