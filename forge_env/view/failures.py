"""How episodes fall short: classes by how they ended, what their judge said and what they had read, with examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge_env.trajectory import Trajectory
from forge_env.trajectory_index import SCORED
from forge_env.view.filter import PAID_UNSOLVED
from forge_env.view.records import UnreadableError, read
from forge_env.view.runs import RunView, held_out
from forge_env.visible import one_line

EXPLAINED = 6
"""Classes whose example is read for a sentence about it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A class of episodes that fell short: they did not earn all they could, or earned it and solved nothing."""

    name: str
    """`failed hidden tests, after reading "0/n passed"`, `out of turns`, `lost: SandboxError`, ..."""
    count: int
    share: float
    """Of all episodes that are looked at."""
    typical: Mapping[str, Any] | None
    """Row of one of median length, as `RunIndex` has it."""
    example: str = ""
    """What that one read last, and what its judge says; empty: nothing is recorded of it."""


def failures_of(run: RunView) -> tuple[str, str]:
    """Which episodes a run's failures are of, as a filter's kind and in words: those of the last held-out evaluation
    whose episodes are recorded, else those of training, else all."""
    if run.is_evaluation:
        return "", "samples"
    for held in held_out(run.metrics)[:1]:
        for step, *_ in reversed(held.points):
            if run.queries.count(kind := f"{held.split}-{step:05d}"):
                return kind, f"held-out episodes after step {step}"
    return ("train", "training episodes") if run.queries.count("train") else ("", "episodes")


def failures(run: RunView, kind: str, environment: str = "") -> list[Failure]:
    """The classes, those first that earned all and solved nothing, then the largest.

    Args:
        run: or evaluation.
        kind: as in a filter.
        environment: only its episodes; empty: all.
    """
    classes = run.queries.failures(kind, environment)
    total = run.queries.count(kind, environment)
    return [
        Failure(name, count, count / max(total, 1), typical, _example(run, typical) if place < EXPLAINED else "")
        for place, (name, count, typical) in enumerate(classes)
    ]


def unsolved_of(run: RunView) -> int:
    """How many episodes of training, or samples, earned all the reward and did not solve their task."""
    kind = "" if run.is_evaluation or not run.queries.count("train") else "train"
    return sum(count for name, count, _ in run.queries.failures(kind) if name == PAID_UNSOLVED)


def _example(run: RunView, typical: Mapping[str, Any] | None) -> str:
    if typical is None or typical["outcome"] not in SCORED:
        return ""
    try:
        return example_of(read(run.index, typical)[0])
    except UnreadableError:
        return ""


def example_of(episode: Trajectory) -> str:
    """What an episode read last and what its judge says of it, in a line."""
    if episode.error is not None:
        return one_line(episode.error, 300)
    observed = (message for turn in reversed(episode.turns) for message in reversed(turn.observation))
    tool = next((message.content for message in observed if message.role == "tool"), "")
    parts = [f'read "{one_line(tool, 120)}"'] if tool.strip() else []
    if episode.failures:
        parts.append(f"{episode.reason}: {one_line(episode.failures[0], 200)}")
    elif episode.reason:
        parts.append(episode.reason)
    elif episode.answer and episode.answer.strip():
        parts.append(f'answered "{one_line(episode.answer, 120)}"')
    return "; ".join(parts)
