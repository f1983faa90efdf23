"""`forge-env play`: play an episode as the agent."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from forge_env.cli.command import Parser, add_environment, environment_options
from forge_env.cli.info import earned, show
from forge_env.concurrency import result_of, start_in_thread
from forge_env.endpoint.opponents import Named, open_opponents
from forge_env.environment.base import resolve_task
from forge_env.environment.optional import seats_of
from forge_env.errors import UsageError
from forge_env.interrupts import run_until_interrupted
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.registry import make
from forge_env.rewards.reasons import score_lines
from forge_env.rollout.episode import run_episode
from forge_env.sandbox.engines import LazyEngine
from forge_env.tasks.splits import check_split
from forge_env.types import FunctionCall, Message, Observation, ToolCall, ToolSpec
from forge_env.visible import one_line

COMMAND = re.compile(r"/\w*(\s|$)")
HELP = """\
You are the agent. Type a message and end it with an empty line. Commands, each on its own line:
  /call TOOL {"argument": value}   add a tool call to the message (repeat for parallel calls)
  /tools                           list the tools
  /quit                            stop
To start a line of the message with /, type //.
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    add_environment(parser)
    parser.add_argument("--split", help="split of the task (default: the first)")
    parser.add_argument("--index", type=int, default=0, metavar="I", help="index of the task")
    parser.add_argument("--seat", metavar="SEAT", help="seat to play; --against plays the others (default: all)")
    parser.add_argument("--against", metavar="PLAYER", help="player of the other seats: random, or module:function")


def run(args: argparse.Namespace) -> int:
    """Play one episode on standard input and output."""
    name, options = environment_options(args)
    env = make(name, **options)
    task = resolve_task(env, None, {"split": check_split(env, args.split), "index": args.index})
    against = _against(name, seats_of(env), args.seat, args.against)
    print(HELP)

    async def play() -> None:
        async with LazyEngine(args.sandbox, docker_host=args.docker_host) as engine, AsyncExitStack() as stack:
            trajectory = await run_episode(
                lambda: make(name, sandboxes=engine, **options),
                Person(),
                task=task,
                seed=args.index,
                opponents=await open_opponents(stack, against, "--against"),
            )
        for message in trajectory.final_observation:
            print(show(message))
        ended = f"truncated ({trajectory.truncation})" if trajectory.truncated else "ended"
        print(f"\n{ended}: {earned(trajectory)}  {json.dumps(trajectory.metrics)}")
        for line in filter(None, [trajectory.reason, *trajectory.failures, *score_lines(trajectory.scores)]):
            print(one_line(line, 400))
        if not trajectory.valid:
            raise UsageError(f"the episode could not be played: {trajectory.error}", fix="see forge-env doctor")

    try:
        run_until_interrupted(play())
    except EOFError:
        print("\nstopped")
    return 0


def _against(name: str, seats: tuple[str, ...], seat: str | None, player: str | None) -> Named:
    """Map the other seats to their player."""
    if seat is None and player is None:
        return {}
    if seat not in seats:
        fix = f"its seats: {', '.join(seats)}" if seats else "leave --seat and --against out"
        raise UsageError(f"{name} has no seat {seat!r}" if seat else "--against needs --seat", fix=fix)
    if player is None:
        raise UsageError("--seat needs opponents", fix="add --against random or --against module:function")
    return dict.fromkeys((other for other in seats if other != seat), player)


class Person(Policy):
    """A policy that reads its replies from the terminal."""

    def __init__(self) -> None:
        self._lines = Lines(sys.stdin.fileno())

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a session; the same person plays every seat."""
        return _Playing(self._lines, tools)


class _Playing(PolicySession):
    def __init__(self, lines: Lines, tools: list[ToolSpec]) -> None:
        self._lines = lines
        self._tools = tools

    async def reply(self, observation: Observation) -> Reply:
        """Print the new messages and read a reply; raise `EOFError` if the person stops."""
        for message in observation:
            print(show(message), flush=True)
        return Reply(message=await read_message(self._lines, self._tools))


class Lines:
    """Asynchronous reader of lines from a terminal, pipe or file; waiting doesn't block the event loop."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._held = b""

    async def next(self) -> str:
        """Return the next line with its line feed, which the last line may lack; empty at the end of input."""
        while b"\n" not in self._held:
            more = await result_of(start_in_thread(partial(os.read, self._descriptor, 65536)))
            if not more:
                break
            self._held += more
        line, end, self._held = self._held.partition(b"\n")
        return (line + end).decode("utf-8", "replace")


async def read_message(source: Lines, tools: Sequence[ToolSpec]) -> Message:
    """Read a message: lines up to an empty one or the end of input."""
    lines: list[str] = []
    calls: list[ToolCall] = []
    while True:
        print("> " if sys.stdin.isatty() else "", end="", flush=True)
        line = await source.next()
        command = line.strip()
        if command == "/quit" or (not line and not lines and not calls):
            raise EOFError
        if command == "/tools":
            for tool in tools:
                print(f"  {tool.name}: {tool.description}\n      {json.dumps(tool.parameters)}")
        elif command.startswith("/call "):
            name, _, arguments = command.removeprefix("/call ").strip().partition(" ")
            function = FunctionCall(name=name, arguments=arguments.strip() or "{}")
            calls.append(ToolCall(id=f"call-{len(calls)}", function=function))
        elif COMMAND.match(command):
            print(
                f"  unknown command {command.split()[0]}: use /call TOOL {{...}}, /tools or /quit; // for a leading /"
            )
        elif command:
            lines.append(line.rstrip("\n").replace("//", "/", command.startswith("//")))
        elif lines or calls or not line:
            return Message(role="assistant", content="\n".join(lines), tool_calls=calls)
