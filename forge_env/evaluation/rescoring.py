"""Scoring of stored transcripts without calling the model.

The recorded assistant messages are replayed in the current version of the environment: tools run again in fresh
sandboxes and the rubric scores the result. If a tool's answer differs from the recorded one, the sample is counted as
diverged, since the model might have continued differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from forge_env.config.evaluation import EvaluationConfig
from forge_env.config.reader import read_as, refuse_redacted
from forge_env.environment.base import Environment
from forge_env.errors import AgentError, EnvironmentBugError, ForgeError, UsageError
from forge_env.evaluation.evaluation import Evaluation
from forge_env.evaluation.plan import Sample, in_plan
from forge_env.evaluation.record import EvaluationResult, ResultsFolder, open_folder
from forge_env.files import write_whole
from forge_env.policy import LimitReached, Policy, PolicySession, Reply
from forge_env.rollout.episode import seat_seed
from forge_env.trajectory import Trajectory
from forge_env.types import Observation, Task

BEYOND = ("tool_calls", "tokens", "cost")
"""Limits that may be exceeded by the last reply, which is then recorded but not executed."""


@dataclass(slots=True)
class Rescored:
    """The new evaluation, and its differences from the source."""

    result: EvaluationResult
    diverged: list[str]
    """Samples whose environment answered differently than recorded."""
    changed: list[tuple[str, float, float]]
    """(sample, old score, new score) of samples whose scores differ."""
    unscored: dict[str, str]
    """Planned samples that could not be scored again, including those lost in the source -> reason."""
    damage: list[str]


class TranscriptPolicy(Policy):
    """Replays the recorded messages of every task; samples of one task are distinguished by their seeds."""

    def __init__(self, transcripts: dict[tuple[str, int | None], tuple[Trajectory, str]]) -> None:
        self._transcripts = transcripts
        self.diverged: dict[str, tuple[int, Observation]] = {}
        """Id of a trajectory -> first turn before which the environment answered differently, and its answer."""

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """Open a session for the sample (or one of its seats) with this task and seed."""
        return _Transcript(self, *self._transcripts[task.id, seed])


class _Transcript(PolicySession):
    def __init__(self, owner: TranscriptPolicy, trajectory: Trajectory, seat: str) -> None:
        self._owner = owner
        self._trajectory = trajectory
        self._turns = [turn for turn in trajectory.turns if turn.seat == seat]
        self._next = 0

    async def reply(self, observation: Observation) -> Reply:
        turns = self._turns
        if self._next >= len(turns) and self._trajectory.crashed:
            raise AgentError(self._trajectory.error or "")
        if self._next >= len(turns):
            raise LimitReached(self._trajectory.truncation or "transcript")
        turn = turns[self._next]
        if observation != turn.observation:
            self._owner.diverged.setdefault(self._trajectory.id, (self._next, observation))
        self._next += 1
        # a limit ended the recorded episode before the environment received this message
        limit = self._trajectory.truncation
        if turn is self._trajectory.turns[-1] and limit in BEYOND and not self._trajectory.final_observation:
            raise LimitReached(limit, reply=turn.reply)
        return turn.reply


async def rescore(
    source: Path | str, out: Path | str, *, stream: TextIO | None = None, on_start: Callable[[Evaluation], object] = id
) -> Rescored:
    """Score the samples of `source` again into the folder `out`, including those failed by a bug of the environment.

    Args:
        on_start: called with the evaluation before it runs, so that the caller can stop it.
    """
    folder = open_folder(source)
    if ResultsFolder(out).exists():
        raise UsageError(f"{out} already contains an evaluation", fix="choose another --out, or remove it")
    config = read_as(EvaluationConfig, folder.config)
    refuse_redacted(
        config.model_dump(include={"environments"}),
        fix=f"let the environment read it from an environment variable, or add it to {folder.config} temporarily",
    )
    latest = {trajectory.id: trajectory for trajectory in folder.trajectories() if in_plan(config, trajectory)}
    damage = list(folder.damage)
    scorable = {name: trajectory for name, trajectory in latest.items() if _can_be_scored(trajectory)}
    if not scorable:
        raise UsageError(f"{source} contains no valid sample to score")
    again = config.model_copy(
        update={
            "out": Path(out),
            "max_samples": config.max_samples or 64,
            "max_bug_rate": 1.0,
            **dict.fromkeys(("turn_limit", "token_limit", "tool_call_limit", "cost_limit", "budget", "prices")),
        }
    )
    evaluation = Evaluation(again, policy=TranscriptPolicy({}), stream=stream)
    unscored = _unscored(evaluation, latest)
    asked = scorable.keys() | unscored.keys()  # samples planned for the source
    evaluation.planned = {
        label: replace(share, samples=sum(name.startswith(f"{label}/{share.split}/") for name in asked))
        for label, share in evaluation.planned.items()
    }
    evaluation.keep(lambda sample: sample.id in scorable and sample.id not in unscored)
    if not len(evaluation.samples):
        reason = next(reason for name, reason in unscored.items() if name in scorable)
        raise UsageError(
            f"none of the {len(scorable)} valid samples of {source} can be scored again: {reason}",
            fix="score with the environment that they were played in",
        )
    seeds = {sample.id: sample.seed(config.seed) for sample in evaluation.samples}
    transcripts = {
        (scorable[name].task_id, seat_seed(seed, seat)): (scorable[name], seat)
        for name, seed in seeds.items()
        for seat in evaluation.seats(scorable[name].environment) or _seats(scorable[name])
    }
    policy = TranscriptPolicy(transcripts)
    evaluation.policy = policy
    for name in seeds:
        evaluation.opponents[scorable[name].environment] = dict.fromkeys(scorable[name].opponents, policy)
    on_start(evaluation)
    marked = {"source": str(folder.root), "unscored": unscored}  # distinguishes the folder from a model's evaluation
    write_whole(evaluation.folder.rescored, json.dumps(marked, indent=2) + "\n")
    result = await evaluation.run()
    changed = []
    for sample in result.samples:
        before = scorable[sample.id]
        old = before.reward if config.score == "reward" else before.metrics.get(config.score, 0.0)
        if sample.valid and abs(sample.score - old) > 1e-9:
            changed.append((sample.id, old, sample.score))
    return Rescored(result, sorted(policy.diverged), changed, unscored, damage)


def _seats(trajectory: Trajectory) -> set[str]:
    """Seats of a trajectory whose environment has none, or has no rewards per seat."""
    return {turn.seat for turn in trajectory.turns} or {""}


def _can_be_scored(trajectory: Trajectory) -> bool:
    """Whether all messages were recorded. This includes failures of the environment, which may be fixed by now."""
    failed_by_bug = bool(trajectory.turns) and (trajectory.error or "").startswith(f"{EnvironmentBugError.__name__}:")
    return trajectory.valid or failed_by_bug


def _unscored(evaluation: Evaluation, latest: dict[str, Trajectory]) -> dict[str, str]:
    """Samples that can't be scored, with reasons: no valid record, or the task no longer exists or has changed."""
    planned = {sample.id: sample for sample in evaluation.samples}
    reasons: dict[str, str] = {}
    for name, sample in planned.items():
        if name not in latest and _was_asked_for(evaluation, sample):
            reasons[name] = "it has no readable record: it was not played, or its line is damaged"
    for name, trajectory in latest.items():
        if not _can_be_scored(trajectory):
            reasons[name] = f"it was lost: {trajectory.error}"
        elif name not in planned:
            reasons[name] = "the environment no longer has this task"
        elif not trajectory.valid and evaluation.seats(trajectory.environment):
            reasons[name] = "the environment failed, and the messages of each seat were not recorded"
        elif reason := _exchanged(evaluation, planned[name], trajectory):
            reasons[name] = reason
    return reasons


def _was_asked_for(evaluation: Evaluation, sample: Sample) -> bool:
    """Whether the source was to play the sample: the gold policy only plays tasks with a reference solution."""
    if evaluation.config.model != "gold":
        return True
    try:
        return evaluation.has_gold(sample)
    except ForgeError:  # the task can't be created; report the sample as missing
        return True


def _exchanged(evaluation: Evaluation, sample: Sample, trajectory: Trajectory) -> str | None:
    try:
        task = evaluation.task(sample)
    except ForgeError as error:
        return f"its task can't be created: {error}"
    if task.id != trajectory.task_id:
        return f"its task is now {task.id!r} instead of {trajectory.task_id!r}"
    return None
