"""Adapter that lets agents play a PettingZoo game in text, with a seat for each of the game's agents.

    env = fe.make("pettingzoo", env_id="pettingzoo.classic.tictactoe_v3")

`env_id` is a module with a function `env`, as in PettingZoo, or `module:function`; the function returns a game with the
AEC interface. A task is a seed of the game. A seat answers with `<action>3</action>`. If that is not an action, or the
game's action mask forbids it, the seat gets an error message and another turn. The rewards of all seats are passed
through. Override `describe` in a subclass to describe observations better.
"""

from __future__ import annotations

from importlib import import_module
from random import Random
from typing import Any, ClassVar, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from pydantic import Field

from forge_env.environment.base import Environment, EnvironmentConfig, resolve_task
from forge_env.errors import UsageError, environment_code
from forge_env.gym.adapter import (
    LARGEST_SEED,
    as_answer,
    as_words,
    can_give,
    explained,
    has_words,
    read_action,
    sampled,
)
from forge_env.types import Action, Message, ResetResult, StepResult, Task, as_message

Game: TypeAlias = Any
"""A `pettingzoo.AECEnv`; PettingZoo is imported only when a game is made."""
MASK = "action_mask"


class PettingZooConfig(EnvironmentConfig):
    """Which game, and how its actions are called."""

    env_id: str
    """A module with a function `env`, such as `pettingzoo.classic.tictactoe_v3`, or `module:function`."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""
    actions: list[str] = Field(default_factory=list)
    """Words for the actions of a discrete space, in order; empty: they are given as numbers."""
    max_reward: float = 1.0
    """What a seat of a perfect episode earns, all its rewards together."""
    instructions: str = ""
    """What the game is about, told to each seat first."""
    max_turns: int = Field(200, ge=1)
    """Messages of all seats in one episode, also those that are not actions."""


class PettingZooEnvironment(Environment):
    """A PettingZoo game, played in words by as many seats as it has agents."""

    config_class: ClassVar[type[EnvironmentConfig]] = PettingZooConfig
    config: PettingZooConfig

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self.max_reward = self.config.max_reward
        self.game = make_game(self.config.env_id, self.config.env_options)
        self.seats = tuple(self.game.possible_agents)
        check_game(self.config.env_id, self.game, self.config.actions)
        self._running = False
        self._turns = self._actions = 0
        self._told: set[str] = set()
        """Seats that have been shown the task's prompt."""

    # For subclasses to override.

    def describe(self, seat: str, observation: Any) -> str:
        """Describe a seat's observation as text."""
        space = self.game.observation_space(seat)
        if _is_masked(space):
            observation, space = observation["observation"], space["observation"]
        return as_words(observation, space)

    # The `Environment` interface.

    def task(self, split: str, index: int) -> Task:
        """Make a task from a seed of the game; even seeds belong to `train`, odd ones to `eval`."""
        seed = (2 * (self.config.seed * 1_000_003 + index) + (split == "eval")) % LARGEST_SEED
        prompt = self.config.instructions or f"Play {self.config.env_id.rpartition('.')[2]}."
        return Task(id=f"{split}-{self.config.seed}-{index}", prompt=prompt, data={"seed": seed}, split=split)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start the game of a task."""
        self._task = task = resolve_task(self, seed, options)
        with environment_code(f"{self.config.env_id}.reset", task.id):
            self.game.reset(seed=task.data.get("seed", seed))
        self._running, self._turns, self._actions = True, 0, 0
        self._told = set()
        return self._view(), {"seat": self.game.agent_selection, "task_id": task.id, "split": task.split}

    async def step(self, action: Action) -> StepResult:
        """Play one move; if the message is not an allowed action, the seat gets an error message and another turn."""
        if not self._running:
            raise UsageError("step() without a running episode", fix="call reset() first")
        self._turns += 1
        seat = self.game.agent_selection
        text = as_message(action).content
        move, problem = read_action(text, self.game.action_space(seat), self.config.actions)
        mask = self._mask(seat)
        if not problem and mask is not None and not mask[int(move) - self._start(seat)]:
            problem = f"{text.strip()[:40]!r} is not possible now."
        if problem:
            return self._after([Message(role="user", content=f"{problem} {self._explain(seat)}")], 0.0, {}, False)
        self._actions += 1
        with environment_code(f"{self.config.env_id}.step", self._task.id):
            self.game.step(move)
            rewards = {str(agent): float(reward) for agent, reward in self.game.rewards.items()}
            cut = any(self.game.truncations.values()) and not any(self.game.terminations.values())
            while self.game.agents and self._is_out(self.game.agent_selection):
                self.game.step(None)
        reward = rewards.pop(seat, 0.0)
        if self.game.agents:
            return self._after(self._view(), reward, rewards, False)
        return self._after([], reward, rewards, not cut)

    def random_action(self, rng: Random) -> Action | None:
        """A random legal action of the seat whose turn it is."""
        seat, names = self.game.agent_selection, self.config.actions
        space, mask = self.game.action_space(seat), self._mask(seat)
        action = sampled(space, rng) if mask is None else self._start(seat) + int(rng.choice(np.flatnonzero(mask)))
        return f"<action>{as_answer(action, space, names)}</action>"

    async def close(self) -> None:
        """Close the game."""
        self._running = False
        self.game.close()

    def _after(
        self, observation: list[Message], reward: float, rewards: dict[str, float], terminated: bool
    ) -> StepResult:
        info: dict[str, Any] = {"rewards": rewards}
        over = not self.game.agents
        truncated = not terminated and (over or self._turns >= self.config.max_turns)
        if not over:
            info["seat"] = self.game.agent_selection
        if truncated:
            info["truncation"] = "limit" if over else "turns"
        if terminated or truncated:
            self._running = False
            info["metrics"] = {"turns": float(self._turns), "invalid_actions": float(self._turns - self._actions)}
        return observation, reward, terminated, truncated, info

    def _view(self) -> list[Message]:
        """Observation for the seat whose turn it is."""
        seat = self.game.agent_selection
        with environment_code(f"{self.config.env_id}.observe", self._task.id):
            described = self.describe(seat, self.game.observe(seat))
        opening = [] if seat in self._told else [f"{self._task.prompt} You are {seat}."]
        self._told.add(seat)
        return [Message(role="user", content="\n".join([*opening, described, self._explain(seat)]))]

    def _explain(self, seat: str) -> str:
        mask, names = self._mask(seat), self.config.actions
        if mask is None:
            return explained(self.game.action_space(seat), names)
        allowed = np.flatnonzero(mask)
        return explained(
            self.game.action_space(seat), [names[i] if names else str(i + self._start(seat)) for i in allowed]
        )

    def _mask(self, seat: str) -> Any:
        """The game's current action mask, or None."""
        observation = self.game.observe(seat)
        if isinstance(observation, dict) and MASK in observation:
            return observation[MASK]
        return self.game.infos[seat].get(MASK)

    def _start(self, seat: str) -> int:
        return int(getattr(self.game.action_space(seat), "start", 0))

    def _is_out(self, agent: str) -> bool:
        return bool(self.game.terminations[agent] or self.game.truncations[agent])


def make_game(env_id: str, options: dict[str, Any]) -> Game:
    """Make the game named by `env_id`. `UsageError`: it can't be made."""
    module, _, function = env_id.partition(":")
    try:
        game: Game = getattr(import_module(module), function or "env")(**options)
    except (ImportError, AttributeError, TypeError) as error:
        fix = "check env_id, env_options; PettingZoo is installed by: pip install 'pettingzoo[classic]'"
        raise UsageError(f"can't make {env_id!r}: {str(error)[:300]}", fix=fix) from error
    if not hasattr(game, "agent_selection") and not hasattr(game, "possible_agents"):
        raise UsageError(f"{env_id!r} returned a {type(game).__name__}", fix="name a function that returns an AEC game")
    return game


def check_game(env_id: str, game: Game, actions: list[str]) -> None:
    """Raise `UsageError` if a game can't be played in text."""
    for seat in game.possible_agents:
        observed, space = game.observation_space(seat), game.action_space(seat)
        shown = observed["observation"] if _is_masked(observed) else observed
        if not can_give(space):
            raise UsageError(f"{env_id} has actions {space}, which can't be written as text", fix="wrap the game")
        if not has_words(shown):
            fix = "wrap the game, so that it has small observations"
            raise UsageError(f"{env_id} has observations {shown}, which can't be shown as text", fix=fix)
        if actions and not (isinstance(space, spaces.Discrete) and space.n == len(actions)):
            fix = "name every action, in order; leave `actions` empty for numbers"
            raise UsageError(f"`actions` has {len(actions)} words, {env_id} has actions {space}", fix=fix)


def _is_masked(space: Space[Any]) -> bool:
    return isinstance(space, spaces.Dict) and MASK in space.spaces and "observation" in space.spaces
