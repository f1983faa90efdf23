"""`forge-env info`: list the environments, or describe one: tasks, options, tools, rewards, and an example episode."""

from __future__ import annotations

import argparse
import json
from typing import Any

from forge_env.cli.command import Parser, add_environment, environment_options
from forge_env.environment.base import Environment
from forge_env.environment.optional import seats_of
from forge_env.errors import ForgeError
from forge_env.interrupts import run_until_interrupted
from forge_env.registry import list_environments, make, summary_of
from forge_env.sandbox.engines import LazyEngine
from forge_env.tasks.splits import check_split, count_tasks
from forge_env.trajectory import Trajectory
from forge_env.types import Message
from forge_env.validation.checks import example_episode
from forge_env.visible import visible


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    add_environment(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print JSON, without the example episode")
    parser.add_argument("--no-example", action="store_true", help="don't play the example episode")


def run(args: argparse.Namespace) -> int:
    """Print the description, or the list without a name."""
    if not args.words:
        return _list(as_json=args.json)
    name, options = environment_options(args)
    env = make(name, **options)
    facts = describe(name, env)
    if args.json:
        print(json.dumps(facts, indent=2, default=str))
        return 0
    print(f"{name}: {facts['summary']}\n")
    print("tasks")
    for split, count in facts["splits"].items():
        print(f"  {split:<12} {'endless' if count is None else count}")
    if facts["seats"]:
        print(f"\nseats: {', '.join(facts['seats'])}")
    print("\noptions")
    for option in facts["options"]:
        print(f"  {option['name']} = {option['value']!r}  ({option['type']})\n      {option['description']}")
    print("\ntools" if facts["tools"] else "\ntools: none")
    for tool in facts["tools"]:
        print(f"  {tool['name']}: {tool['description']}")
        print(f"      {json.dumps(tool['parameters'])}")
    rewarded = [f"{name} x {weight:g}" if weight != 1 else name for name, weight in facts["rewards"].items() if weight]
    highest = "unknown" if env.max_reward is None else f"{env.max_reward:g}"
    print(f"\nrewarded: {', '.join(rewarded) or 'by the environment itself'}; maximum reward: {highest}")
    if logged := [name for name, weight in facts["rewards"].items() if not weight]:
        print(f"logged: {', '.join(logged)}")
    if not args.no_example:
        print("\nexample episode")
        run_until_interrupted(_print_example(name, options, args))
    return 0


def _list(*, as_json: bool) -> int:
    """Print every environment; for a broken one, print the reason."""
    entries = list_environments()
    if as_json:
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
        print("no environment is installed; create one with forge-env new my_env")
    return 0


def describe(name: str, env: Environment) -> dict[str, Any]:
    """Facts that `info` shows besides the example episode, JSON-ready."""
    fields = type(env.config).model_fields
    rubric = env.rubric
    return {
        "name": name,
        "summary": summary_of(type(env)),
        "api_version": env.api_version,
        "splits": dict.fromkeys(env.splits, 0) | count_tasks(env),
        "seats": list(seats_of(env)),
        "options": [
            {
                "name": key,
                "value": getattr(env.config, key),
                "type": str(getattr(field.annotation, "__name__", field.annotation)),
                "description": field.description or "",
            }
            for key, field in fields.items()
        ],
        "tools": [tool.model_dump() for tool in env.tools],
        "rewards": {} if rubric is None else rubric.weights,
    }


async def _print_example(name: str, options: dict[str, Any], args: argparse.Namespace) -> None:
    async with LazyEngine(args.sandbox, docker_host=args.docker_host) as engine:
        trajectory = await example_episode(
            lambda: make(name, sandboxes=engine, **options), check_split(make(name, **options), None)
        )
    for line in shown(trajectory):
        print(line)
    if not trajectory.valid:
        raise ForgeError(
            f"the example episode could not be played: {trajectory.error}", fix="skip it with --no-example"
        )
    print(f"  {earned(trajectory)}  {json.dumps(trajectory.metrics)}")


def shown(trajectory: Trajectory, *, limit: int | None = 1500) -> list[str]:
    """Format an episode as indented text, with a line for each change of seat."""
    lines: list[str] = []
    seat = ""
    for turn in trajectory.turns:
        if turn.seat != seat:
            seat = turn.seat
            lines.append(f"--- {seat}")
        lines += [show(message, limit=limit) for message in [*turn.observation, turn.message]]
    return lines + [show(message, limit=limit) for message in trajectory.final_observation]


def earned(trajectory: Trajectory) -> str:
    """Format the reward, and the seats' rewards with their opponents' names."""
    seats = [
        f"{seat} {reward:g}" + (f" ({trajectory.opponents[seat]})" if seat in trajectory.opponents else "")
        for seat, reward in trajectory.rewards.items()
    ]
    return f"reward {trajectory.reward:g}" + (f" ({', '.join(seats)})" if seats else "")


def show(message: Message, *, limit: int | None = 1500) -> str:
    """Format a message as indented text; control and unprintable characters are escaped."""
    calls = [f"-> {call.function.name}({call.function.arguments})" for call in message.tool_calls]
    text = "\n".join(filter(None, [message.content, *calls]))
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]} [... {len(text) - limit} more characters]"
    return "\n".join(f"  {line}" for line in f"[{message.role}] {visible(text)}".split("\n"))
