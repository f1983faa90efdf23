"""verifiers: a taskset whose harness plays an environment, for its evaluations and for prime-rl.

    vf-eval forge-env-verifiers --env.taskset.environment calculator --env.agent.runtime.type subprocess --model MODEL

verifiers finds tasksets and harnesses as top-level modules; `forge_env_verifiers` is this one. The harness runs in
verifiers' process and asks the model through its interception server, so a trace has the tokens that were sampled. Code
of the agent runs in forge-env's sandboxes, whatever `runtime` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

from forge_env.environment.host import get_host
from forge_env.errors import InfrastructureError, UsageError
from forge_env.integrations import needs
from forge_env.integrations.episode import Episode
from forge_env.registry import make
from forge_env.tools.turns import read_turn
from forge_env.types import Message, Observation, ToolCall

with needs("verifiers", "verifiers==0.4.0"):
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI
    from verifiers.v1.runtimes import ProgramResult

__all__ = ["ForgeHarness", "ForgeTaskset"]
SAID = {"role", "content", "tool_calls", "reasoning_content"}
"""Fields of an answer that the next request repeats."""


class ForgeConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Which tasks of which environment."""

    environment: str = ""
    """Name of the environment."""
    options: dict[str, Any] = {}
    """Options of the environment."""
    split: str | None = None
    """Split of the tasks; unset: the one to train on."""
    sandboxes: str = "auto"
    """Sandbox engine."""


class ForgeData(vf.TaskData):  # type: ignore[misc]
    """Where a task is."""

    environment: str
    options: dict[str, Any] = {}
    split: str
    index: int
    sandboxes: str = "auto"


class ForgeTask(vf.Task[ForgeData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """A task of an environment; the environment scores it."""

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]
    async def reward(self, trace: vf.Trace) -> float:
        """The episode's reward."""
        return float(trace.info["forge_env"]["reward"])

    @vf.metric  # type: ignore[untyped-decorator]
    async def metrics(self, trace: vf.Trace) -> dict[str, float]:
        """The episode's metrics."""
        return dict(trace.info["forge_env"]["metrics"])


class _Tasks:
    """The tasks of an environment's split; endless if their number is unlimited."""

    config: ForgeConfig

    def __init__(self, config: ForgeConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        if not config.environment:
            raise UsageError("the taskset has no environment", fix="--env.taskset.environment NAME")
        self._env = make(config.environment, **config.options)
        self._split = config.split or self._env.splits[0]
        self._count = self._env.num_tasks(self._split)
        self.INFINITE = self._count is None

    def load(self) -> Iterator[ForgeTask]:
        """Yield the tasks in order."""
        for index in itertools.count() if self._count is None else range(self._count):
            task = self._env.task(self._split, index)
            where = {name: getattr(self.config, name) for name in ("environment", "options", "sandboxes")}
            yield ForgeTask(
                ForgeData(id=task.id, name=task.id, prompt=task.prompt, split=self._split, index=index, **where),
                self.config.task,
            )


class ForgeTaskset(_Tasks, vf.Taskset[ForgeTask, ForgeConfig]):  # type: ignore[misc]
    """The tasks of any environment."""


def taskset_of(name: str) -> type[Any]:
    """Make the taskset of one environment, for a package of its own that exports it together with `ForgeHarness`."""

    class Config(ForgeConfig):
        """Which tasks."""

        environment: str = name

    class Tasks(_Tasks, vf.Taskset[ForgeTask, Config]):  # type: ignore[misc]
        """The tasks of the environment."""

    return Tasks


class ForgeHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Plays an episode of an environment against the model."""

    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False
    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: ForgeData,
    ) -> ProgramResult:
        """Play the episode of a task. `InfrastructureError`: the episode is lost."""
        call = get_host().call
        episode = Episode(
            data.environment, split=data.split, index=data.index, sandboxes=data.sandboxes, **data.options
        )
        try:
            async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
                await self._play(episode, client, ctx.model, trace)
        finally:
            await call(episode.close())
        record = episode.trajectory
        trace.info["forge_env"] = {"reward": record.reward, "metrics": record.metrics, "truncation": record.truncation}
        return ProgramResult(0, "", "")

    async def _play(self, episode: Episode, client: Any, model: str, trace: vf.Trace) -> None:
        call = get_host().call
        observation: Observation | None = await call(episode.start())
        chat: list[dict[str, Any]] = []
        tools = {"tools": [tool.to_openai() for tool in episode.tools]} if episode.tools else {}
        while observation is not None:
            chat += [message.to_openai() for message in observation]
            try:
                answer = await client.chat.completions.create(model=model, messages=chat, **tools)
            except APIStatusError as error:
                if trace.stop_condition is None:
                    raise InfrastructureError(f"the model did not answer: {error}") from error
                await call(episode.truncate(trace.stop_condition))  # a limit of the run refused the turn
                return
            choice = answer.choices[0]
            chat.append(said := choice.message.model_dump(exclude_none=True, include=SAID))
            observation = await call(episode.answer(_message(said, len(chat)), cut=choice.finish_reason == "length"))


def _message(said: dict[str, Any], turn: int) -> Message:
    calls = [ToolCall.model_validate(call) for call in said.get("tool_calls", ())]
    return read_turn(
        said.get("content") or "", reasoning=said.get("reasoning_content"), calls=calls, tools=True, turn=turn
    )
