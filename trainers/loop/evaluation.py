"""Held-out scores during the run: episodes beside the training rollouts."""

from __future__ import annotations

from collections import Counter

from forge_env.errors import ForgeError
from forge_env.evaluation.estimates import Estimate, score
from forge_env.run import Run
from forge_env.trajectory import Trajectory
from trainers.generator.pool import GeneratorPool
from trainers.generator.types import WeightsLostError
from trainers.rollout.rollouts import Rollouts
from trainers.rollout.types import VERSIONS, is_bug

TRIES = 3
"""How often an evaluation is begun whose generator dies, until its score is left out."""


class Evaluator:
    """Scores held-out splits and reports them to the run.

    A score is that of one policy version (`evaluation.pinned`): the weights that serve it are held meanwhile. Where
    their generator dies, all episodes are played again with the weights that are the newest then.

    Args:
        run: the run.
        rollouts: plays the episodes, and records them.
        generators: what serves them.
    """

    def __init__(self, run: Run, rollouts: Rollouts, generators: GeneratorPool) -> None:
        self._run = run
        self._rollouts = rollouts
        self._generators = generators

    async def evaluate(self, step: int, split: str, count: int) -> Estimate | None:
        """Score `count` tasks of `split` after training step `step`; pinned, after the step that is held.

        Returns:
            The score; None where generator after generator died of it.
        """
        if not self._run.config.evaluation.pinned:
            return self._report(step, split, await self._rollouts.evaluate(split, count, f"{split}-{step:05d}"))
        for attempt in range(1, TRIES + 1):
            try:
                async with self._generators.held() as weights:
                    kind = f"{split}-{weights.version:05d}"
                    trajectories = await self._rollouts.evaluate(split, count, kind, weights.key)
            except WeightsLostError as error:
                if attempt < TRIES:
                    self._run.note(f"The evaluation on {split} begins again: {error}")
            else:
                return self._report(weights.version, split, trajectories)
        self._run.warn(f"a score on {split} is left out: generators died {TRIES} times while it was evaluated")
        return None

    def _report(self, step: int, split: str, trajectories: list[Trajectory]) -> Estimate:
        section = self._run.config.evaluation
        result = score(trajectories, section.metric)
        if result is None:  # a score of nothing would be a made-up zero
            reason = next((trajectory.error for trajectory in trajectories if trajectory.error), "there are no tasks")
            raise ForgeError(f"no episode of the evaluation on {split} could be played, the first because: {reason}")
        if section.metric != type(section).model_fields["metric"].default and not any(
            section.metric in trajectory.metrics for trajectory in trajectories
        ):
            self._run.warn(f"evaluation.metric={section.metric}: no episode has it, so the reward is the score")
        valid = sum(trajectory.valid for trajectory in trajectories)
        bugs = sum(map(is_bug, trajectories))
        if lost := len(trajectories) - valid - bugs:
            self._run.warn(f"evaluation after step {step}: {lost} episodes were lost and are left out")
        if bugs:
            with_zeros = result.value * valid / (valid + bugs)
            self._run.warn(
                f"evaluation after step {step}: the environment's own code failed on {bugs} episodes, which are left "
                f"out; counted as 0, the score is {with_zeros:.3f} instead of {result.value:.3f}"
            )
        versions: Counter[int] = Counter()
        for trajectory in trajectories:
            if trajectory.valid:
                versions.update(trajectory.info.get(VERSIONS, {}))
        self._run.evaluation(step, split, result.value, valid, result.stderr, versions)
        return result

    async def evaluate_all(self, step: int) -> None:
        """Score the held-out split and every extra one."""
        section = self._run.config.evaluation
        await self.evaluate(step, section.split, section.num_tasks)
        for split in section.extra_splits:
            await self.evaluate(step, split, section.extra_tasks)
