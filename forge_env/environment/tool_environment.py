"""Environments whose agents call tools. Define tasks, tools and a rubric; `reset` and `step` are implemented here.

    class Arithmetic(fe.ToolEnvironment):
        rubric = fe.Rubric(fe.rewards.exact_match)

        def task(self, split, index):
            return fe.Task(id=f"{split}-{index}", prompt=f"What is {index} + 1?", data={"answer": str(index + 1)})

        @fe.tool
        def add(self, a: int, b: int) -> int:
            \"\"\"Add two numbers.\"\"\"
            return a + b

A message with tool calls is answered with one tool message per call, in order. A message without tool calls,
or `self.submit(answer)` in a tool, ends the episode, which is then scored. `step` accepts any message of the agent:
it raises only failures of the infrastructure (`InfrastructureError`) and bugs of the environment
(`EnvironmentBugError`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from forge_env.concurrency import gather_or_cancel, settled
from forge_env.environment.base import Environment, EnvironmentConfig, as_observation, resolve_task
from forge_env.errors import EnvironmentBugError, UsageError, environment_code
from forge_env.rewards.rubric import Rubric, RubricResult
from forge_env.tools.calls import CALLS_S, ToolCalls
from forge_env.tools.schema import Tool, ToolResult, shorten, tools_of
from forge_env.types import (
    Action,
    Message,
    Observation,
    ResetResult,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
    as_message,
    clean_unicode,
)
from forge_env.working_time import limited_elsewhere

if TYPE_CHECKING:
    from forge_env.tasks.datasets import StreamedTasks


class ToolEnvironmentConfig(EnvironmentConfig):
    """Limits of an episode with tools.

    Examples:
        >>> import forge_env as fe
        >>> fe.ToolEnvironmentConfig(max_tool_calls=3).tool_timeout_s
        60.0
    """

    max_turns: int = Field(8, ge=1)
    """Assistant messages in one episode before it is truncated."""
    max_tool_calls: int = Field(64, ge=0)
    """Maximum tool calls in one episode; further calls are not run, and the episode is truncated."""
    tool_timeout_s: float = Field(60.0, gt=0)
    """Maximum wall-clock seconds of one call, for tools without their own `timeout_s`."""
    max_tool_output_chars: int = Field(16_384, ge=256)
    """Maximum characters of one call's result; from longer ones, the middle is cut out and marked."""


class ToolEnvironment(Environment):
    """An environment whose methods decorated with `@fe.tool` are the agent's tools.

    A subclass defines `task` (or `tasks`) and `rubric`; if needed also `prompt`, `setup` and `cleanup`.
    Tools and reward functions read the episode from `current_task`, `messages` and `answer`.

    Args:
        config: options, an object of `config_class`; None: the defaults.
        context: `sandboxes`, as for every `Environment`.

    Examples:
        >>> import forge_env as fe
        >>> class Scale(fe.ToolEnvironment):
        ...     rubric = fe.Rubric(fe.rewards.ExactMatch())
        ...
        ...     def task(self, split, index):
        ...         return fe.Task(id=f"{split}-{index}", prompt="What does it weigh?", gold=str(index), split=split)
        ...
        ...     @fe.tool
        ...     def weigh(self) -> str:
        ...         \"\"\"Put it on the scale.\"\"\"
        ...         return str(self.current_task.gold)
        >>> [tool.name for tool in Scale().tools]
        ['weigh']
    """

    config_class: ClassVar[type[EnvironmentConfig]] = ToolEnvironmentConfig
    rubric: Rubric
    system_prompt: ClassVar[str | None] = None
    """System message at the start of each episode; None: no system message."""

    current_task: Task
    """The task of this episode, hidden data included."""
    messages: list[Message]
    """The conversation so far, from the first observation on."""
    _how_to_reward = "set `rubric = fe.Rubric([...])`"
    _reward_is_called = "rubric"

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self.messages = []
        self.turns = self.tool_calls = self.tool_errors = 0
        self._tools: dict[str, Tool] = tools_of(type(self))
        self._lasting_tools = self._tools
        self._running_calls = ToolCalls(self)
        self._submitted: str | None = None
        self._state = "new"  # new -> running -> ended
        self._holds_resources = False
        if not isinstance(self.rubric, Rubric):
            has = (
                f" has no {self._reward_is_called}"
                if self.rubric is None
                else f".rubric is a {type(self.rubric).__name__}"
            )
            raise UsageError(f"{type(self).__name__}{has}", fix=self._how_to_reward)

    # Methods that an author may override.

    def task(self, split: str, index: int) -> Task:
        """Return the `index`-th task of `split`. Override this for generated tasks, or `tasks` for a list of them."""
        tasks = self.tasks(split)
        if not hasattr(tasks, "__getitem__") or isinstance(tasks, Mapping | str | bytes):
            name = f"{type(self).__name__}.tasks"
            raise EnvironmentBugError(f"{name} returned a {type(tasks).__name__}", fix="return a list of fe.Task")
        return tasks[index]

    def tasks(self, split: str) -> Sequence[Task] | StreamedTasks:
        """Return all tasks of `split`, the same at every call.

        `forge_env.tasks.datasets.load_tasks` reads tasks from files and hubs.

        Args:
            split: one of `splits`.
        """
        raise UsageError(f"{type(self).__name__} has no tasks", fix="define `task(split, index)` or `tasks(split)`")

    def num_tasks(self, split: str) -> int | None:
        """Length of `tasks(split)`; None if it is streamed, or if `task` is overridden instead."""
        if type(self).tasks is ToolEnvironment.tasks:
            return None
        tasks = self.tasks(split)
        return len(tasks) if isinstance(tasks, Sequence) else None

    def prompt(self, task: Task) -> Observation:
        """Make the first messages: `system_prompt` if there is one, the task's history and its prompt.

        A system message in the history replaces `system_prompt`.

        Args:
            task: the task of this episode.
        """
        history = list(task.history)
        if self.system_prompt and not any(message.role == "system" for message in history):
            history.insert(0, Message(role="system", content=self.system_prompt))
        return [*history, Message(role="user", content=task.prompt)]

    async def setup(self, task: Task) -> None:
        """Prepare an episode (acquire a sandbox, open files). `cleanup` is called even if this fails.

        Args:
            task: the task of this episode.
        """
        return

    async def cleanup(self) -> None:
        """Release the resources that `setup` acquired."""
        return

    # Methods for tools and reward functions.

    def submit(self, answer: str = "") -> None:
        """End the episode after this turn, with `answer` as the agent's answer. Call it in a tool or in `respond`.

        Args:
            answer: the text that reward functions get as `completion`.

        Raises:
            ToolError: the calling tool call timed out, or belongs to an episode that has ended.
        """
        self._running_calls.check("submit")
        name = type(self).__name__
        if not isinstance(answer, str):
            raise EnvironmentBugError(f"{name}.submit received a {type(answer).__name__}", fix="give a text: str(...)")
        if self._state != "running":
            raise EnvironmentBugError(
                f"{name}.submit was called before the agent", fix="call it in a tool or `respond`"
            )
        self._submitted = answer

    @property
    def answer(self) -> str:
        """The submitted answer, or else the text of the agent's last message."""
        if self._submitted is not None:
            return self._submitted
        return next((message.content for message in reversed(self.messages) if message.role == "assistant"), "")

    def add_tool(self, tool: Tool) -> None:
        """Add a tool that isn't a method of the class; a tool that `setup` adds is removed after the episode.

        Args:
            tool: a tool with a name that no other tool has.
        """
        self._running_calls.check("add_tool")
        if tool.spec.name in self._tools:
            fix = "rename one; McpServer.connect(..., prefix=...) renames those of a server"
            raise UsageError(f"there is already a tool named {tool.spec.name!r}", fix=fix)
        self._tools = {**self._tools, tool.spec.name: tool}
        if not self._holds_resources:
            self._lasting_tools = self._tools

    def _remove_tool(self, name: str) -> None:
        """Take a tool from the agent, until the episode ends if one is running.

        Args:
            name: the name of the tool.
        """
        self._running_calls.check("tools")
        self._tools = {known: tool for known, tool in self._tools.items() if known != name}
        if not self._holds_resources:
            self._lasting_tools = self._tools

    @property
    def tools(self) -> list[ToolSpec]:
        """Tools that the agent may call, in order of definition."""
        return [tool.spec for tool in self._tools.values()]

    @property
    def reusable(self) -> bool:
        """Whether this object can run another episode: no thread of a timed-out tool call is still running in it."""
        return self._running_calls.all_ended

    # The environment contract.

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode; see `Environment.reset`. `info` holds `task_id`, `split` and `difficulty`."""
        self._running_calls.end_episode()
        await self._release()
        await self._running_calls.wait_for_straggler(self.config.tool_timeout_s)
        self.current_task = task = resolve_task(self, seed, options)
        self.messages = []
        self.turns = self.tool_calls = self.tool_errors = 0
        self._submitted = None
        self._state = "new"
        self._holds_resources = True
        await self._begin(task)
        for name, kind in (("messages", list), ("turns", int), ("tool_calls", int), ("tool_errors", int)):
            if not isinstance(value := getattr(self, name), kind):
                problem = f"{type(self).__name__}.setup made self.{name} a {type(value).__name__}"
                raise EnvironmentBugError(problem, fix="the platform uses that name: choose another")
        with environment_code(f"{type(self).__name__}.prompt", task.id):
            prompted = await settled(self.prompt(task))
        observation = as_observation(f"{type(self).__name__}.prompt", prompted)
        self.messages.extend(observation)
        self._state = "running"
        return list(observation), {"task_id": task.id, "split": task.split, "difficulty": task.difficulty}

    async def step(self, action: Action) -> StepResult:
        """Run the message's tool calls, or score the episode if there are none."""
        if self._state != "running":
            fix = "call reset() first"
            if type(self).reset is not ToolEnvironment.reset:
                fix = f"{fix}; {type(self).__name__}.reset must call it: return await super().reset(...)"
            raise UsageError("step() without a running episode", fix=fix)
        message = as_message(action)
        self.turns += 1
        self.messages.append(message)
        calls = message.tool_calls
        allowed = calls[: self.config.max_tool_calls - self.tool_calls]
        observation = await self._answer_calls(calls, allowed) if calls else []
        terminated = self._submitted is not None or self.is_final(message)
        if inspect.iscoroutine(terminated):
            terminated.close()
            what = f"{type(self).__name__}.is_final is a coroutine function"
            raise EnvironmentBugError(what, fix="write `def is_final`, without `async`")
        if type(terminated).__name__ not in ("bool", "bool_"):  # numpy's Boolean type has either name
            what = f"{type(self).__name__}.is_final returned {terminated!r}"
            raise EnvironmentBugError(what, fix="return True or False")
        if not terminated and not calls:
            with environment_code(f"{type(self).__name__}.respond", self.current_task.id):
                response = await settled(self.respond(message))
            observation = as_observation(f"{type(self).__name__}.respond", response)
            terminated = self._submitted is not None
        self.messages.extend(observation)
        truncation = None
        if not terminated and len(allowed) < len(calls):
            truncation = "tool_calls"
        elif not terminated and self.turns >= self.config.max_turns:
            truncation = "turns"
        if not terminated and truncation is None:
            return observation, 0.0, False, False, {}
        reward, metrics = await self._scored()
        info: dict[str, Any] = {"metrics": metrics}
        if truncation is not None:
            info["truncation"] = truncation
        return observation, reward, terminated, truncation is not None, info

    def is_final(self, message: Message) -> bool:
        """Whether this message ends the episode; by default, if it calls no tool.

        Args:
            message: the agent's message.
        """
        return not message.tool_calls

    async def respond(self, message: Message) -> Observation:
        """Answer a message that calls no tool and is not final (as a simulated user, or with a game's next state).

        Args:
            message: the agent's message.
        """
        return []

    async def score(self) -> RubricResult:
        """Score the episode in its current state; also called for truncated episodes."""
        return await self.rubric.score(task=self.current_task, answer=self.answer, messages=self.messages, env=self)

    async def _scored(self) -> tuple[float, dict[str, float]]:
        """End the episode; return its reward and metrics."""
        result: object = await self.score()
        if not isinstance(result, RubricResult):
            fix = "return a RubricResult, or set `rubric` to the function"
            raise EnvironmentBugError(f"{type(self).__name__}.score returned a {type(result).__name__}", fix=fix)
        self._state = "ended"  # after scoring: if a time limit interrupts it, `truncate` scores again
        return result.reward, {**result.metrics, **self._counted()}

    async def truncate(self, reason: str) -> tuple[float, dict[str, float]]:
        """End the episode because of an external limit; the rubric scores its current state."""
        return await self._scored() if self._state == "running" else (0.0, {})

    async def close(self) -> None:
        """Release the episode's resources; may be called more than once."""
        self._state = "new"
        self._running_calls.end_episode()
        await self._release()

    def _counted(self) -> dict[str, float]:
        counted = self.counters()
        if not isinstance(counted, Mapping):
            what = f"{type(self).__name__}.counters returned a {type(counted).__name__}"
            raise EnvironmentBugError(what, fix="return a dictionary of numbers by name")
        return counted

    def counters(self) -> dict[str, float]:
        """Metrics of every episode, besides the rubric's."""
        return {
            "turns": float(self.turns),
            "tool_calls": float(self.tool_calls),
            "tool_errors": float(self.tool_errors),
        }

    async def _release(self) -> None:
        if self._holds_resources:
            self._holds_resources = False
            self._tools = self._lasting_tools
            await self._end()

    async def _begin(self, task: Task) -> None:
        what = f"{type(self).__name__}.setup"
        with environment_code(what, task.id):
            begun = self.setup(task)
            if inspect.isgenerator(begun) or inspect.isasyncgen(begun):
                raise EnvironmentBugError(
                    f"{what} contains `yield`, so it never runs", fix="release resources in `cleanup`"
                )
            await settled(begun)

    async def _end(self) -> None:
        with environment_code(f"{type(self).__name__}.cleanup", self.current_task.id):
            await settled(self.cleanup())

    async def _answer_calls(self, calls: list[ToolCall], allowed: list[ToolCall]) -> Observation:
        """Run the `allowed` calls concurrently, and answer each call with a tool message."""
        seconds = [0.0] * len(allowed)
        run = partial(self._running_calls.run, self._tools, task_id=self.current_task.id, seconds=seconds)
        work = [run(call, limit_s=self.config.tool_timeout_s, place=place) for place, call in enumerate(allowed)]
        try:
            with limited_elsewhere():
                results = await gather_or_cancel(work)
        finally:
            if (measured := CALLS_S.get()) is not None:
                measured.extend(seconds)
        self.tool_calls += len(allowed)
        used_up = ToolResult(f"Error: all {self.config.max_tool_calls} tool calls are used up", error=True)
        results += [used_up] * (len(calls) - len(allowed))
        self.tool_errors += sum(result.error for result in results)
        return [
            Message(
                role="tool",
                tool_call_id=clean_unicode(call.id),
                name=clean_unicode(call.function.name[:64]),
                content=clean_unicode(shorten(result.text, self.config.max_tool_output_chars)),
            )
            for call, result in zip(calls, results, strict=True)
        ]


def given_answer(env: Environment) -> str | None:
    """The agent's answer in the episode that has just ended; None: its last message."""
    if (method := getattr(env, "given_answer", None)) is not None:
        answer: str | None = method()
        return answer
    return env.answer if isinstance(env, ToolEnvironment) else None
