"""Held-out scores during the run: episodes beside the training rollouts, nothing stops for them."""

from __future__ import annotations

from forge_env.errors import ForgeError
from forge_env.evaluation.estimates import Estimate, score
from forge_env.policy import Policy
from forge_env.run import Run
from trainers.loop.rollouts import Rollouts


class Evaluator:
    """Scores held-out splits and reports them to the run."""

    def __init__(self, run: Run, rollouts: Rollouts, policy: Policy) -> None:
        self._run = run
        self._rollouts = rollouts
        self._policy = policy

    async def evaluate(self, step: int, split: str, count: int) -> Estimate:
        """Score `count` tasks of `split` after training step `step`."""
        section = self._run.config.evaluation
        trajectories = await self._rollouts.evaluate(split, count, self._policy)
        result = score(trajectories, section.metric)
        if result is None:  # a score of nothing would be a made-up zero
            reason = next((trajectory.error for trajectory in trajectories if trajectory.error), "there are no tasks")
            raise ForgeError(f"no episode of the evaluation on {split} could be played, the first because: {reason}")
        if section.metric != type(section).model_fields["metric"].default and not any(
            section.metric in trajectory.metrics for trajectory in trajectories
        ):
            self._run.warn(f"evaluation.metric={section.metric}: no episode has it, so the reward is the score")
        valid = sum(trajectory.valid for trajectory in trajectories)
        if lost := len(trajectories) - valid:
            self._run.warn(f"evaluation after step {step}: {lost} episodes lost to infrastructure, left out")
        for trajectory in trajectories:
            self._run.trajectory(trajectory, f"{split}-{step:05d}")
        self._run.evaluation(step, split, result.value, valid, result.stderr)
        return result

    async def evaluate_all(self, step: int) -> None:
        """Score the held-out split and every extra one."""
        section = self._run.config.evaluation
        await self.evaluate(step, section.split, section.num_tasks)
        for split in section.extra_splits:
            await self.evaluate(step, split, section.extra_tasks)
