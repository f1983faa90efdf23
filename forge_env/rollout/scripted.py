"""Policies without a model, for tests, validation and baselines.

gold                 plays the environment's gold actions
empty                replies with empty messages
random               legal actions, by seed, if the environment can list them; else random messages and tool calls
package.module:name  a function `(messages, tools) -> str | Message`, sync or async
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from forge_env.concurrency import settled
from forge_env.environment.base import Environment
from forge_env.environment.optional import gold_actions, random_action
from forge_env.errors import EnvironmentBugError, UsageError, agent_code
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.types import FunctionCall, Message, Observation, Task, ToolCall, ToolSpec, as_message


class GoldPolicy(Policy):
    """Plays gold solutions (`forge_env.environment.optional.HasGold`); unlike a model it sees the task's hidden data.

    If an episode has several seats or conversations, it plays all of them: they take the actions in turn.
    """

    def __init__(self) -> None:
        self._playing: WeakKeyDictionary[Environment, ReplaySession] = WeakKeyDictionary()

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """Open a session for this task. Raises `UsageError` if the task has no gold solution."""
        if (playing := self._playing.get(env)) is not None:
            return playing
        actions = gold_actions(env, task)
        if actions is None:
            raise UsageError(f"task {task.id!r} has no gold solution", fix="set Task.gold, or define gold_actions")
        name = f"{type(env).__name__}.gold_actions"
        if isinstance(actions, str | Message):
            raise EnvironmentBugError(f"{name} returned a {type(actions).__name__}", fix="return a list of actions")
        try:
            session = self._playing[env] = ReplaySession([as_message(action) for action in actions])
        except UsageError as error:
            raise EnvironmentBugError(f"{name}: {error.message}", fix="give texts, and fe.call_tool(...)") from error
        return session


class ReplaySession(PolicySession):
    """Replies with the given messages in order, then with empty ones."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)
        self._next = 0

    async def reply(self, observation: Observation) -> Reply:
        """Return the next message."""
        self._next += 1
        if self._next > len(self._messages):
            return Reply(message=Message(role="assistant"))
        return Reply(message=self._messages[self._next - 1])


class ReplayPolicy(Policy):
    """Replies with the same messages in every episode."""

    def __init__(self, actions: Sequence[Message | str] = ("",)) -> None:
        if isinstance(actions, str):
            raise UsageError("the actions of a ReplayPolicy are a string", fix="give a list of actions, one a turn")
        self._messages = [as_message(action) for action in actions]

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a session that starts from the first message."""
        return ReplaySession(self._messages)


class FunctionPolicy(Policy):
    """Calls a function with the conversation and the tools, sync or async."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a session that collects the conversation for the function."""
        return _FunctionSession(self.function, tools)


class _FunctionSession(PolicySession):
    def __init__(self, function: Callable[..., Any], tools: list[ToolSpec]) -> None:
        self._function = function
        self._tools = tools
        self._messages: list[Message] = []

    async def reply(self, observation: Observation) -> Reply:
        self._messages.extend(observation)
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        with agent_code(name, self._function):
            action = await settled(self._function(list(self._messages), self._tools))
            try:
                message = as_message(action)
            except UsageError as error:  # the function's mistake, treated as an exception in it
                raise TypeError(str(error)) from error
        self._messages.append(message)
        return Reply(message=message)


class RandomPolicy(Policy):
    """Plays random legal actions (`forge_env.environment.optional.HasRandomActions`), reproducible by seed.

    Args:
        legal: whether to use the environment's legal actions. If False, or if the environment can't provide them,
            messages and tool calls are random, valid and invalid ones.
    """

    def __init__(self, *, legal: bool = True) -> None:
        self.legal = legal

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """Open a session with actions of the environment's `random_action`."""
        return _RandomSession(env.tools, random.Random(seed), env if self.legal else None)

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a session with a separate random generator."""
        return _RandomSession(tools, random.Random(seed))


P_TOOL_CALL = 0.6
_WORDS = (
    *("Yes", "No", "42", "-1", "print('hi')", "\u00e9t\u00e9 \U0001f40d"),
    *("<think>hm</think>", "```python\n1/0\n```", ""),
)


class _RandomSession(PolicySession):
    def __init__(self, tools: list[ToolSpec], rng: random.Random, env: Environment | None = None) -> None:
        self._tools = tools
        self._rng = rng
        self._env = env

    async def reply(self, observation: Observation) -> Reply:
        rng = self._rng
        if self._env is not None and (action := random_action(self._env, rng)) is not None:
            return Reply(message=as_message(action))
        content = " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(4)))
        calls = []
        if self._tools and rng.random() < P_TOOL_CALL:
            calls = [self._call(f"call-{number}") for number in range(rng.randint(1, 3))]
        return Reply(message=Message(role="assistant", content=content, tool_calls=calls))

    def _call(self, call_id: str) -> ToolCall:
        rng = self._rng
        spec = rng.choice(self._tools)
        kind = rng.random()
        if kind < 0.1:
            function = FunctionCall(name=rng.choice(_WORDS), arguments="{}")
        elif kind < 0.2:
            function = FunctionCall(name=spec.name, arguments=rng.choice(_WORDS))
        else:
            properties = spec.parameters.get("properties", {})
            arguments = {name: self._value(schema) for name, schema in (properties or {}).items()}
            function = FunctionCall(name=spec.name, arguments=json.dumps(arguments))
        return ToolCall(id=call_id, function=function)

    def _value(self, schema: Any) -> Any:
        rng = self._rng
        if not isinstance(schema, dict):  # JSON schema's `true`: any value
            return rng.choice(_WORDS)
        if options := schema.get("enum"):
            return rng.choice(options)
        match schema.get("type"):
            case "integer":
                return rng.randint(-100, 100)
            case "number":
                return rng.uniform(-100, 100)
            case "boolean":
                return rng.random() < 0.5
            case "array":
                return [self._value(schema.get("items", {})) for _ in range(rng.randrange(3))]
            case "object":
                return {}
            case _:
                return rng.choice(_WORDS)


SCRIPTED: dict[str, type[Policy]] = {"gold": GoldPolicy, "empty": ReplayPolicy, "random": RandomPolicy}


def scripted_policy(name: str) -> Policy | None:
    """The policy named `name` (see the module docstring), or None if it is not a scripted one."""
    if name in SCRIPTED:
        return SCRIPTED[name]()
    module, colon, attribute = name.partition(":")
    if not colon or "/" in name:
        return None
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"policy {name!r} can't be imported: {error}", fix="give package.module:function") from error
    if inspect.isclass(loaded):
        loaded = loaded()
    return loaded if isinstance(loaded, Policy) else FunctionPolicy(loaded)
