"""Environments written for the package `verifiers` (its version-1 stack), as an `Environment`.

    env = fe.make("verifiers", taskset="gsm8k-v1")

In verifiers an episode runs a program (the harness) that asks a model over HTTP. Here that model is us: its endpoint
is a loopback server, each request is an observation, and `step` is the answer to it. So whatever the environment
does between two requests (its own tools, users, judges) happens as in verifiers, and its rewards are what it gives.

A harness that runs model-written code is accepted only with a runtime that isolates it (`runtime="docker"`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import Any, ClassVar

from pydantic import Field

from forge_env.environment.base import Environment, EnvironmentConfig
from forge_env.errors import InfrastructureError, UsageError
from forge_env.types import Action, Message, Observation, ResetResult, StepResult, Task, ToolSpec, as_message

MODEL = "forge-env"


class VerifiersConfig(EnvironmentConfig):
    """Which environment, and how its program runs."""

    taskset: str
    """Name of the installed taskset, as verifiers knows it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the taskset."""
    harness: str = "null"
    """The program that talks to the model; null is a plain conversation with the taskset's tools."""
    runtime: str = "subprocess"
    """Where that program runs: subprocess, docker, ..."""
    max_tasks: int = Field(1000, ge=1)
    """Most tasks read."""
    max_turns: int = Field(32, ge=1)
    """Assistant messages in one episode before it is truncated."""
    answer_s: float = Field(600.0, gt=0)
    """Seconds for what happens between two messages."""


class VerifiersEnvironment(Environment):
    """An environment of the package verifiers."""

    config_class: ClassVar[type[EnvironmentConfig]] = VerifiersConfig
    splits = ("train",)
    config: VerifiersConfig

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self._theirs, self._tasks = load(self.config)
        self._endpoint: Endpoint | None = None
        self._episode: asyncio.Task[Any] | None = None
        self._request: Request | None = None
        self._tools: list[ToolSpec] = []
        self._seen = 0
        self._turns = 0

    def task(self, split: str, index: int) -> Task:
        """The `index`-th task of the taskset."""
        data = self._tasks[index].data
        prompt = data.prompt_text or data.name or f"task {index}"
        return Task(id=str(data.id or data.name or index), prompt=prompt, data={"position": index}, split=split)

    def num_tasks(self, split: str) -> int | None:
        """How many were read."""
        return len(self._tasks)

    @property
    def tools(self) -> list[ToolSpec]:
        """What the first request of the episode offers."""
        return self._tools

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode: it runs until its first request.

        Raises:
            InfrastructureError: it ended before it asked anything.
        """
        await self._stop()
        task = self.resolve_task(seed, options)
        if self._endpoint is None:
            self._endpoint = Endpoint()
            await self._endpoint.start()
        self._seen = self._turns = 0
        self._episode = asyncio.create_task(self._play(self._tasks[task.data["position"]], self._endpoint.url))
        if (request := await self._next_request()) is None:
            raise InfrastructureError(f"{self.config.taskset} asked nothing: {_failure(self._episode.result())}")
        self._tools = request.tools
        return self._new_messages(request), {"task_id": task.id, "split": task.split}

    async def step(self, action: Action) -> StepResult:
        """Answer the request, and wait for the next or the end.

        Raises:
            InfrastructureError: the episode failed for no fault of the agent.
        """
        if self._request is None or self._episode is None:
            raise UsageError("step() without a running episode", fix="call reset() first")
        self._turns += 1
        self._seen += 1  # its next request repeats what we say now
        request, self._request = self._request, None
        request.answer(as_message(action))
        following = await self._next_request()
        if following is not None:
            return self._new_messages(following), 0.0, False, False, {}
        episode = self._episode.result()
        if not episode.ok:
            raise InfrastructureError(f"{self.config.taskset}: {_failure(episode)}")
        trace = episode.traces[-1]
        truncated = trace.stop_condition is not None and self._turns >= self.config.max_turns
        metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        metrics |= {name: float(item.value) for name, item in trace.rewards.items() if item is not None}
        info: dict[str, Any] = {"metrics": {**metrics, "turns": float(self._turns)}}
        if truncated:
            info["truncation"] = "turns"
        return [], float(trace.reward), not truncated, truncated, info

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

    async def _play(self, task: Any, url: str) -> Any:
        """One episode of theirs, in one asyncio task from start to end."""
        import verifiers.v1 as vf
        from verifiers.v1.clients import ModelContext

        client = vf.EvalClientConfig(base_url=url, api_key_var="FORGE_ENV_NO_KEY")
        async with self._theirs.serving():
            return await self._theirs.run_episode(task, ModelContext(model=MODEL, client=client))

    async def _next_request(self) -> Request | None:
        """The next request, or None when the episode has ended."""
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
            raise InfrastructureError(f"{self.config.taskset}: nothing happened for {self.config.answer_s:g} s")
        self._request = asking.result() if asking in done else None
        return self._request

    def _new_messages(self, request: Request) -> Observation:
        """What it says that it hasn't said before; all of it where the conversation was rewritten."""
        messages = request.messages
        start = self._seen if self._seen < len(messages) else 0
        self._seen = len(messages)
        return messages[start:]


def load(config: VerifiersConfig) -> tuple[Any, list[Any]]:
    """`(environment, tasks)` of verifiers. `UsageError` when it is missing, wrong, or would run code unprotected."""
    try:
        from verifiers.v1.utils.loaders import harness_class, load_environment, resolve_env_config
    except ImportError as error:
        raise UsageError("the package verifiers is not installed", fix='pip install "forge-env[verifiers]"') from error
    seat = {"harness": {"id": config.harness}, "runtime": {"type": config.runtime}, "max_turns": config.max_turns}
    try:
        if harness_class(config.harness).EXECUTES_CODE and config.runtime == "subprocess":
            raise UsageError(f"harness {config.harness!r} runs code of the model", fix="give runtime=docker")
        settings = resolve_env_config({"taskset": {"id": config.taskset, **config.options}, "agent": seat})
        theirs = load_environment(settings)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"verifiers can't load {config.taskset!r}: {str(error)[:500]}", fix="is it installed?"
        ) from error
    return theirs, list(itertools.islice(theirs.taskset, config.max_tasks))


def _failure(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message}" if errors else "it ended without a word"


class Request:
    """One question to the model, waiting for its answer."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.messages = [_message(item) for item in body.get("messages", [])]
        self.tools = [ToolSpec.model_validate(item["function"]) for item in body.get("tools") or []]
        self.answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def answer(self, message: Message) -> None:
        """Reply with an assistant message; dropped when nobody waits any more."""
        if self.answered.done():
            return
        said = message.to_openai()
        choice = {"index": 0, "message": said, "finish_reason": "tool_calls" if message.tool_calls else "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        head = {"id": "forge-env", "object": "chat.completion", "created": int(time.time()), "model": MODEL}
        self.answered.set_result({**head, "choices": [choice], "usage": usage})


def as_stream(reply: dict[str, Any]) -> str:
    """A completion as server-sent events: the whole message at once, the end, the usage."""
    [choice] = reply["choices"]
    calls = [{"index": number, **call} for number, call in enumerate(choice["message"].get("tool_calls", []))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": reply["usage"]},
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _message(item: dict[str, Any]) -> Message:
    content = item.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    known = {key: item.get(key) for key in ("tool_call_id", "name")}
    role = "system" if item["role"] == "developer" else item["role"]
    data = {"role": role, "content": content, "tool_calls": item.get("tool_calls") or [], **known}
    return Message.model_validate(data)


class Endpoint:
    """A model endpoint on the loopback interface whose answers are given by hand."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.url = ""
        self._runner: Any = None

    async def start(self) -> None:
        """Listen on a free port."""
        from aiohttp import web

        async def complete(request: web.Request) -> web.Response:
            body = await request.json()
            asked = Request(body)
            await self.requests.put(asked)
            reply = await asked.answered
            if body.get("stream"):
                return web.Response(text=as_stream(reply), content_type="text/event-stream")
            return web.json_response(reply)

        app = web.Application(client_max_size=256 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", complete)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Stop listening; requests that wait are dropped."""
        await self._runner.cleanup()
