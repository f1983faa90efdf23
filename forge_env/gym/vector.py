"""Vector environment: several environments whose tools and scoring run concurrently on one event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from forge_env.concurrency import gather_or_cancel
from forge_env.environment.host import get_host
from forge_env.gym.spaces import AssistantMessage, Messages
from forge_env.gym.twin import GymEnvironment, GymObservation, GymStep
from forge_env.types import Action

Observations = tuple[GymObservation, ...]
StepResults = tuple[Observations, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class GymVectorEnvironment(VectorEnv[Observations, Sequence[Action], NDArray[Any]]):
    """`num_envs` episodes of one environment; a finished one restarts at the next step (its action is ignored)."""

    def __init__(self, environment: str, *, num_envs: int = 1, **options: Any) -> None:
        self.num_envs = num_envs
        self.metadata = {**GymEnvironment.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = options.get("render_mode")
        self.single_observation_space, self.single_action_space = Messages(), AssistantMessage()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.envs: list[GymEnvironment] = []
        try:
            for _ in range(num_envs):
                self.envs.append(GymEnvironment(environment, **options))
        except BaseException:  # after any error, close the environments already made
            self.close_extras()
            raise
        self._host = get_host()
        self._ended = np.zeros(num_envs, dtype=np.bool_)
        self._observations: list[GymObservation] = [()] * num_envs

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Start an episode in every environment, or in those selected by `options["reset_mask"]`.

        Args:
            seed: one seed per environment, or the first of consecutive seeds.
        """
        seeds = self._seeds(seed)
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs)), dtype=np.bool_)
        chosen = [int(index) for index in np.flatnonzero(mask)]
        for index in chosen:
            if seeds[index] is not None:
                self.envs[index].np_random = np.random.default_rng(seeds[index])
        results = self._host.run(
            gather_or_cancel([self.envs[index].reset_async(seeds[index], options) for index in chosen])
        )
        infos: dict[str, Any] = {}
        for index, (observation, info) in zip(chosen, results, strict=True):
            self._observations[index] = observation
            infos = self._add_info(infos, info, index)
        self._ended[mask] = False
        return tuple(self._observations), infos

    def step(self, actions: Sequence[Action]) -> StepResults:
        """Apply one action per environment; environments whose episode has ended are reset instead."""
        if len(actions) != self.num_envs:
            raise ValueError(f"{len(actions)} actions for {self.num_envs} environments")
        triples = zip(self.envs, self._ended.tolist(), actions, strict=True)
        work = [_reset(env) if ended else env.step_async(action) for env, ended, action in triples]
        results = self._host.run(gather_or_cancel(work))
        rewards = np.array([result[1] for result in results], dtype=np.float64)
        terminated = np.array([result[2] for result in results], dtype=np.bool_)
        truncated = np.array([result[3] for result in results], dtype=np.bool_)
        infos: dict[str, Any] = {}
        for index, result in enumerate(results):
            self._observations[index] = result[0]
            infos = self._add_info(infos, result[4], index)
        self._ended = terminated | truncated
        return tuple(self._observations), rewards, terminated, truncated, infos

    def render(self) -> tuple[str | None, ...]:  # type: ignore[override]
        """Render every conversation as text."""
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if not isinstance(seed, Sequence):
            return list(range(seed, seed + self.num_envs))
        if len(seed) != self.num_envs:
            raise ValueError(f"{len(seed)} seeds for {self.num_envs} environments")
        return list(seed)


async def _reset(env: GymEnvironment) -> GymStep:
    observation, info = await env.reset_async(None, None)
    return observation, 0.0, False, False, info
