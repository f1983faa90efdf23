"""`forge-env plan`: estimate the resources of a recipe without starting it."""

from __future__ import annotations

import argparse
import os

from forge_env.cli.command import Parser
from forge_env.config.finding import read_run
from forge_env.config.reader import build, values
from forge_env.config.recipe import RunConfig


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.usage = "forge-env plan FILE [--gpus 8xH100] [--prompt N] [--reply N] [--a.b VALUE | a.b=VALUE ...]"
    parser.description = (
        "Say where a recipe's actors will be, what memory they take, how long a step is and why, and what the run "
        "costs (docs/plan.md). No GPU is needed, and nothing is started."
    )
    parser.word("FILE", "a YAML file, or the name of a bundled recipe (`forge-env config` lists them)")
    parser.keys(RunConfig)
    parser.add_argument("--gpus", metavar="NxKIND", help="GPUs that are there (default: H100, as many as are needed)")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of an episode that nobody samples")
    parser.add_argument("--reply", type=int, metavar="N", help="tokens of an episode that are sampled")
    parser.add_argument("--price", type=float, metavar="X", help="of a GPU for an hour, for the cost")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from forge_env.run.trainer import Question, load_trainer

    source = read_run(args.words[0], values(args.overrides, RunConfig), os.environ)
    config = build(RunConfig, source)
    with source.locating():
        question = Question(args.gpus, args.prompt, args.reply, args.price)
        for line in load_trainer(config.method).plan(config, question):
            print(line)
    return 0
