"""Adapter of an environment to PettingZoo's AEC interface, with an agent for each seat.

    from forge_env.gym.aec_twin import env

    game = env("nim", levels=[1])
    game.reset(seed=3)
    for agent in game.agent_iter():
        observation, reward, terminated, truncated, info = game.last()
        game.step(None if terminated or truncated else policy(agent, observation["messages"]))

An observation holds the messages that are new since the agent last acted; an action is an assistant message or its
text. An environment without seats has one agent, called "agent". Requires PettingZoo.
"""

from __future__ import annotations

from typing import Any

from gymnasium import Space, spaces
from pettingzoo import AECEnv

from forge_env.environment.optional import seats_of
from forge_env.gym.spaces import AssistantMessage, Messages
from forge_env.gym.twin import GymEnvironment
from forge_env.types import Action, Message

ALONE = "agent"


class AECEnvironment(AECEnv):  # type: ignore[misc]  # PettingZoo has no type hints
    """Synchronous adapter of an `Environment` with seats: same episodes, same seeds."""

    def __init__(self, environment: str, **options: Any) -> None:
        super().__init__()
        self._twin = GymEnvironment(environment, **options)
        self.metadata = {"name": environment, "render_modes": ["ansi"], "is_parallelizable": False}
        self.render_mode = self._twin.render_mode
        self.possible_agents = list(seats_of(self._twin.environment)) or [ALONE]
        self.observation_spaces = {agent: spaces.Dict({"messages": Messages()}) for agent in self.possible_agents}
        self.action_spaces = {agent: AssistantMessage() for agent in self.possible_agents}
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Space[Any]:
        """Space of an agent's observations: a dictionary with `messages`."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Space[Action]:
        """Space of an agent's actions: an assistant message, or its text."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start an episode; accepts the options of `Environment.reset` and ignores others."""
        known = {name: value for name, value in (options or {}).items() if name in ("task", "split", "index")}
        observation, info = self._twin.reset(seed=seed, options=known or None)
        self.agents = self.possible_agents[:]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._turn_to(observation, info)

    def step(self, action: Action | None) -> None:
        """Apply the message of the agent whose turn it is; None if the episode is over for it."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        observation, reward, terminated, truncated, info = self._twin.step("" if action is None else action)
        self._cumulative_rewards[agent] = 0.0
        self.rewards = dict.fromkeys(self.agents, 0.0) | info.pop("rewards", {})
        self.rewards[agent] += reward
        self._accumulate_rewards()
        self.terminations = dict.fromkeys(self.agents, terminated)
        self.truncations = dict.fromkeys(self.agents, truncated)
        self._turn_to(observation, info)
        self._deads_step_first()

    def observe(self, agent: str) -> dict[str, tuple[Message, ...]]:
        """Messages that are new to the agent; none if it is another agent's turn."""
        return {"messages": self._new if agent == self._shown else ()}

    def render(self) -> str | None:
        """Render the conversations as one text ("ansi")."""
        return self._twin.render()

    def close(self) -> None:
        """Close the environment; further calls have no effect."""
        self._twin.close()

    def _turn_to(self, observation: tuple[Message, ...], info: dict[str, Any]) -> None:
        seat = info.pop("seat", self.possible_agents[0])
        self.agent_selection = self._shown = seat
        self._new = observation
        self.infos = {agent: info if agent == seat else {} for agent in self.agents}


def env(environment: str, **options: Any) -> AECEnvironment:
    """Make an AEC game of an environment.

    Args:
        options: options of the environment; also `render_mode="ansi"`, and `sandboxes`, the name of an engine.
    """
    return AECEnvironment(environment, **options)
