"""`forge-env`: the parser, and how every command ends.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is one message with its fix; tracebacks are for
`--debug` (or FORGE_ENV_DEBUG=1). Modules that do the work are imported when their command runs: `--help` stays fast.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from forge_env import __version__
from forge_env.errors import ForgeError, UsageError, did_you_mean, root_cause

DESCRIPTION = "Write an LLM agent environment once: evaluate it, train on it, run its code in sandboxes."
EXAMPLES = """\
first steps:
  forge-env doctor                                  is everything here? what is missing, and how to get it
  forge-env list                                    environments to train on
  forge-env train coding_rlvr                       train; the run goes to runs/
  forge-env train coding_rlvr seed=1 --name first   any key of the recipe can be overridden
  forge-env train runs/first/config.yaml --resume   continue it
  forge-env config coding_rlvr                      every key of the recipe, explained

`forge-env COMMAND --help` explains a command.
"""
OTHER_PARSERS = (
    ("forge_env.cli.environments", "add_parsers"),
    ("forge_env.cli.evaluate", "add_parsers"),
    ("forge_env.cli.sandbox", "add_parser"),
)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors suggest what was probably meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """End with one message and exit code 2."""
        raise UsageError(message, fix=f"see {self.prog} --help")


def build_parser() -> tuple[Parser, list[str]]:
    """The whole command line, and the names of its commands."""
    parser = Parser(prog="forge-env", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"forge-env {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks (any place in the command line)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    _add_train(commands)
    _add_config(commands)
    for module, function in OTHER_PARSERS:
        if find_spec(module) is not None:
            getattr(import_module(module), function)(commands)
    doctor = commands.add_parser("doctor", help="check what is installed and what this machine can do")
    doctor.set_defaults(run=_lazy("forge_env.cli.doctor", "run_doctor"))
    return parser, list(commands.choices)


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train on a recipe",
        description="Train on a recipe. Any of its keys can be overridden: --grpo.steps 20, grpo.steps=20.",
        usage="forge-env train FILE [--a.b VALUE | a.b=VALUE ...] [--name NAME] [--resume] [--debug]",
        epilog="Ctrl-C once finishes cleanly and saves, twice stops now.",
    )
    train.add_argument("file", metavar="FILE", help="a YAML file, or the name of a bundled recipe (forge-env config)")
    train.add_argument("--name", help="the run goes to runs/NAME (default: the recipe's name and the time)")
    train.add_argument("--resume", action="store_true", help="continue the run --name from its last checkpoint")
    train.set_defaults(run=_lazy("forge_env.cli.train", "run_train"), takes_overrides=True)


def _add_config(commands: Any) -> None:
    config = commands.add_parser(
        "config",
        help="show a recipe with every key explained",
        description="Print the resolved recipe, every key explained; without FILE, list the bundled recipes.",
        usage="forge-env config [FILE] [--a.b VALUE | a.b=VALUE ...]",
    )
    config.add_argument("file", metavar="FILE", nargs="?", help="a YAML file, or the name of a bundled recipe")
    config.set_defaults(run=_lazy("forge_env.cli.recipes", "run_config"), takes_overrides=True)


def _lazy(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    """A command whose module is imported when it runs."""

    def run(args: argparse.Namespace) -> int:
        result: int = getattr(import_module(module), function)(args)
        return result

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("FORGE_ENV_DEBUG", "") not in ("", "0")
    try:
        _find_own_modules()
        return _run(arguments, debug)
    except KeyboardInterrupt:
        from forge_env.interrupts import INTERRUPTED

        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, e.g. `forge-env list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:  # noqa: BLE001 - the boundary of the program: one message instead of a traceback
        if debug:
            traceback.print_exc()
        cause = root_cause(error)
        report_error(cause)
        return cause.exit_code if isinstance(cause, ForgeError) else 1


def _find_own_modules() -> None:
    """Let `module:Class` of the current folder be found; it comes last, so that it hides nothing."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder has been removed", fix="cd to one that exists") from error
    if here not in sys.path:
        sys.path.append(here)


def _run(arguments: list[str], debug: bool) -> int:
    parser, known = build_parser()
    arguments = [argument for argument in arguments if argument != "--debug"]
    _check_command(known, arguments)
    args, extra = parser.parse_known_args(arguments)
    args.debug = debug
    if args.command is None:
        parser.print_help()
        return 0
    if getattr(args, "takes_overrides", False):
        args.overrides = extra
    elif extra:
        raise UsageError(f"unknown argument {extra[0]!r}", fix=f"see forge-env {args.command} --help")
    code: int = args.run(args)
    if args.command != "train":
        from forge_env.cli.tidy import tidy

        tidy()
    return code


def _check_command(known: Sequence[str], arguments: Sequence[str]) -> None:
    """Suggest the command that was probably meant."""
    given = next((argument for argument in arguments if not argument.startswith("-")), None)
    if given is not None and given not in known:
        guess = did_you_mean(given, known)
        fix = f"did you mean {guess!r}?" if guess else f"commands: {', '.join(known)}"
        raise UsageError(f"there is no command {given!r}", fix=fix)


def report_error(error: BaseException, hint: str = "this is a bug; --debug shows where") -> None:
    """One message on stderr, with the fix on a line of its own; `hint` stands in where the error knows none."""
    if isinstance(error, ForgeError):
        print(f"forge-env: {error.message}", file=sys.stderr)
        if error.fix:
            print(f"  -> {error.fix}", file=sys.stderr)
    elif isinstance(error, OSError):
        place = f": {error.filename}" if error.filename else ""
        print(f"forge-env: {error.strerror or error}{place}", file=sys.stderr)
    else:
        first = next(iter(str(error).strip().splitlines()), "")  # what other libraries add is for the log
        print(f"forge-env: {type(error).__name__}: {first}", file=sys.stderr)
        print(f"  -> {hint}", file=sys.stderr)
