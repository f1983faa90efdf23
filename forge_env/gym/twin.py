"""Adapter of one environment to `gymnasium.Env`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from forge_env.environment.base import Environment
from forge_env.environment.host import get_host
from forge_env.gym.spaces import AssistantMessage, Messages
from forge_env.registry import make
from forge_env.types import Action, Message, Observation

GymObservation = tuple[Message, ...]
GymReset = tuple[GymObservation, dict[str, Any]]
GymStep = tuple[GymObservation, float, bool, bool, dict[str, Any]]


class GymEnvironment(gymnasium.Env[GymObservation, Action]):
    """Synchronous adapter of an `Environment`: same episodes, same seeds, same five values from `step`."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self, environment: str, *, sandboxes: str = "auto", render_mode: str | None = None, **options: Any
    ) -> None:
        self.observation_space = Messages()
        self.action_space = AssistantMessage()
        self.render_mode = render_mode
        self._host = get_host()
        self._engine_name: str | None = None
        engine = self._host.borrow_engine(sandboxes)
        try:
            self._make: Callable[[], Environment] = lambda: make(environment, sandboxes=engine, **options)
            self.environment = self._make()
        except BaseException:  # return the engine after any error
            self._host.return_engine(sandboxes)
            raise
        self._engine_name = sandboxes
        self._shown: list[Message] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> GymReset:
        """Start an episode; without a seed, the task is chosen by the generator of the last seed."""
        super().reset(seed=seed)
        return self._host.run(self.reset_async(seed, options))

    def step(self, action: Action) -> GymStep:
        """Apply one assistant message or its text."""
        return self._host.run(self.step_async(action))

    async def reset_async(self, seed: int | None, options: dict[str, Any] | None) -> GymReset:
        """`reset` for the host's event loop."""
        chosen = int(self.np_random.integers(2**31)) if seed is None else seed
        if not self.environment.reusable:  # a tool call that timed out still runs in it
            previous, self.environment = self.environment, self._make()
            await previous.close()
        observation, info = await self.environment.reset(seed=chosen, options=options)
        self._shown = []
        return self._new(observation), info

    async def step_async(self, action: Action) -> GymStep:
        """`step` for the host's event loop."""
        observation, reward, terminated, truncated, info = await self.environment.step(action)
        self._shown.append(Message(role="assistant", content=action) if isinstance(action, str) else action)
        return self._new(observation), float(reward), bool(terminated), bool(truncated), info

    def render(self) -> str | None:
        """The conversation as text ("ansi")."""
        if self.render_mode != "ansi":
            return None
        return "\n".join(f"[{message.role}] {_text(message)}" for message in self._shown)

    def close(self) -> None:
        """Close the environment and return its engine; further calls have no effect."""
        if self._engine_name is None:
            return
        name, self._engine_name = self._engine_name, None
        try:
            self._host.run(self.environment.close())
        finally:
            self._host.return_engine(name)

    def _new(self, observation: Observation) -> GymObservation:
        """Deep copies of messages, so that changes by the caller don't affect the episode."""
        copies = tuple(message.model_copy(deep=True) for message in observation)
        self._shown.extend(observation)
        return copies


def _text(message: Message) -> str:
    calls = [f"{call.function.name}({call.function.arguments})" for call in message.tool_calls]
    return "\n".join(filter(None, [message.content, *calls]))
