"""Environments of the package `verifiers`, as an `Environment`: its tasksets, and packages for older releases.

    env = fe.make("verifiers", taskset="gsm8k-v1")

In verifiers, an episode runs a program (the harness) that sends requests to a model over HTTP. Here, the model's
endpoint is a loopback server: each request is an observation, and `step` sends the answer. Everything the environment
does between two requests (its tools, users, judges) happens as in verifiers, and its rewards are returned unchanged.

A harness that runs model-written code is accepted only with a runtime that isolates it (`runtime="docker"`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from environments.verifiers.endpoint import Endpoint, Request
from environments.verifiers.packages import PLAYERS, Played, Row, VerifiersConfig, load
from forge_env.environment.base import Environment, EnvironmentConfig, resolve_task
from forge_env.errors import InfrastructureError, UsageError
from forge_env.types import Action, Observation, ResetResult, StepResult, Task, ToolSpec, as_message

LOOK_AHEAD = 100
"""Number of tasks read to determine the size of a taskset, if `num_tasks` is unset."""


class VerifiersEnvironment(Environment):
    """An environment of the package verifiers."""

    config_class = VerifiersConfig
    splits = ("train",)
    config: VerifiersConfig

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self._key = self.config.model_dump_json(exclude={"seed", "answer_s", "code_timeout_s"})
        self._package = load(self._key)
        self._endpoint: Endpoint | None = None
        self._episode: asyncio.Task[Played] | None = None
        self._request: Request | None = None
        self._tools: list[ToolSpec] = []
        self._seen = 0
        self._turns = 0

    def task(self, split: str, index: int) -> Task:
        """Return the `index`-th task of the taskset."""
        row = self._package.rows[index]
        return Task(id=row.id, prompt=row.prompt, data={"position": index}, split=split)

    def num_tasks(self, split: str) -> int | None:
        """Number of tasks, up to `num_tasks`; if that is unset, None for more than `LOOK_AHEAD` tasks."""
        return self._package.rows.count(self.config.num_tasks or LOOK_AHEAD)

    @property
    def tools(self) -> list[ToolSpec]:
        """Tools in the first request of the episode."""
        return self._tools

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode and run it until its first request.

        Raises:
            InfrastructureError: the episode ended before its first request.
        """
        await self._stop()
        task = resolve_task(self, seed, options)
        if self._endpoint is None:
            self._endpoint = Endpoint()
            await self._endpoint.start()
        self._seen = self._turns = 0
        self._episode = asyncio.create_task(self._play(self._package.rows[task.data["position"]], self._endpoint.url))
        if (request := await self._next_request()) is None:
            raise InfrastructureError(
                f"{self.config.taskset} sent no request to the model: {self._episode.result().failure}"
            )
        self._tools = request.tools
        return self._new_messages(request), {"task_id": task.id, "split": task.split}

    async def step(self, action: Action) -> StepResult:
        """Answer the request, and wait for the next one or the end of the episode.

        Raises:
            InfrastructureError: the episode failed for a reason other than the agent.
        """
        if self._request is None or self._episode is None:
            raise UsageError("step() without a running episode", fix="call reset() first")
        self._turns += 1
        self._seen += 1  # the next request repeats this answer
        request, self._request = self._request, None
        request.answer(as_message(action))
        following = await self._next_request()
        if following is not None:
            return self._new_messages(following), 0.0, False, False, {}
        played = self._episode.result()
        if played.failure:
            raise InfrastructureError(f"{self.config.taskset}: {played.failure}")
        truncated = played.limited and self._turns >= self.config.max_turns
        info: dict[str, Any] = {"metrics": {**played.metrics, "turns": float(self._turns)}}
        if truncated:
            info["truncation"] = "turns"
        return [], played.reward, not truncated, truncated, info

    async def close(self) -> None:
        """Stop the episode and the endpoint."""
        await self._stop()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.stop()

    async def _stop(self) -> None:
        episode, self._episode, self._request = self._episode, None, None
        if episode is not None and not episode.done():
            episode.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await episode

    async def _play(self, row: Row, url: str) -> Played:
        """Run one episode of verifiers within a single asyncio task."""
        async with PLAYERS.use(self._key) as play:
            return await play(row, url)

    async def _next_request(self) -> Request | None:
        """Wait for the next request; None if the episode has ended."""
        assert self._episode is not None
        assert self._endpoint is not None
        asking = asyncio.ensure_future(self._endpoint.requests.get())
        try:
            done, _ = await asyncio.wait(
                {asking, self._episode}, timeout=self.config.answer_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            asking.cancel()
        if not done:
            await self._stop()
            raise InfrastructureError(
                f"{self.config.taskset}: no request and no result within {self.config.answer_s:g} s"
            )
        self._request = asking.result() if asking in done else None
        return self._request

    def _new_messages(self, request: Request) -> Observation:
        """Messages that earlier requests did not contain; all messages if the conversation was rewritten."""
        messages = request.messages
        start = self._seen if self._seen < len(messages) else 0
        self._seen = len(messages)
        return messages[start:]
