"""An episode that another trainer's loop plays turn by turn: it gets the new messages, and gives the answer.

    host, episode = get_host(), Episode("calculator", index=3)
    messages = host.run(episode.start())  # in an event loop: await host.call(episode.start())
    while messages is not None:
        messages = host.run(episode.answer(ask_the_model(messages, episode.tools)))
    episode.trajectory.reward

The coroutines run in the event loop of a thread (`forge_env.environment.host`), where the sandbox engine is as well.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from forge_env.environment.base import resolve_task
from forge_env.environment.host import Host, get_host
from forge_env.environment.optional import seats_of
from forge_env.errors import InfrastructureError, UsageError
from forge_env.policy import LimitReached, Policy, PolicySession, Reply
from forge_env.registry import maker
from forge_env.rollout.episode import Retry, run_episode
from forge_env.sandbox.engines import LazyEngine
from forge_env.trajectory import Trajectory
from forge_env.types import Action, Message, Observation, ToolSpec, as_message

ELSEWHERE = "train on it with forge-env: other trainers have one conversation per episode"


@lru_cache(maxsize=16)
def _engine(host: Host, name: str) -> LazyEngine:
    """The engine that all episodes of a process share; the host closes it at exit."""
    return host.borrow_engine(name)


class _Caller(Policy, PolicySession):
    """The caller of an `Episode`, as a policy and its only conversation."""

    def __init__(self) -> None:
        self.tools: list[ToolSpec] | None = None
        self.asked: asyncio.Queue[Observation] = asyncio.Queue()
        self.answers: asyncio.Queue[Reply | LimitReached] = asyncio.Queue()

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        if self.tools is not None:
            raise UsageError("this environment has several conversations per episode", fix=ELSEWHERE)
        self.tools = tools
        return self

    async def reply(self, observation: Observation) -> Reply:
        await self.asked.put(observation)
        answer = await self.answers.get()
        if isinstance(answer, LimitReached):
            raise answer
        return answer


class Episode:
    """One episode of an environment, played by the caller.

    Args:
        split: split of the task; None: the environment's first, which is the one to train on.

    Raises:
        UsageError: there is no such environment, option or task, or the environment has seats.
    """

    def __init__(
        self, environment: str, *, split: str | None = None, index: int = 0, sandboxes: str = "auto", **options: Any
    ) -> None:
        self._name = environment
        self._make = maker(environment, options, sandboxes=_engine(get_host(), sandboxes))
        env = self._make()
        if seats := seats_of(env):
            raise UsageError(f"{environment} has the seats {', '.join(seats)}", fix=ELSEWHERE)
        self._task = resolve_task(env, None, {"split": split or env.splits[0], "index": index})
        self._caller = _Caller()
        self._playing: asyncio.Task[Trajectory] | None = None
        self._trajectory: Trajectory | None = None

    @property
    def tools(self) -> list[ToolSpec]:
        """Tools that the agent may call; known after `start`."""
        return self._caller.tools or []

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self._trajectory is not None

    @property
    def trajectory(self) -> Trajectory:
        """The record of the episode, once it is over."""
        if self._trajectory is None:
            raise UsageError("the episode is not over", fix="answer, or truncate it")
        return self._trajectory

    async def start(self) -> Observation:
        """Reset the environment and return the first messages."""
        play = run_episode(
            self._make, self._caller, task=self._task, environment_name=self._name, retry=Retry(attempts=0)
        )
        self._playing = asyncio.create_task(play)
        observation = await self._next()
        assert observation is not None, "an episode has at least one turn"
        return observation

    async def answer(self, action: Action, *, cut: bool = False) -> Observation | None:
        """Apply one assistant message.

        Returns:
            The messages that are new to the agent, or None if the episode is over.

        Raises:
            InfrastructureError: the episode is lost: it has no score.
        """
        return await self._give(Reply(as_message(action), stop_reason="length" if cut else "stop"))

    async def truncate(self, limit: str) -> None:
        """End the episode because of the caller's limit, such as "tokens"; its state is scored. No effect if over."""
        if not self.over:
            await self._give(LimitReached(limit))

    async def close(self) -> None:
        """Abandon an episode that is not over, and release what it holds."""
        if self._playing is not None and not self._playing.done():
            self._playing.cancel()
            await asyncio.wait([self._playing])

    async def _give(self, answer: Reply | LimitReached) -> Observation | None:
        if self._playing is None or self._playing.done():
            raise UsageError("the episode is not running", fix="start it once, and answer until there are no messages")
        await self._caller.answers.put(answer)
        return await self._next()

    async def _next(self) -> Observation | None:
        assert self._playing is not None
        asking = asyncio.ensure_future(self._caller.asked.get())
        try:
            await asyncio.wait({asking, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            asking.cancel()
        if asking.done() and not asking.cancelled():
            return asking.result()
        trajectory = self._playing.result()
        if not trajectory.valid:
            raise InfrastructureError(f"the episode of task {trajectory.task_id} is lost: {trajectory.error}")
        self._trajectory = trajectory
        return None


def as_chat(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages for a Hugging Face chat template, which wants the arguments of calls as objects if they are JSON."""
    chat = [message.to_openai() for message in messages]
    for call in (call for message in chat for call in message.get("tool_calls", ())):
        with suppress(ValueError, RecursionError):  # a malformed call stays a text
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return chat
