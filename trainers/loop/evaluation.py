"""Held-out scores during the run: episodes beside the training rollouts, nothing stops for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forge_env.errors import ForgeError
from forge_env.policy import Policy
from forge_env.run import Run
from forge_env.trajectory import Trajectory
from trainers.loop.rollouts import Rollouts


@dataclass(frozen=True, slots=True)
class Score:
    """Mean reward over the valid episodes of a held-out split."""

    mean: float
    stderr: float
    count: int
    invalid: int


def score(trajectories: list[Trajectory], key: str) -> Score:
    """Mean and standard error of metric `key`, or of the reward where the environment has no such metric."""
    valid = [trajectory for trajectory in trajectories if trajectory.valid]
    values = [trajectory.metrics.get(key, trajectory.reward) for trajectory in valid]
    if not values:
        return Score(0.0, 0.0, 0, len(trajectories))
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return Score(mean, math.sqrt(variance / len(values)), len(values), len(trajectories) - len(valid))


class Evaluator:
    """Scores held-out splits and reports them to the run."""

    def __init__(self, run: Run, rollouts: Rollouts, policy: Policy) -> None:
        self._run = run
        self._rollouts = rollouts
        self._policy = policy

    async def evaluate(self, step: int, split: str, count: int) -> Score:
        """Score `count` tasks of `split` after training step `step`."""
        section = self._run.config.evaluation
        trajectories = await self._rollouts.evaluate(split, count, self._policy)
        result = score(trajectories, section.metric)
        if not result.count:  # a score of nothing would be a made-up zero
            reason = next((trajectory.error for trajectory in trajectories if trajectory.error), "there are no tasks")
            raise ForgeError(f"no episode of the evaluation on {split} could be played, the first because: {reason}")
        if section.metric != type(section).model_fields["metric"].default and not any(
            section.metric in trajectory.metrics for trajectory in trajectories
        ):
            self._run.warn(f"evaluation.metric={section.metric}: no episode has it, so the reward is the score")
        if result.invalid:
            self._run.warn(f"evaluation after step {step}: {result.invalid} episodes lost to infrastructure, left out")
        for trajectory in trajectories:
            self._run.trajectory(trajectory, f"{split}-{step:05d}")
        self._run.evaluation(step, split, result.mean, result.count, result.stderr)
        return result

    async def evaluate_all(self, step: int) -> None:
        """Score the held-out split and every extra one."""
        section = self._run.config.evaluation
        await self.evaluate(step, section.split, section.num_tasks)
        for split in section.extra_splits:
            await self.evaluate(step, split, section.extra_tasks)
