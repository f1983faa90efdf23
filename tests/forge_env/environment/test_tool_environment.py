"""Tool environments: schemas, calls, limits, failures."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import types
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import forge_env as fe
from forge_env.errors import EnvironmentBugError, InfrastructureError, UsageError
from forge_env.tools.schema import Tool, tools_of


class Point(BaseModel):
    x: float
    y: float = 0.0


async def correct(task: fe.Task, answer: str) -> float:
    return float(answer == task.data["answer"])


class Arithmetic(fe.ToolEnvironment):
    """Adding numbers."""

    rubric = fe.Rubric([correct])

    def __init__(self, config: Any = None, **context: Any) -> None:
        super().__init__(config, **context)
        self.log: list[str] = []

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt=f"{index} + 1 = ?", data={"answer": str(index + 1)}, split=split)

    async def setup(self, task: fe.Task) -> None:
        self.log.append("setup")

    async def cleanup(self) -> None:
        self.log.append("cleanup")

    @fe.tool
    async def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Both are whole.

        Args:
            a: the first
                number.
            b (int): the second number.

        Returns:
            The sum.
        """
        return a + b

    @fe.tool
    def scale(self, point: Point, mode: Literal["up", "down"], json: list[int] | None = None) -> Point:
        """Scale a point."""
        return Point(x=point.x * (2 if mode == "up" else 0.5), y=point.y)

    @fe.tool(timeout_s=0.01)
    async def hang(self) -> None:
        """Never return."""
        await asyncio.Event().wait()

    @fe.tool
    async def refuse(self) -> None:
        """Refuse."""
        raise fe.ToolError("not today, try add")

    @fe.tool
    async def broken(self) -> None:
        """Fail."""
        raise ZeroDivisionError("oops")

    @fe.tool
    async def lost(self) -> None:
        """Lose the sandbox."""
        raise fe.SandboxError("gone")

    @fe.tool
    async def finish(self, answer: str) -> str:
        """End the episode."""
        self.submit(answer)
        return "submitted"


def call(name: str, arguments: Any = None, id: str = "c") -> fe.ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return fe.ToolCall.model_validate({"id": id, "function": {"name": name, "arguments": text}})


def calls(*items: fe.ToolCall, content: str = "") -> fe.Message:
    return fe.Message(role="assistant", content=content, tool_calls=list(items))


async def started(**options: Any) -> Arithmetic:
    env = Arithmetic(Arithmetic.config_class(**options))
    await env.reset(seed=3)
    return env


def test_schema_comes_from_hints_and_docstring() -> None:
    add = tools_of(Arithmetic)["add"].spec
    assert add.description == "Add two numbers.\n\nBoth are whole."
    assert add.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first number."},
            "b": {"type": "integer", "description": "the second number.", "default": 1},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


async def test_answer_without_tools_ends_the_episode() -> None:
    env = Arithmetic()
    observation, info = await env.reset(seed=3)
    assert [message.content for message in observation] == ["3 + 1 = ?"]
    assert info["task_id"] == "train-3"
    observation, reward, terminated, truncated, info = await env.step("4")
    assert (observation, reward, terminated, truncated) == ([], 1.0, True, False)
    assert info["metrics"] == {"correct": 1.0, "turns": 1.0, "tool_calls": 0.0, "tool_errors": 0.0}
    await env.close()
    await env.close()
    assert env.log == ["setup", "cleanup"]


async def test_parallel_calls_are_answered_in_order() -> None:
    env = await started()
    point = {"point": {"x": 1}, "mode": "up", "json": [1]}
    message = calls(call("scale", point, "1"), call("add", {"a": 3}, "2"), call("add", {"a": "1", "b": 5}, "3"))
    observation, reward, terminated, truncated, _ = await env.step(message)
    assert [(m.role, m.tool_call_id, m.content) for m in observation] == [
        ("tool", "1", '{"x": 2.0, "y": 0.0}'),
        ("tool", "2", "4"),
        ("tool", "3", "6"),
    ]
    assert (reward, terminated, truncated) == (0.0, False, False)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (call("ad", {"a": 1}), "did you mean 'add'"),
        (call("", "garbage"), "could not be read"),
        (call("add", "{'a': 1"), "not valid JSON"),
        (call("add", "[" * 100_000), "not valid JSON"),
        (call("add", "[1]"), "must be a JSON object"),
        (call("add", {"b": 1}), "wrong arguments: a: missing"),
        (call("add", {"a": 1, "c": 1}), "wrong arguments: c: unknown key"),
        (call("add", {"a": "x"}), "wrong arguments: a: should be a valid integer, not 'x'"),
        (call("refuse"), "not today, try add"),
        (call("hang"), "timed out after 0.01 s"),
    ],
)
async def test_what_the_agent_does_wrong_is_answered(bad: fe.ToolCall, expected: str) -> None:
    env = await started()
    observation, _, terminated, truncated, _ = await env.step(calls(bad))
    assert expected in observation[0].content
    assert observation[0].content.startswith("Error: ")
    assert not terminated
    assert not truncated
    *_, info = await env.step("4")
    assert info["metrics"]["tool_errors"] == 1


async def test_what_the_author_does_wrong_names_tool_and_task() -> None:
    env = await started()
    with pytest.raises(
        EnvironmentBugError, match=r"tool 'broken' raised ZeroDivisionError on task 'train-3': oops"
    ) as bug:
        await env.step(calls(call("broken")))
    assert "raise fe.ToolError" in str(bug.value.fix)


async def test_infrastructure_failure_passes_through_and_cancels_the_others() -> None:
    env = await started(tool_timeout_s=1000)
    with pytest.raises(InfrastructureError, match="gone"):
        await env.step(calls(call("lost"), call("add", {"a": 1})))
    await env.close()
    assert env.log == ["setup", "cleanup"]


async def test_submit_ends_the_episode_with_its_answer() -> None:
    env = await started()
    observation, reward, terminated, truncated, _ = await env.step(calls(call("finish", {"answer": "4"}), content="hm"))
    assert [message.content for message in observation] == ["submitted"]
    assert (reward, terminated, truncated) == (1.0, True, False)


async def test_turn_limit_truncates_and_scores_what_there_is() -> None:
    env = await started(max_turns=2)
    await env.step(calls(call("add", {"a": 3})))
    _, reward, terminated, truncated, info = await env.step(calls(call("add", {"a": 3}), content="4"))
    assert (reward, terminated, truncated, info["truncation"]) == (1.0, False, True, "turns")


async def test_call_budget_truncates_and_runs_no_more() -> None:
    env = await started(max_tool_calls=2)
    observation, _, terminated, truncated, info = await env.step(calls(*[call("add", {"a": 3})] * 5))
    assert [message.content for message in observation][:2] == ["4", "4"]
    assert "used up" in observation[2].content
    assert (len(observation), terminated, truncated, info["truncation"]) == (5, False, True, "tool_calls")
    assert info["metrics"]["tool_calls"] == 2


async def test_long_output_keeps_head_and_tail() -> None:
    env = await started(max_tool_output_chars=256)
    env.add_tool(Tool(long_output))
    (message,), *_ = await env.step(calls(call("long_output")))
    assert message.content.startswith("aaa")
    assert message.content.endswith("zzz")
    assert "744 characters left out" in message.content


async def long_output() -> str:
    """Talk."""
    return "a" * 500 + "z" * 500


async def test_sync_tools_of_one_episode_take_turns_off_the_loop() -> None:
    running = 0
    most = 0
    threads = set()

    def work() -> None:
        """Work."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        threads.add(threading.current_thread())
        running -= 1

    env = await started()
    env.add_tool(Tool(work))
    await env.step(calls(*[call("work")] * 8))
    assert most == 1
    assert threading.main_thread() not in threads


async def test_a_call_may_have_any_id() -> None:
    env = await started()
    observation = (await env.step(calls(call("add", {"a": 1}, id="\ud800"))))[0]
    assert observation[0].model_dump_json()
    assert observation[0].tool_call_id == "\ufffd"


async def test_order_is_enforced() -> None:
    env = Arithmetic()
    with pytest.raises(UsageError, match="reset"):
        await env.step("hello")
    await env.reset(seed=0)
    await env.step("1")
    with pytest.raises(UsageError, match="reset"):
        await env.step("again")
    with pytest.raises(UsageError, match="no split 'test'"):
        await env.reset(options={"split": "test"})
    with pytest.raises(UsageError, match="no task 'first'"):
        await env.reset(options={"index": "first"})


def test_bad_definitions_are_refused_early() -> None:
    def unhinted(x) -> None:
        """X."""

    def starred(*xs: int) -> None:
        """X."""

    with pytest.raises(UsageError, match="'x' has no type hint"):
        Tool(unhinted)
    with pytest.raises(UsageError, match="not a named parameter"):
        Tool(starred)

    class NoRubric(fe.ToolEnvironment):
        pass

    with pytest.raises(UsageError, match="has no rubric"):
        NoRubric()


class Derived(Arithmetic):
    async def add(self, a: int, b: int = 1) -> int:
        """Add, and one more."""
        return a + b + 1

    refuse = None

    @fe.tool(name="half", max_calls=2)
    @staticmethod
    def halve(a: int) -> float:
        """Half of it."""
        return a / 2

    async def judged(self, answer: str) -> float:
        return float(self.tool_calls)

    rubric = fe.Rubric([judged])


async def test_inherited_tools_static_ones_and_their_budgets() -> None:
    env = Derived()
    await env.reset(seed=1)
    names = [tool.name for tool in env.tools]
    assert "refuse" not in names
    assert names.index("add") == 0
    observation, *_ = await env.step(calls(call("add", {"a": 1}), *[call("half", {"a": 3})] * 3))
    texts = [message.content for message in observation]
    assert texts == ["3", "1.5", "1.5", "Error: half can be called 2 times only"]
    assert (await env.step("done"))[1] == 4.0  # a method in the class body as reward function
    await env.reset(seed=1)
    observation, *_ = await env.step(calls(call("half", {"a": 3})))
    assert observation[0].content == "1.5"


def tool_in(body: dict[str, Any]) -> type[fe.ToolEnvironment]:
    return type("Tools", (Arithmetic,), body)


async def of_a_class(cls: type, a: int) -> str:
    """Name the class."""
    return f"{cls.__name__} {a}"


def of_nobody(a: int) -> str:
    """Name nobody."""
    return f"nobody {a}"


@pytest.mark.parametrize("order", ["inside", "outside"])
@pytest.mark.parametrize(
    ("wrap", "function", "said"), [(classmethod, of_a_class, "Tools 1"), (staticmethod, of_nobody, "nobody 1")]
)
async def test_static_and_class_methods_are_tools_in_any_order(order: str, wrap: Any, function: Any, said: str) -> None:
    fresh = types.FunctionType(function.__code__, function.__globals__, "named")
    fresh.__annotations__ = function.__annotations__
    env = tool_in({"named": wrap(fe.tool(fresh)) if order == "inside" else fe.tool(wrap(fresh))})()
    await env.reset(seed=0)
    assert (await env.step(fe.call_tool("named", a=1)))[0][0].content == said


def test_what_can_be_no_tool_never_vanishes() -> None:
    with pytest.raises(UsageError, match="on a property"):
        fe.tool(property(of_nobody))
    marked = fe.tool(types.FunctionType(of_nobody.__code__, {}, "fresh"))
    for wrapped in (property(marked), functools.cached_property(marked), functools.partialmethod(marked, 1)):
        with pytest.raises(UsageError, match=r"Tools.named is a tool, and a"):
            tools_of(tool_in({"named": wrapped}))

    async def yielding(self: Any) -> Any:
        yield 1

    with pytest.raises(UsageError, match="'yielding' is a generator"):
        tools_of(tool_in({"yielding": fe.tool(yielding)}))


def test_a_tool_hides_nothing_of_the_platforms() -> None:
    async def tool(self: Any, text: str) -> str:
        """Say it."""
        return text

    for name in ("answer", "step", "given_answer"):
        with pytest.raises(UsageError, match=rf"Tools.{name} hides .*Environment.{name}.*name=\"{name}\""):
            tools_of(tool_in({name: fe.tool(tool)}))
    assert "answer" in tools_of(tool_in({"answer_tool": fe.tool(name="answer")(tool)}))


async def test_a_tool_may_be_called_submit() -> None:
    class Submitting(Arithmetic):
        @fe.tool
        async def submit(self, answer: str) -> None:
            """Answer."""
            super().submit(answer)

    env = Submitting()
    await env.reset(seed=0)
    assert (await env.step(fe.call_tool("submit", answer="1")))[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout_s": 0}, "timeout_s=0 of a tool"),
        ({"timeout_s": "5"}, "timeout_s='5' of a tool"),
        ({"timeout_s": float("nan")}, "timeout_s=nan of a tool"),
        ({"timeout_s": True}, "timeout_s=True of a tool"),
        ({"max_calls": -1}, "max_calls=-1 of a tool"),
        ({"max_calls": 1.5}, "max_calls=1.5 of a tool"),
        ({"name": "two words"}, "can't be named 'two words'"),
        ({"name": ""}, "can't be named ''"),
    ],
)
def test_options_of_a_tool_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fe.tool(**options)
