"""Held-out evaluation during a run, concurrent with training rollouts."""

from __future__ import annotations

from collections import Counter

from forge_env.config.recipe import EvaluationSection
from forge_env.errors import ForgeError
from forge_env.evaluation.estimates import Estimate, TaskScores
from forge_env.run import Run
from forge_env.trajectory import Trajectory
from trainers.generator.pool import GeneratorPool
from trainers.generator.types import WeightsLostError
from trainers.rollout.rollouts import Rollouts
from trainers.rollout.types import VERSIONS, is_bug

TRIES = 3
"""Maximum attempts at an evaluation whose generator dies; after that, its score is left out."""


class Episodes:
    """Running totals of an evaluation's episodes, since there may be millions of them.

    Args:
        metric: name of the metric that is scored; an episode without it counts with its reward.
    """

    def __init__(self, metric: str) -> None:
        self.scores = TaskScores()
        """Scores of valid episodes by task."""
        self.lost = self.bugs = 0
        self.first_error: str | None = None
        self.has_metric = False
        """Whether any episode has the metric."""
        self.versions: Counter[int] = Counter()
        """Sampled tokens of valid episodes by policy version."""
        self._metric = metric

    def add(self, episode: Trajectory) -> None:
        """Add an episode to the totals."""
        self.first_error = self.first_error or episode.error
        self.has_metric = self.has_metric or self._metric in episode.metrics
        if episode.valid:
            self.scores.add(episode.task_id, episode.metrics.get(self._metric, episode.reward))
            self.versions.update(episode.info.get(VERSIONS, {}))
        elif is_bug(episode):
            self.bugs += 1
        else:
            self.lost += 1


class Evaluator:
    """Scores held-out splits and reports the scores to the run.

    With `evaluation.pinned`, all episodes of a score use one policy version, whose weights are held meanwhile. If the
    generator that holds them dies, all episodes are repeated with the weights that are then the newest.
    """

    def __init__(self, run: Run, rollouts: Rollouts, generators: GeneratorPool) -> None:
        self._run, self._rollouts, self._generators = run, rollouts, generators

    async def evaluate(self, step: int, split: str, count: int) -> Estimate | None:
        """Score `count` tasks of `split`, of the held weights if pinned; None if generators died `TRIES` times."""
        section = self._run.config.evaluation
        if not section.pinned:
            episodes = Episodes(section.metric)
            await self._rollouts.evaluate(split, count, f"{split}-{step:05d}", episodes.add)
            return await self._report(step, split, episodes)
        for attempt in range(1, TRIES + 1):
            episodes = Episodes(section.metric)
            try:
                async with self._generators.held() as weights:
                    kind = f"{split}-{weights.version:05d}"
                    await self._rollouts.evaluate(split, count, kind, episodes.add, weights.key)
            except WeightsLostError as error:
                if attempt < TRIES:
                    self._run.note(f"The evaluation on {split} restarts: {error}")
            else:
                return await self._report(weights.version, split, episodes)
        self._run.warn(f"the score on {split} is missing: generators died {TRIES} times during its evaluation")
        return None

    async def _report(self, step: int, split: str, episodes: Episodes) -> Estimate:
        metric = self._run.config.evaluation.metric
        result, valid, bugs = episodes.scores.estimate(), episodes.scores.samples, episodes.bugs
        if result is None:  # a score of 0 without episodes would be made up
            reason = episodes.first_error or "there are no tasks"
            raise ForgeError(f"no episode of the evaluation on {split} could be played, the first because: {reason}")
        if metric != EvaluationSection.model_fields["metric"].default and not episodes.has_metric:
            self._run.warn(f"evaluation.metric={metric}: no episode has it, so the reward is the score")
        if episodes.lost:
            self._run.warn(f"evaluation after step {step}: {episodes.lost} episodes were lost and are not counted")
        if bugs:
            with_zeros = result.value * valid / (valid + bugs)
            self._run.warn(
                f"evaluation after step {step}: the environment's own code failed on {bugs} episodes, which are not "
                f"counted; with a reward of 0, the score would be {with_zeros:.3f} instead of {result.value:.3f}"
            )
        self._run.evaluation(step, split, result.value, valid, result.stderr, episodes.versions)
        await self._run.log_episodes(step, split)
        return result

    async def evaluate_all(self, step: int) -> None:
        """Score the held-out split and every extra one."""
        section = self._run.config.evaluation
        await self.evaluate(step, section.split, section.num_tasks)
        for split in section.extra_splits:
            await self.evaluate(step, split, section.extra_num_tasks)
