"""Classes of failed episodes, by how they ended, the judge's reason and the last tool result, with examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge_env.run.state import held_out_scores
from forge_env.trajectory import Trajectory
from forge_env.trajectory_index import SCORED
from forge_env.view.filter import PAID_UNSOLVED
from forge_env.view.records import UnreadableError, read
from forge_env.view.runs import RunView
from forge_env.visible import one_line

EXPLAINED = 6
"""Number of classes whose example is loaded and described."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A class of episodes below the maximum reward, or with the maximum reward for an unsolved task."""

    name: str
    """`failed hidden tests, after reading "0/n passed"`, `out of turns`, `lost: SandboxError`, ..."""
    count: int
    share: float
    """Fraction of all episodes considered."""
    typical: Mapping[str, Any] | None
    """Row of `RunIndex` of an episode of median length."""
    example: str = ""
    """The last tool result and the judge's reason of that episode; empty if not recorded."""


def failures_of(run: RunView) -> tuple[str, str]:
    """Choose the episodes to search for failures, as a filter's kind and in words.

    These are the last held-out evaluation whose episodes are recorded, otherwise training, otherwise all episodes.
    """
    if run.is_evaluation:
        return "", "samples"
    for scores in [*held_out_scores(run.metrics).values()][:1]:
        for score in reversed(scores):
            if run.queries.count(kind := f"{score.split}-{score.step:05d}"):
                return kind, f"held-out episodes after step {score.step}"
    return ("train", "training episodes") if run.queries.count("train") else ("", "episodes")


def failures(run: RunView, kind: str, environment: str = "") -> list[Failure]:
    """Failure classes: first maximum reward without a solved task, then the largest.

    Args:
        environment: name of the environment; empty for all.
    """
    classes = run.queries.failures(kind, environment)
    total = run.queries.count(kind, environment)
    return [
        Failure(name, count, count / max(total, 1), typical, _example(run, typical) if rank < EXPLAINED else "")
        for rank, (name, count, typical) in enumerate(classes)
    ]


def unsolved_of(run: RunView) -> int:
    """Number of training episodes, or samples, with the maximum reward for an unsolved task."""
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
    """The last tool result of an episode and its judge's reason, in a line."""
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
