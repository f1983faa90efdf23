"""Entry point of `forge-env`: its commands, error handling and exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is shown as one message with its fix; tracebacks
require `--debug` (or FORGE_ENV_DEBUG=1).
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

from forge_env import __version__
from forge_env.cli.command import Parser, report_error, tidy
from forge_env.errors import ConfigError, ForgeError, UsageError, root_cause, suggestion
from forge_env.redaction import console

LEAVE_S = 60
"""Maximum seconds for the interpreter to exit after a command has ended."""
LEAVE_INTERRUPTED_S = 5
"""The same after a signal, so that threads blocked in downloads or locks don't delay the exit."""
COMMANDS = {
    "train": "train a model on a recipe, or estimate what that takes",
    "rehearse": "simulate a recipe's run without its GPUs, and name the keys to change",
    "config": "print a recipe with every key explained",
    "info": "list environments, or describe one: tasks, tools, options, an example episode",
    "validate": "test an environment without a model",
    "grade": "measure how good an environment's tasks are: which wrong solutions its judge accepts",
    "play": "play an environment yourself",
    "serve": "serve an environment over OpenEnv and MCP",
    "new": "create an installable package with a new environment",
    "eval": "evaluate a model or policy on environments, or score an evaluation again",
    "compare": "compare two evaluations, paired by task",
    "view": "browse runs and evaluations in the browser",
    "show": "summarize a run, write its report, or follow it",
    "replay": "train the recorded steps of a run again, and compare to the bit",
    "hacks": "look for reward hacking in a run or in transcripts",
    "credit": "estimate what each tool call of a recorded episode was worth",
    "trajectory": "list recorded episodes, or print one as a conversation",
    "export": "export a model, episodes, a run or an environment to files, or upload it to a hub",
    "model": "describe or fetch a model, or convert one from llama.cpp's format",
    "job": "write or submit the files of a Slurm, Kubernetes or SkyPilot job",
    "worker": "let runs on other machines use this machine",
    "sandbox": "run code in a sandbox, and manage sandboxes",
    "doctor": "check the installation and this machine",
}
"""One-line descriptions of the commands; each command is a module of this folder."""
ALIASES = {
    **dict.fromkeys(("list", "ls", "envs", "environments", "describe"), "info [NAME]"),
    **dict.fromkeys(("plan", "estimate", "dry-run"), "train FILE --plan"),
    **dict.fromkeys(("simulate", "rehearsal"), "rehearse FILE"),
    **dict.fromkeys(("evaluate", "eval-set", "vf-eval"), "eval ENV --model MODEL"),
    **dict.fromkeys(("score", "rescore"), "eval --rescore DIR"),
    **dict.fromkeys(("tail", "log", "watch", "follow"), "show RUN --follow"),
    "report": "show RUN --format html",
    **dict.fromkeys(("trajectories", "trace", "transcript", "episode"), "trajectory RUN [ID]"),
    **dict.fromkeys(("init", "create", "scaffold"), "new NAME"),
    **dict.fromkeys(("grpo", "sft", "rl"), "train FILE"),
    **dict.fromkeys(("push", "publish", "upload"), "export FROM hub:OWNER/NAME"),
    **dict.fromkeys(("check", "verify", "test"), "validate NAME"),
}
"""Commands that users of other tools may try -> ours."""
DESCRIPTION = "Write an LLM agent environment once: evaluate models on it, train on it, run its code in sandboxes."
EXAMPLES = """\
first steps:
  forge-env doctor                                  check this machine, and say how to install what is missing
  forge-env info                                    list the installed environments
  forge-env train coding_rlvr                       train; results go to runs/
  forge-env train coding_rlvr seed=1 --name first   set any key of the recipe
  forge-env train runs/first/config.yaml --resume   continue a run
  forge-env config coding_rlvr                      explain every key of the recipe

`forge-env COMMAND --help` shows the arguments of a command.
"""


def build_parser(command: str | None = None) -> Parser:
    """Build the parser. Only `command` gets its arguments, because importing all modules would take time."""
    parser = Parser(prog="forge-env", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"forge-env {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks (anywhere on the command line)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for name, text in COMMANDS.items():
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == command:
            module = import_module(f"forge_env.cli.{name}")
            added.set_defaults(run=module.run, parser=added)
            module.add_arguments(added)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with console(arguments):
        return _main(arguments, last=argv is None)


def _main(arguments: list[str], *, last: bool) -> int:
    """Implement `main`; with `last`, make sure that the process exits afterwards."""
    from forge_env.interrupts import INTERRUPTED

    code = 1
    if last:  # registered first, so it runs last, before the destructors of libraries, which may block
        atexit.register(lambda: _leave(code) if code == INTERRUPTED else None)
    debug = "--debug" in arguments or os.environ.get("FORGE_ENV_DEBUG", "") not in ("", "0")
    try:
        with signals_interrupt():
            _find_own_modules()
            code = _run(arguments, debug)
            return code
    except SystemExit as end:  # --help, --version
        code = end.code if isinstance(end.code, int) else 0
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
        return code
    except BrokenPipeError:  # the reader closed the pipe, e.g. `forge-env info | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:  # noqa: BLE001 - the boundary of the program: one message instead of a traceback
        if debug:
            traceback.print_exc()
        cause = root_cause(error)
        report_error(cause)
        return cause.exit_code if isinstance(cause, ForgeError) else 1
    finally:
        if last:  # threads and exit handlers of libraries must not keep the process alive
            seconds = LEAVE_INTERRUPTED_S if code == INTERRUPTED else LEAVE_S
            timer = threading.Timer(seconds, _leave, [code])
            timer.daemon = True
            timer.start()
            signal.alarm(seconds + 1)  # if the interpreter is already too far gone to run the timer


def _leave(code: int) -> None:
    """Exit without finalizing the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader closed the pipe, or it is closed
            stream.flush()
    os._exit(code)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act like Ctrl-C (in the main thread), until `run_until_interrupted` takes over.

    Signals that are ignored (`nohup`) stay ignored.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    default = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in default:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in default:
            signal.signal(number, signal.SIG_DFL)


def _find_own_modules() -> None:
    """Add the current folder to `sys.path` for `module:Class`; it comes last, so that it shadows nothing."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder has been removed", fix="cd to one that exists") from error
    if here not in sys.path:
        sys.path.append(here)


def _run(arguments: list[str], debug: bool) -> int:
    arguments = [argument for argument in arguments if argument != "--debug"]
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        listed = f"commands: {', '.join(COMMANDS)}"
        fix = f"use forge-env {ALIASES[command]}" if command in ALIASES else suggestion(command, COMMANDS, listed)
        raise UsageError(f"there is no command {command!r}", fix=fix)
    parser = build_parser(command)
    args, rest = parser.parse_known_args(arguments)
    args.debug = debug
    if args.command is None:
        parser.print_help()
        return 0
    if args.parser.takes_keys:
        args.parser.read_rest(args, rest)
    elif rest:
        args.parser.refuse_flag(rest[0], f"unknown argument {rest[0]!r}")
    from forge_env.interrupts import say
    from forge_env.loop_guard import LoopGuard

    with LoopGuard(math.inf, 0.0, say):  # detects endless loops in environments, for every command
        try:
            code: int = args.run(args)
        except ConfigError as error:
            raise args.parser.with_flags(error) from error.__cause__
    if args.command != "train":
        tidy()
    return code
