"""Adapter that lets agents play a gymnasium environment in text.

    env = fe.make("gymnasium", env_id="FrozenLake-v1", env_options={"is_slippery": False})

The agent sees the environment's text rendering (`render_mode="ansi"`) or the values of its observation, and answers
with `<action>right</action>` (or the word alone). Rewards are passed through. A task is a seed of the wrapped
environment. Override `describe` in a subclass to describe observations better. If an answer is not a valid action, the
agent gets an error message; the answer uses up a turn and does not change the game.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from random import Random
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from pydantic import Field

from forge_env.environment.base import Environment, EnvironmentConfig, resolve_task
from forge_env.errors import UsageError, environment_code
from forge_env.rewards.spans import last_between
from forge_env.types import Action, Message, ResetResult, StepResult, Task, as_message

LARGEST_SEED = 2**31
MOST_NUMBERS = 256
"""Maximum numbers in an observation that is shown as values."""
MOST_TO_GIVE = 16
ACTIONS = {
    "Blackjack": ["stick", "hit"],
    "CartPole": ["left", "right"],
    "CliffWalking": ["up", "right", "down", "left"],
    "FrozenLake": ["left", "down", "right", "up"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
}
"""Action names of gymnasium's built-in environments, in order, from their documentation."""
HIGHEST = {"Blackjack": 1.0, "CliffWalking": -13.0, "FrozenLake": 1.0}
"""Highest rewards of gymnasium's built-in environments with default reward options, from their documentation."""
_OF_REWARDS = {"natural", "sab", "reward_schedule", "sutton_barto_reward", "desc", "map_name"}
"""Options that change the highest reward."""
COLOURS = dict(enumerate(("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white"), start=30))
PAINT = re.compile(r"\x1b\[([0-9;]*)m")
"""ANSI codes for text and background colours."""


class GymnasiumConfig(EnvironmentConfig):
    """Which environment, and how its actions are called."""

    env_id: str
    """Name in gymnasium's registry; `module:Name` imports the module first."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    actions: list[str] = Field(default_factory=list)
    """Words for the actions of a discrete space, in order; empty: the environment's own names where it has any, or \
the numbers themselves."""
    show: Literal["auto", "text", "values"] = "auto"
    """What the agent sees: `text`, what the environment draws for a terminal; `values`, its observation; `auto`: text \
where the environment can draw it."""
    max_reward: float | None = None
    """Sum of the rewards of a perfect episode. By default from gymnasium's registry and documentation; if unknown, \
evaluations don't report solved tasks."""
    luck: float = Field(0.0, ge=0.0, lt=1.0)
    """Fraction of games that repeating one action wins by chance; `validate` fails if it wins more often."""
    instructions: str = ""
    """What the game is about, shown first."""
    max_turns: int = Field(100, ge=1)
    """Messages in one episode, also those that are not actions."""


class GymnasiumEnvironment(Environment):
    """A gymnasium environment, played in words."""

    config_class: ClassVar[type[EnvironmentConfig]] = GymnasiumConfig
    config: GymnasiumConfig

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self._env: gymnasium.Env[Any, Any] | None = None
        self._running = False
        self._turns = 0
        self._actions = 0
        given = self.config.max_reward
        self.max_reward = highest_reward(self.config.env_id, self.config.env_options) if given is None else given
        self.luck = self.config.luck

    # For subclasses to override.

    def describe(self, observation: Any) -> str:
        """Describe an observation as text."""
        if self.game.render_mode == "ansi":
            return unpainted(str(self.game.render())).strip("\n")
        return as_words(observation, self.game.observation_space)

    def explain(self) -> str:
        """Instructions for answers, shown with the first observation."""
        return explained(self.game.action_space, self.actions)

    @property
    def actions(self) -> list[str]:
        """Names of the actions, in order; empty if actions are numbers or text."""
        return self.config.actions or action_names(self.game)

    # The `Environment` interface.

    def task(self, split: str, index: int) -> Task:
        """Make a task from a seed of the wrapped environment; even seeds belong to `train`, odd ones to `eval`."""
        seed = (2 * (self.config.seed * 1_000_003 + index) + (split == "eval")) % LARGEST_SEED
        prompt = self.config.instructions or f"Play {self.config.env_id}."
        return Task(id=f"{split}-{self.config.seed}-{index}", prompt=prompt, data={"seed": seed}, split=split)

    @property
    def game(self) -> gymnasium.Env[Any, Any]:
        """The wrapped environment, made on first use."""
        if self._env is None:
            self._env = make_game(
                self.config.env_id, self.config.env_options, self.config.actions, show=self.config.show
            )
        return self._env

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start the game of a task."""
        task = resolve_task(self, seed, options)
        with environment_code(f"{self.config.env_id}.reset", task.id):
            observation, _ = self.game.reset(seed=task.data.get("seed", seed))
        self._running, self._turns, self._actions = True, 0, 0
        text = "\n".join([task.prompt, self.explain(), self.describe(observation)])
        return [Message(role="user", content=text)], {"task_id": task.id, "split": task.split}

    async def step(self, action: Action) -> StepResult:
        """Play one move; if the message is not a valid action, answer with an error message."""
        if not self._running:
            raise UsageError("step() without a running episode", fix="call reset() first")
        self._turns += 1
        move, problem = self.read_action(as_message(action).content)
        reward, terminated, truncated = 0.0, False, False
        info: dict[str, Any] = {}
        if problem:
            text = f"{problem} {self.explain()}"
        else:
            self._actions += 1
            with environment_code(f"{self.config.env_id}.step", self.config.env_id):
                observation, earned, terminated, truncated, _ = self.game.step(move)
                reward, terminated, truncated = float(earned), bool(terminated), bool(truncated) and not terminated
                text = self.describe(observation)
        if truncated:
            info["truncation"] = "limit"
        elif not terminated and self._turns >= self.config.max_turns:
            truncated = True
            info["truncation"] = "turns"
        if terminated or truncated:
            self._running = False
            info["metrics"] = {"turns": float(self._turns), "invalid_actions": float(self._turns - self._actions)}
        return [Message(role="user", content=text)], reward, terminated, truncated, info

    def random_action(self, rng: Random) -> Action | None:
        """A random action of the game, in the format of an agent's answer."""
        return (
            f"<action>{as_answer(sampled(self.game.action_space, rng), self.game.action_space, self.actions)}</action>"
        )

    async def close(self) -> None:
        """Close the wrapped environment."""
        self._running = False
        game, self._env = self._env, None
        if game is not None:
            game.close()

    def read_action(self, text: str) -> tuple[Any, str]:
        """Parse an action from a message: `(action, "")`, or `(None, error message)`."""
        return read_action(text, self.game.action_space, self.actions)


def explained(space: gymnasium.Space[Any], actions: Sequence[str]) -> str:
    """Instructions for answering with an action of a space; `actions` are the names of its actions, if any."""
    if actions:
        choices = ", ".join(actions)
    elif isinstance(space, spaces.Discrete):
        choices = f"a number from {space.start} to {space.start + space.n - 1}"
    elif isinstance(space, spaces.Text):
        choices = "a text"
    else:
        low, high = bounds(space)
        each = [f"{a:g} to {b:g}" for a, b in zip(low, high, strict=True)]
        choices = f"{len(each)} numbers ({', '.join(each)})" if len(each) > 1 else f"a number from {each[0]}"
    return f"Answer with <action>...</action>: {choices}."


def read_action(text: str, space: gymnasium.Space[Any], actions: Sequence[str]) -> tuple[Any, str]:
    """Parse an action from a message: `(action, "")`, or `(None, error message)`. `actions`: names, if any."""
    tagged = last_between(text, "<action>", "</action>")
    given = text if tagged is None else tagged
    if isinstance(space, spaces.Text):
        ok = space.contains(given)
        return (given, "") if ok else (None, "That is not a valid text here.")
    word = given.strip().casefold()
    if names := [name.casefold() for name in actions]:
        if word in names:
            return names.index(word) + int(space.start), ""  # type: ignore[attr-defined]
    elif isinstance(space, spaces.Discrete):
        if re.fullmatch(r"[+-]?\d{1,9}", word, re.ASCII) and space.contains(int(word)):
            return int(word), ""
    elif (numbers := as_array(word, space)) is not None:
        return numbers, ""
    return None, f"{given.strip()[:40]!r} is not an action." if given.strip() else "There is no action in that."


def highest_reward(env_id: str, options: Mapping[str, Any]) -> float | None:
    """Reward of a perfect episode of a built-in gymnasium environment; None if unknown.

    The registry's `reward_threshold` is something else: the mean reward at which an environment counts as solved.
    """
    spec = gymnasium.registry.get(env_id)
    if spec is None or not str(spec.entry_point).startswith("gymnasium.envs.") or options.keys() & _OF_REWARDS:
        return None
    if spec.name == "CartPole":  # 1 for each step
        return (
            None if spec.max_episode_steps is None else float(options.get("max_episode_steps", spec.max_episode_steps))
        )
    return HIGHEST.get(spec.name)


def sampled(space: gymnasium.Space[Any], rng: Random) -> Any:
    """Sample an action of a space without using the game's own generator."""
    drawn = copy.copy(space)
    drawn.seed(rng.randrange(LARGEST_SEED))  # a separate generator
    return drawn.sample()


def as_answer(action: Any, space: gymnasium.Space[Any], actions: Sequence[str]) -> str:
    """Text that `read_action` parses as this action."""
    if isinstance(space, spaces.Text):
        return str(action)
    if isinstance(space, spaces.Discrete):
        return actions[int(action - space.start)] if actions else str(int(action))
    return " ".join(map(str, np.asarray(action).ravel().tolist()))


def make_game(
    env_id: str, options: dict[str, Any], actions: list[str], *, show: Literal["auto", "text", "values"] = "values"
) -> gymnasium.Env[Any, Any]:
    """Make an environment and check its spaces. `UsageError`: it can't be made, or not be played in text."""
    try:
        game = gymnasium.make(env_id, **options)
        can_draw = "ansi" in game.metadata.get("render_modes", ())
        if "render_mode" not in options and show != "values" and can_draw:
            game.close()
            game = gymnasium.make(env_id, **options, render_mode="ansi")
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        module = env_id.partition(":")[0] if ":" in env_id and isinstance(error, ModuleNotFoundError) else ""
        fix = f"install the package that has the module {module!r}" if module else "check env_id, env_options"
        raise UsageError(f"gymnasium can't make {env_id!r}: {str(error)[:300]}", fix=fix) from error
    drawn = game.render_mode == "ansi"
    fix = "use an environment with small or discrete spaces, or wrap it in one (gymnasium.ObservationWrapper)"
    if not can_give(game.action_space):
        problem = f"{env_id} has actions {game.action_space}, which can't be written as text"
    elif show == "text" and not drawn:
        problem, fix = f"{env_id} can't be rendered as text (it has no render mode 'ansi')", "use show=values"
    elif not drawn and not has_words(game.observation_space):
        problem = f"{env_id} has observations {game.observation_space}, which can't be shown as text"
    elif actions and not (isinstance(game.action_space, spaces.Discrete) and game.action_space.n == len(actions)):
        problem = f"`actions` has {len(actions)} words, {env_id} has actions {game.action_space}"
        fix = "name every action, in order; leave `actions` empty to use the environment's own names, or numbers"
    else:
        return game
    game.close()
    raise UsageError(problem, fix=fix)


def action_names(game: gymnasium.Env[Any, Any]) -> list[str]:
    """Action names of a discrete environment: from Atari's method, MiniGrid's enum or `ACTIONS`; empty if unknown."""
    space, inner = game.action_space, game.unwrapped
    if not isinstance(space, spaces.Discrete):
        return []
    meanings, kinds = getattr(inner, "get_action_meanings", None), getattr(inner, "actions", None)
    if callable(meanings):
        names = [str(name).lower() for name in meanings()]
    elif isinstance(kinds, type) and issubclass(kinds, Enum):
        names = [kind.name for kind in kinds]
    else:
        names = ACTIONS.get(game.spec.name if game.spec else "", [])
    return names if len(names) == space.n else []


def unpainted(text: str) -> str:
    """Replace ANSI colours by markup: [S] for a background colour, {R:blue} for a text colour, [{R:blue}] for both."""
    first, *others = PAINT.split(text)
    shown, codes = [first], list[int]()
    for given, piece in zip(others[::2], others[1::2], strict=True):
        for code in (int(part or 0) for part in given.split(";")):
            codes = [*codes, code] if code else []
        colour = next((COLOURS[code] for code in reversed(codes) if code in COLOURS), None)
        named = piece if colour is None else f"{{{piece}:{colour}}}"
        on_colour = any(40 <= code <= 47 or 100 <= code <= 107 for code in codes)
        shown.append((f"[{named}]" if on_colour else named) if piece else "")
    return "".join(shown)


def can_give(space: gymnasium.Space[Any]) -> bool:
    """Whether actions of this space can be written as text: a choice, a text, or a few numbers."""
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return math.prod(space.shape) <= MOST_TO_GIVE
    return isinstance(space, spaces.Discrete | spaces.Text)


def bounds(space: gymnasium.Space[Any]) -> tuple[list[float], list[float]]:
    """Lowest and highest values of an action's numbers."""
    if isinstance(space, spaces.Box):
        return space.low.ravel().tolist(), space.high.ravel().tolist()
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.ravel().tolist(), (space.start + space.nvec - 1).ravel().tolist()
    count = math.prod(space.shape or ())
    return [0.0] * count, [1.0] * count


def as_array(text: str, space: gymnasium.Space[Any]) -> Any:
    """Parse the numbers in a text as an action of `space`; None if they are not one."""
    words = re.split(r"[\s,;]+", text.strip(" \t\n[]()"))
    try:
        values = np.array([float(word) for word in words])
    except ValueError:
        return None
    if len(values) != math.prod(space.shape or ()) or not np.isfinite(values).all():
        return None
    given = values.reshape(space.shape)
    action = given.astype(space.dtype)
    whole = isinstance(space, spaces.Box) or (action == given).all()
    return action if whole and space.contains(action) else None


def has_words(space: gymnasium.Space[Any]) -> bool:
    """Whether observations of this space can be shown as text: few numbers, text, or nested combinations."""
    if isinstance(space, spaces.Tuple):
        return all(map(has_words, space.spaces))
    if isinstance(space, spaces.Dict):
        return all(map(has_words, space.spaces.values()))
    if isinstance(space, spaces.Box):
        return math.prod(space.shape) <= MOST_NUMBERS
    numbers = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    return isinstance(space, numbers | spaces.Text) or isinstance(space.sample(), str)  # MiniGrid's missions


def as_words(value: Any, space: gymnasium.Space[Any]) -> str:
    """Format an observation as text; `has_words(space)` must hold."""
    if isinstance(space, spaces.Tuple):
        return "(" + ", ".join(as_words(*pair) for pair in zip(value, space.spaces, strict=True)) + ")"
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{name}: {as_words(value[name], inner)}" for name, inner in space.spaces.items())
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    if isinstance(space, spaces.Box):
        return str(np.round(value, 4).astype(float if value.dtype.kind == "f" else int).round(4).tolist())
    return str(value.tolist()) if isinstance(value, np.ndarray) else str(value)
