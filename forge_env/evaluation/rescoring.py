"""Scoring stored transcripts again, without asking the model.

The recorded assistant messages are played into the environment as it is now: tools run again in fresh sandboxes
and the rubric scores what results. Where a tool answers otherwise than it did, the sample is counted as diverged,
for the model might have gone on differently.
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
"""Limits whose last reply may be beyond them: recorded, and not acted on."""


@dataclass(slots=True)
class Rescored:
    """The new evaluation, and how the transcripts fared."""

    result: EvaluationResult
    diverged: list[str]
    """Samples whose environment answered differently than recorded."""
    changed: list[tuple[str, float, float]]
    """(sample, score before, score now) where they differ."""
    unscored: dict[str, str]
    """Planned samples that could not be scored again, and why: those lost in the source among them."""
    damage: list[str]
    """What could not be read of the source."""


class TranscriptPolicy(Policy):
    """Says in every task what was said before; samples of one task are told apart by their seed."""

    def __init__(self, transcripts: dict[tuple[str, int | None], tuple[Trajectory, str]]) -> None:
        self._transcripts = transcripts
        self.diverged: set[str] = set()

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """A session for the sample, or the seat of one, with this task and seed."""
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
            self._owner.diverged.add(self._trajectory.id)
        self._next += 1
        # a limit ended the episode before the environment was shown this message
        limit = self._trajectory.truncation
        if turn is self._trajectory.turns[-1] and limit in BEYOND and not self._trajectory.final_observation:
            raise LimitReached(limit, reply=turn.reply)
        return turn.reply


async def rescore(
    source: Path | str, out: Path | str, *, stream: TextIO | None = None, on_start: Callable[[Evaluation], object] = id
) -> Rescored:
    """Score the samples of `source` again into the folder `out`, those that a bug of the environment failed as well.

    Args:
        source: folder of an evaluation.
        out: a new folder, which `forge-env compare` can set against the old one.
        stream: where progress is drawn.
        on_start: is given the evaluation before it runs, to be able to stop it.
    """
    folder = open_folder(source)
    if ResultsFolder(out).exists():
        raise UsageError(f"{out} holds an evaluation already", fix="choose another --out, or remove it")
    config = read_as(EvaluationConfig, folder.config)
    refuse_redacted(
        config.model_dump(include={"environments"}),
        fix=f"let the environment read it from an environment variable, or put it into {folder.config} meanwhile",
    )
    latest = {trajectory.id: trajectory for trajectory in folder.trajectories() if in_plan(config, trajectory)}
    damage = list(folder.damage)
    kept = {name: trajectory for name, trajectory in latest.items() if _can_be_scored(trajectory)}
    if not kept:
        raise UsageError(f"{source} holds no valid sample to score")
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
    asked = kept.keys() | unscored.keys()  # what the source was to play
    evaluation.planned = {
        label: replace(own, samples=sum(name.startswith(f"{label}/{own.split}/") for name in asked))
        for label, own in evaluation.planned.items()
    }
    evaluation.keep(lambda sample: sample.id in kept and sample.id not in unscored)
    if not len(evaluation.samples):
        reason = next(reason for name, reason in unscored.items() if name in kept)
        raise UsageError(
            f"none of the {len(kept)} valid samples of {source} can be scored again: {reason}",
            fix="score with the environment that they were played in",
        )
    seeds = {sample.id: sample.seed(config.seed) for sample in evaluation.samples}
    transcripts = {
        (kept[name].task_id, seat_seed(seed, seat)): (kept[name], seat)
        for name, seed in seeds.items()
        for seat in evaluation.seats(kept[name].environment) or _seats(kept[name])
    }
    policy = TranscriptPolicy(transcripts)
    evaluation.policy = policy
    for name in seeds:
        evaluation.opponents[kept[name].environment] = dict.fromkeys(kept[name].opponents, policy)
    on_start(evaluation)
    marked = {"source": str(folder.root), "unscored": unscored}  # tells it from an evaluation of the model's
    write_whole(evaluation.folder.rescored, json.dumps(marked, indent=2) + "\n")
    result = await evaluation.run()
    changed = []
    for sample in result.samples:
        before = kept[sample.id]
        old = before.reward if config.score == "reward" else before.metrics.get(config.score, 0.0)
        if sample.valid and abs(sample.score - old) > 1e-9:
            changed.append((sample.id, old, sample.score))
    return Rescored(result, sorted(policy.diverged), changed, unscored, damage)


def _seats(trajectory: Trajectory) -> set[str]:
    """Those of an environment whose seats have no reward of their own, or that has none."""
    return {turn.seat for turn in trajectory.turns} or {""}


def _can_be_scored(trajectory: Trajectory) -> bool:
    """Whether its messages are all there: also where only the environment failed, which may be mended by now."""
    failed_by_bug = bool(trajectory.turns) and (trajectory.error or "").startswith(f"{EnvironmentBugError.__name__}:")
    return trajectory.valid or failed_by_bug


def _unscored(evaluation: Evaluation, latest: dict[str, Trajectory]) -> dict[str, str]:
    """Samples without a valid record, and those whose task the environment no longer has, or has exchanged."""
    planned = {sample.id: sample for sample in evaluation.samples}
    found: dict[str, str] = {}
    for name, sample in planned.items():
        if name not in latest and _was_asked_for(evaluation, sample):
            found[name] = "there is no readable record of it: it was not played, or its line is damaged"
    for name, trajectory in latest.items():
        if not _can_be_scored(trajectory):
            found[name] = f"it was lost: {trajectory.error}"
        elif name not in planned:
            found[name] = "the environment has no such task any more"
        elif not trajectory.valid and evaluation.seats(trajectory.environment):
            found[name] = "the environment failed in it, and who had said what is not recorded"
        elif reason := _exchanged(evaluation, planned[name], trajectory):
            found[name] = reason
    return found


def _was_asked_for(evaluation: Evaluation, sample: Sample) -> bool:
    """The gold policy plays only tasks that have a reference solution."""
    if evaluation.config.model != "gold":
        return True
    try:
        return evaluation.has_gold(sample)
    except ForgeError:  # a task that can't be made is missed
        return True


def _exchanged(evaluation: Evaluation, sample: Sample, trajectory: Trajectory) -> str | None:
    try:
        task = evaluation.task(sample)
    except ForgeError as error:
        return f"its task can't be made: {error}"
    if task.id != trajectory.task_id:
        return f"its task is now {task.id!r}, and was {trajectory.task_id!r}"
    return None
