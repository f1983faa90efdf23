"""Any gymnasium environment with discrete or text spaces as an `Environment`, played in words.

    env = fe.make("gymnasium", env_id="FrozenLake-v1",
                  env_options={"is_slippery": False}, actions=["left", "down", "right", "up"])

The observation is shown as text, the agent answers with `<action>right</action>` (or that word alone), rewards pass
through. A task is a seed of the wrapped environment. Subclass it to show observations in better words (`describe`).
The agent is told when its answer is not an action; it costs a turn and changes nothing.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces
from pydantic import Field

from forge_env.environment.base import Environment, EnvironmentConfig
from forge_env.errors import UsageError, environment_code
from forge_env.rewards.spans import last_between
from forge_env.types import Action, Message, ResetResult, StepResult, Task, as_message

LARGEST_SEED = 2**31


class GymnasiumConfig(EnvironmentConfig):
    """Which environment, and how its actions are called."""

    env_id: str
    """Name in gymnasium's registry; `module:Name` imports the module first."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    actions: list[str] = Field(default_factory=list)
    """Words for the actions of a discrete space, in order; empty: the numbers themselves."""
    instructions: str = ""
    """What the game is about, shown first."""
    max_turns: int = Field(100, ge=1)
    """Messages in one episode, also those that are not actions."""


class GymnasiumEnvironment(Environment):
    """A gymnasium environment with discrete or text spaces, played in words."""

    config_class: ClassVar[type[EnvironmentConfig]] = GymnasiumConfig
    config: GymnasiumConfig

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self._env: gymnasium.Env[Any, Any] | None = None
        self._running = False
        self._turns = 0
        self._actions = 0

    # What a subclass may override.

    def describe(self, observation: Any) -> str:
        """An observation in words."""
        return as_words(observation, self.game.observation_space)

    def explain(self) -> str:
        """What the agent may do, said with the first observation."""
        space = self.game.action_space
        if self.config.actions:
            choices = ", ".join(self.config.actions)
        elif isinstance(space, spaces.Discrete):
            choices = f"a number from {space.start} to {space.start + space.n - 1}"
        else:
            choices = "a text"
        return f"Answer with <action>...</action>: {choices}."

    # The contract.

    def task(self, split: str, index: int) -> Task:
        """A seed of the wrapped environment; even ones belong to `train`, odd ones to `eval`."""
        seed = (2 * (self.config.seed * 1_000_003 + index) + (split == "eval")) % LARGEST_SEED
        prompt = self.config.instructions or f"Play {self.config.env_id}."
        return Task(id=f"{split}-{self.config.seed}-{index}", prompt=prompt, data={"seed": seed}, split=split)

    @property
    def game(self) -> gymnasium.Env[Any, Any]:
        """The wrapped environment, made when first needed.

        Raises:
            UsageError: there is none of that name, or its spaces can't be played in words.
        """
        if self._env is None:
            self._env = make_game(self.config.env_id, self.config.env_options, self.config.actions)
        return self._env

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start the game of a task."""
        task = self.resolve_task(seed, options)
        with environment_code(f"{self.config.env_id}.reset", task.id):
            observation, _ = self.game.reset(seed=task.data.get("seed", seed))
        self._running, self._turns, self._actions = True, 0, 0
        text = "\n".join([task.prompt, self.explain(), self.describe(observation)])
        return [Message(role="user", content=text)], {"task_id": task.id, "split": task.split}

    async def step(self, action: Action) -> StepResult:
        """One move; the agent is told when its message is not a move."""
        if not self._running:
            raise UsageError("step() without a running episode", fix="call reset() first")
        self._turns += 1
        move, problem = self.read_action(as_message(action).content)
        reward, terminated, truncated = 0.0, False, False
        info: dict[str, Any] = {}
        if problem:
            said = f"{problem} {self.explain()}"
        else:
            self._actions += 1
            with environment_code(f"{self.config.env_id}.step", self.config.env_id):
                observation, given, terminated, truncated, _ = self.game.step(move)
                reward, terminated, truncated = float(given), bool(terminated), bool(truncated) and not terminated
                said = self.describe(observation)
        if truncated:
            info["truncation"] = "limit"
        elif not terminated and self._turns >= self.config.max_turns:
            truncated = True
            info["truncation"] = "turns"
        if terminated or truncated:
            self._running = False
            info["metrics"] = {"turns": float(self._turns), "invalid_actions": float(self._turns - self._actions)}
        return [Message(role="user", content=said)], reward, terminated, truncated, info

    async def close(self) -> None:
        """Close the wrapped environment."""
        self._running = False
        game, self._env = self._env, None
        if game is not None:
            game.close()

    def read_action(self, text: str) -> tuple[Any, str]:
        """`(action, "")` from a message, or `(None, what is wrong)`."""
        tagged = last_between(text, "<action>", "</action>")
        given = text if tagged is None else tagged
        space = self.game.action_space
        if isinstance(space, spaces.Text):
            ok = space.contains(given)
            return (given, "") if ok else (None, "That is not a valid text here.")
        word = given.strip().casefold()
        if self.config.actions:
            names = [name.casefold() for name in self.config.actions]
            if word in names:
                return names.index(word) + int(space.start), ""  # type: ignore[attr-defined]
        elif re.fullmatch(r"[+-]?\d{1,9}", word, re.ASCII) and space.contains(int(word)):
            return int(word), ""
        return None, f"{given.strip()[:40]!r} is not an action." if given.strip() else "There is no action in that."


def make_game(env_id: str, options: dict[str, Any], actions: list[str]) -> gymnasium.Env[Any, Any]:
    """`gymnasium.make`, and the check that it can be played in words. `UsageError` says why it can't."""
    try:
        game = gymnasium.make(env_id, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UsageError(
            f"gymnasium can't make {env_id!r}: {str(error)[:300]}", fix="check env_id, env_options"
        ) from error
    if not isinstance(game.action_space, spaces.Discrete | spaces.Text):
        problem = f"{env_id} has actions {game.action_space}, which can't be given in words"
    elif not has_words(game.observation_space):
        problem = f"{env_id} has observations {game.observation_space}, which can't be shown in words"
    elif actions and not (isinstance(game.action_space, spaces.Discrete) and game.action_space.n == len(actions)):
        problem = f"`actions` has {len(actions)} words, {env_id} has actions {game.action_space}"
    else:
        return game
    game.close()
    raise UsageError(problem, fix="use an environment with Discrete or Text spaces")


def has_words(space: gymnasium.Space[Any]) -> bool:
    """Whether observations of this space can be shown as text: discrete, text, and nestings of those."""
    if isinstance(space, spaces.Tuple):
        return all(map(has_words, space.spaces))
    if isinstance(space, spaces.Dict):
        return all(map(has_words, space.spaces.values()))
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text)


def as_words(value: Any, space: gymnasium.Space[Any]) -> str:
    """An observation of a space that `has_words`, as text."""
    if isinstance(space, spaces.Tuple):
        return "(" + ", ".join(as_words(*pair) for pair in zip(value, space.spaces, strict=True)) + ")"
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{name}: {as_words(value[name], inner)}" for name, inner in space.spaces.items())
    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    return str(value.tolist())
