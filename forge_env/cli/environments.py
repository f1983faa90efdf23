"""`forge-env list`, `info`, `validate`, `new`, `play` and `serve`: environments at the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any


def add_parsers(commands: Any) -> None:
    """Add the commands to an argparse subparsers object; their modules are imported when they run."""
    listing = commands.add_parser("list", help="list installed environments")
    listing.add_argument("--json", action="store_true", help="machine-readable")
    listing.set_defaults(run=_lazy("forge_env.cli.describe", "run_list"))

    info = _on_environment(commands, "info", "tasks, tools with schemas, limits, options, an example episode")
    info.add_argument("--json", action="store_true", help="machine-readable, without the example episode")
    info.add_argument("--no-example", action="store_true", help="leave the example episode out")
    info.set_defaults(run=_lazy("forge_env.cli.describe", "run_info"), takes_overrides=True)

    validate = _on_environment(commands, "validate", "prove that the environment is sound, without a model")
    validate.add_argument("--tasks", type=int, default=20, metavar="N", help="tasks of each split (default: 20)")
    validate.set_defaults(run=_lazy("forge_env.cli.describe", "run_validate"), takes_overrides=True)

    play = _on_environment(commands, "play", "be the agent yourself")
    play.add_argument("--split", help="split of the task (default: the first)")
    play.add_argument("--index", type=int, default=0, metavar="I", help="index of the task (default: 0)")
    play.set_defaults(run=_lazy("forge_env.cli.play", "run_play"), takes_overrides=True)

    serve = _on_environment(commands, "serve", "serve it over OpenEnv's protocol")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: 8000)")
    serve.add_argument("--max-sessions", type=int, default=64, metavar="N", help="episodes at once (default: 64)")
    serve.add_argument(
        "--step-timeout", type=float, default=300.0, metavar="S", help="seconds of a step (default: 300)"
    )
    serve.add_argument("--idle-timeout", type=float, default=1800.0, metavar="S", help="seconds of silence (1800)")
    serve.add_argument("--reconnect", type=float, default=60.0, metavar="S", help="seconds to come back in (60)")
    serve.set_defaults(run=_lazy("forge_env.cli.serve", "run_serve"), takes_overrides=True)

    new = commands.add_parser("new", help="write an installable package with a new environment")
    new.add_argument("name", metavar="NAME", help="name of the environment and its package")
    new.add_argument(
        "--kind",
        choices=("tools", "single", "sandbox"),
        default="tools",
        help="with tools (default), one turn, or a sandbox",
    )
    new.add_argument("--openenv", action="store_true", help="add openenv.yaml and the application it names")
    new.add_argument("--dir", default=".", metavar="DIR", help="where its folder goes (default: here)")
    new.set_defaults(run=_lazy("forge_env.cli.new", "run_new"))


def _on_environment(commands: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}. Options of the environment: --key VALUE or key=VALUE.",
        usage=f"forge-env {name} NAME [--key VALUE | key=VALUE ...] [--sandbox ENGINE] [...]",
    )
    parser.add_argument("name", metavar="NAME", help="a registered environment, or module:Class")
    parser.add_argument("--sandbox", default="auto", metavar="ENGINE", help="auto (default), docker, local")
    return parser


def _lazy(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        result: int = getattr(import_module(module), function)(args)
        return result

    return run
