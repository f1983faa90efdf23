"""`forge-env replay`: compute a recorded run again, and name the first step that differs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.cli.command import Parser, number
from forge_env.errors import UsageError
from forge_env.figures import duration
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.config.recipe import RunConfig
    from forge_env.rollout.recorded import Answers
    from forge_env.run.fingerprint import Replayed, Sampled
    from forge_env.run.recording import Recording

CHANGEABLE = ("grpo.loss.", "trainer.optimizer.", "trainer.minibatches")
"""Keys that `--with` takes: those that change training alone, so that the recorded episodes still apply."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Train the recorded steps of a run again, in this process, and compare each with its record: tokens, "
        "log-probs, loss, gradients and weights (docs/replay.md)."
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of a run, or a name in runs/")
    parser.add_argument(
        "--from", dest="after", type=int, default=0, metavar="STEP", help="begin after this step, at a checkpoint"
    )
    parser.add_argument("--to", type=int, metavar="STEP", help="last step (default: the last recorded one)")
    parser.add_argument(
        "--with",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="train with another loss or optimizer after --from: loss.clip_high=0.3; may be repeated",
    )
    parser.add_argument("--tokens", action="store_true", help="also sample every reply again, under its versions")
    parser.add_argument(
        "--environment", action="store_true", help="also play the recorded actions again, and compare the answers"
    )
    parser.add_argument("--until-different", action="store_true", help="end at the first step that differs")
    parser.add_argument(
        "--tolerance",
        type=number,
        metavar="X",
        help="accept steps whose loss and gradient norm differ by at most this share, as on other hardware",
    )
    parser.add_argument("--model", metavar="FOLDER", help="the model that the run started from, if it was moved")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each step")


def run(args: argparse.Namespace) -> int:
    """Replay and print each step; return 1 if a step differs."""
    from forge_env.cli.hacks import recorded_folder
    from forge_env.config.finding import read_run
    from forge_env.config.reader import build
    from forge_env.config.recipe import RunConfig
    from forge_env.interrupts import run_until_interrupted
    from forge_env.run.recording import Recording
    from forge_env.run.trainer import ReplayQuestion, load_trainer

    if args.tolerance is not None and not 0 < args.tolerance < 1:
        raise UsageError(f"--tolerance {args.tolerance:g} is not a share", fix="use for example 1e-3")
    if args.changes and (args.until_different or args.tolerance is not None):
        raise UsageError("with --with every step differs", fix="leave --until-different and --tolerance out")
    recording = Recording(recorded_folder(args.run_folder))
    config = build(RunConfig, read_run(str(recording.folder.config)))
    changed = changed_config(recording, config, args.after, args.changes) if args.changes else None
    question = ReplayQuestion(args.after, args.to, args.model, changed, args.tokens)
    started, steps = time.monotonic(), []
    for step in load_trainer(config.method).replay(recording, config, question):
        steps.append(step)
        changes = bool(args.changes) and step.step > args.after
        print(
            json.dumps(as_json(step)) if args.json else line(step, changes=changes, within=args.tolerance), flush=True
        )
        if args.until_different and not accepted(step, args.tolerance):
            break
    seconds = time.monotonic() - started
    compared = [step for step in steps if not args.changes or step.step <= args.after]
    out = sys.stderr if args.json else sys.stdout
    for text in summary(recording, compared, args.tolerance, seconds):
        print(visible(text), file=out)
    answers = None
    if args.environment:
        answers = run_until_interrupted(play_again(recording, config, [step.step for step in steps]))
        for text in answers_in_words(answers):
            print(visible(text), file=out)
    if args.changes:
        print("The episodes are the recorded ones: what the changed policy would have sampled is unknown.", file=out)
    equal = all(accepted(step, args.tolerance) for step in compared) and not (answers and answers.different)
    return 0 if equal else 1


def changed_config(recording: Recording, config: RunConfig, after: int, changes: list[str]) -> RunConfig:
    """The recipe after step `after` with the keys of `--with`.

    Raises:
        UsageError: a key would change what is sampled.
    """
    from forge_env.config.reader import Source, build, parse_overrides
    from forge_env.config.recipe import RunConfig

    overrides = []
    for key, value in parse_overrides([_full(text) for text in changes], RunConfig):
        if not f"{key}.".startswith(CHANGEABLE):
            raise UsageError(
                f"--with {one_line(key)} would change more than training",
                fix="set the loss (loss.clip_high=0.3) or trainer.optimizer.lr; for anything else start a run",
            )
        overrides.append((key, value))
    data = recording.config(config, after).model_dump(mode="json")
    return build(RunConfig, Source("--with", data), overrides)


def _full(text: str) -> str:
    """The whole key of `loss.name=...` and of `loss.OPTION=...`."""
    if not text.startswith("loss."):
        return text
    rest = text.removeprefix("loss.")
    return f"grpo.loss.{rest}" if rest.startswith(("name=", "options.")) else f"grpo.loss.options.{rest}"


def accepted(step: Replayed, tolerance: float | None) -> bool:
    """Whether a step is equal to the bit, or within the tolerance with equal tokens."""
    return step.equal or (tolerance is not None and not step.tokens and step.distance <= tolerance)


def line(step: Replayed, *, changes: bool, within: float | None) -> str:
    """Format a step for the terminal."""
    old, new = step.recorded, step.computed
    start = f"step {step.step:>4}  "
    if changes:
        losses, norms = (f"{old.loss:+.6g} -> {new.loss:+.6g}", f"{old.grad_norm:.6g} -> {new.grad_norm:.6g}")
        return f"{start}loss {losses}, gradient norm {norms}"
    if step.equal:
        return f"{start}equal"
    if within is not None:
        verdict = "within the tolerance" if accepted(step, within) else "differs"
        return f"{start}{verdict}: distance {step.distance:.1e}; not equal: {next(step.differences())}"
    return f"{start}differs: {'; '.join(step.differences())}"


def summary(recording: Recording, steps: list[Replayed], tolerance: float | None, seconds: float) -> Iterator[str]:
    """Yield the result in words."""
    if not steps:
        return
    equal = sum(step.equal for step in steps)
    parts = "tokens, log-probs, loss, gradients and weights have the recorded checksums"
    yield f"{equal} of {len(steps)} steps are equal to the bit: {parts} ({duration(seconds)})"
    if again := [step.sampled for step in steps if step.sampled is not None]:
        yield from _sampled(again)
    if within := sum(accepted(step, tolerance) for step in steps) - equal:
        farthest = max(step.distance for step in steps)
        yield f"{within} more are within {tolerance:g}; the largest distance is {farthest:.1e} (loss or gradient norm)"
    first = next((step for step in steps if not step.equal), None)
    if first is not None:
        yield f"The first step that differs is {first.step}: {next(first.differences())}"
        if changes := list(surroundings(recording.folder.summary)):
            yield f"Recorded elsewhere: {'; '.join(changes)}"


def _sampled(parts: list[Sampled]) -> Iterator[str]:
    replies, tokens = sum(part.replies for part in parts), sum(part.tokens for part in parts)
    different, unequal = sum(len(part.different) for part in parts), sum(part.unequal for part in parts)
    yield (
        f"{replies - different:,} of {replies:,} replies have the recorded tokens ({tokens:,} tokens sampled again), "
        f"{replies - different - unequal:,} also the recorded log-probs to the bit"
    )
    if skipped := sum(part.skipped for part in parts):
        yield f"{skipped:,} replies were not sampled again: from before the start of the replay, or aborted"


async def play_again(recording: Recording, config: RunConfig, steps: list[int]) -> Answers:
    """Play the recorded actions of these steps again in the recipe's environment."""
    from forge_env.registry import make
    from forge_env.rollout import recorded
    from forge_env.sandbox.engines import LazyEngine

    section = config.environment
    episodes = (episode for step in steps for episode in recording.played(step))
    async with LazyEngine(config.sandbox.engine, **config.sandbox.engine_options()) as engine:
        return await recorded.play_again(
            episodes, lambda: make(section.name, sandboxes=engine, **section.options), config.seed
        )


def answers_in_words(answers: Answers) -> Iterator[str]:
    """Yield the comparison of the environment's answers in words."""
    equal = answers.episodes - len(answers.different)
    yield (
        f"The environment gave the recorded answers and rewards in {equal:,} of {answers.episodes:,} episodes "
        f"({answers.turns:,} turns played again)"
    )
    yield from (f"  {text}" for text in answers.different[:5])
    for why, count in answers.skipped.items():
        yield f"{count:,} episodes were not played again: {why}"


def surroundings(path: Path) -> Iterator[str]:
    """Yield versions and properties of the machine that differ between the recording and this process."""
    from forge_env import machine
    from forge_env.reading import read_json

    recorded = read_json(path) if path.is_file() else {}
    for name, here in (("versions", machine.versions()), ("machine", machine.describe())):
        there = recorded.get(name)
        if not isinstance(there, dict):
            continue
        for key, value in there.items():
            if key in here and here[key] != value:
                yield f"{key} {one_line(str(value), 60)} -> {one_line(str(here[key]), 60)}"


def as_json(step: Replayed) -> dict[str, Any]:
    """JSON-ready dictionary of a step."""
    old, new = step.recorded, step.computed
    return {
        "step": step.step,
        "equal": step.equal,
        "differences": list(step.differences()),
        "distance": step.distance,
        "loss": [old.loss, new.loss],
        "grad_norm": [old.grad_norm, new.grad_norm],
    }
