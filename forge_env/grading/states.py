"""The files that a solution leaves in its sandbox: two commands that leave the same ones do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge_env.environment.base import Environment
from forge_env.environment.sandbox_environment import SandboxEnvironment
from forge_env.errors import InfrastructureError, UsageError
from forge_env.policy import PolicySession, Reply
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import ReplayPolicy, ReplaySession
from forge_env.types import Action, Message, Observation, Task, as_message
from forge_env.validation.checks import LIMITS

_LISTING = """{
find . -mindepth 1 -printf '%p %M %l\\n' | sort; find . -type f -exec sha256sum {} + 2>/dev/null | sort
} | sha256sum"""
"""Hash of the paths, modes, links and contents of the work folder: a list of them might be cut."""


async def state_after(make_env: Callable[[], Environment], task: Task, actions: Sequence[Action]) -> str | None:
    """Hash of the work folder before the last action; None if the earlier actions don't change it.

    Raises:
        InfrastructureError: the infrastructure failed, or the work folder can't be read.
        EnvironmentBugError: the environment's code failed.
    """
    policy = _Watching(actions)
    played = await run_episode(make_env, policy, task=task, seed=0, limits=LIMITS)
    if not played.valid or "" in policy.states:
        raise InfrastructureError(f"the work folder can't be read: {played.error or 'its listing failed'}")
    return policy.states[-1] if len(set(policy.states)) > 1 else None


class _Watching(ReplayPolicy):
    """Plays actions, and looks at the work folder before each."""

    def __init__(self, actions: Sequence[Action]) -> None:
        super().__init__(actions)
        self._actions = [as_message(action) for action in actions]
        self.states: list[str] = []

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        return _WatchingSession(self._actions, env, self.states)


class _WatchingSession(ReplaySession):
    def __init__(self, messages: Sequence[Message], env: Environment, states: list[str]) -> None:
        super().__init__(messages)
        self._env, self._states = env, states

    async def reply(self, observation: Observation) -> Reply:
        """Look at the work folder, and return the next message."""
        if isinstance(self._env, SandboxEnvironment):
            try:
                result = await self._env.sandbox.exec(["sh", "-c", _LISTING])
                self._states.append(result.stdout if result.ok else "")
            except UsageError:  # it has been given back: the episode is being scored
                pass
        return await super().reply(observation)
