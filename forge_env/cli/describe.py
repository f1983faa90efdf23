"""`forge-env list`, `info` and `validate`."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge_env.config.loader import parse_overrides
from forge_env.environment.base import Environment
from forge_env.errors import UsageError
from forge_env.interrupts import run_until_interrupted
from forge_env.registry import EnvironmentEntry, environment_class, list_environments, make, make_config
from forge_env.sandbox.engines import LazyEngine, load_engine
from forge_env.tasks.splits import check_split, count_tasks
from forge_env.types import Message
from forge_env.validation.checks import Validator, conversation, example_episode

PATIENCE_S = 20.0
DOING = {"reset": "reset and setup", "environment": "step (tools, scoring)", "close": "close and cleanup"}
MARKS = {"ok": "ok", "note": "--", "failed": "!!"}


def environment_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the environment from the command line, nested where their key has dots."""
    if args.sandbox != "auto":
        load_engine(args.sandbox)  # a wrong name is said also where no code is run
    options: dict[str, Any] = {}
    for key, value in parse_overrides(args.overrides):
        *sections, last = key.split(".")
        place = options
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UsageError(
                    f"{section} is given as a value and as {key}",
                    fix=f"spell it out: {section}.KEY=VALUE, for each key",
                )
        place[last] = value
    return options


def run_list(args: argparse.Namespace) -> int:
    """Print every environment; a broken one with its reason."""
    entries = list_environments()
    if args.json:
        print(json.dumps([_entry(entry) for entry in entries], indent=2))
        return 0
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        needs = f" (needs {', '.join(entry.needs)})" if entry.needs else ""
        print(f"{entry.name:<{width}}  {entry.summary if entry.error is None else 'BROKEN: ' + entry.error}{needs}")
        print(f"{'':<{width}}  from {entry.source} ({entry.target})")
    if not entries:
        print("no environment is installed; write one: forge-env new my_env")
    return 0


def _entry(entry: EnvironmentEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "target": entry.target,
        "source": entry.source,
        "summary": entry.summary,
        "needs": entry.needs,
        "error": entry.error,
    }


def run_info(args: argparse.Namespace) -> int:
    """Print what an author or user of the environment wants to know."""
    options = environment_options(args)
    env = make(args.name, **options)
    facts = describe(args.name, env)
    if args.json:
        print(json.dumps(facts, indent=2, default=str))
        return 0
    print(f"{args.name}: {facts['summary']}\n")
    print("tasks")
    for split, count in facts["splits"].items():
        print(f"  {split:<12} {'endless' if count is None else count}")
    print("\noptions")
    for option in facts["options"]:
        print(f"  {option['name']} = {option['value']!r}  ({option['type']})\n      {option['description']}")
    print("\ntools" if facts["tools"] else "\ntools: none")
    for tool in facts["tools"]:
        print(f"  {tool['name']}: {tool['description']}")
        print(f"      {json.dumps(tool['parameters'])}")
    rewarded = [f"{name} x {weight:g}" if weight != 1 else name for name, weight in facts["rewards"].items() if weight]
    print(f"\nrewarded: {', '.join(rewarded) or 'by the environment itself'}; a perfect episode: {env.max_reward:g}")
    if logged := [name for name, weight in facts["rewards"].items() if not weight]:
        print(f"logged: {', '.join(logged)}")
    if not args.no_example:
        print("\nexample episode")
        run_until_interrupted(_print_example(args, options))
    return 0


def describe(name: str, env: Environment) -> dict[str, Any]:
    """Everything `info` shows but the example, JSON-ready."""
    fields = type(env.config).model_fields
    rubric = getattr(env, "rubric", None)
    return {
        "name": name,
        "summary": ((type(env).__doc__ or "").strip().splitlines() or [""])[0],
        "api_version": env.api_version,
        "splits": dict.fromkeys(env.splits, 0) | count_tasks(env),
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


async def _print_example(args: argparse.Namespace, options: dict[str, Any]) -> None:
    async with LazyEngine(args.sandbox) as engine:
        trajectory = await example_episode(
            lambda: make(args.name, sandboxes=engine, **options), check_split(make(args.name, **options), None)
        )
    for message in conversation(trajectory):
        print(show(message))
    print(f"  reward {trajectory.reward:g}  {json.dumps(trajectory.metrics)}")


def show(message: Message, *, limit: int = 1500) -> str:
    """A message as indented text."""
    calls = [f"-> {call.function.name}({call.function.arguments})" for call in message.tool_calls]
    text = "\n".join(filter(None, [message.content, *calls]))
    text = text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit} more characters]"
    return "\n".join(f"  {line}" for line in f"[{message.role}] {text}".splitlines())


def run_validate(args: argparse.Namespace) -> int:
    """Print every check as it finishes; 1 when one failed."""
    options = environment_options(args)
    make_config(args.name, environment_class(args.name), options)
    failed = run_until_interrupted(_validate(args, options))
    print(f"\n{args.name}: {f'{failed} check(s) failed' if failed else 'sound'}")
    return 1 if failed else 0


async def _validate(args: argparse.Namespace, options: dict[str, Any]) -> int:
    failed = 0
    async with LazyEngine(args.sandbox) as engine:
        validator = Validator(lambda: make(args.name, sandboxes=engine, **options), num_tasks=args.tasks)
        with _naming_what_stands_still(validator):
            async for check in validator.run():
                failed += check.status == "failed"
                print(f"{MARKS[check.status]} {check.name}: {check.detail}", flush=True)
    return failed


@contextmanager
def _naming_what_stands_still(validator: Validator) -> Iterator[None]:
    """In a thread, which also speaks when the environment's code holds up the event loop."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PATIENCE_S):
            task, doing, waited_s = validator.longest_wait()
            if waited_s >= PATIENCE_S:
                where = DOING.get(doing, doing)
                print(f"   task {task!r}: in {where} for {waited_s:.0f} s; Ctrl-C stops", file=sys.stderr, flush=True)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
