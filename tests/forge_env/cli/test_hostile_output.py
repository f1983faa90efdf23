"""Whatever a model writes, `step` answers it and the episode stays valid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forge_env as fe
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.trajectory import Trajectory
from tests.forge_env.environment.test_tool_environment import Arithmetic, Point, call, calls

TOOLS = ["add", "scale", "refuse", "finish", "inline", "", "ADD", "functions.add"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abxy") | st.text(), inner, max_size=4),
    max_leaves=12,
)
ARGUMENTS = st.text() | JSON.map(json.dumps) | st.builds(lambda a: json.dumps({"a": a}), JSON)
# Sampled bytes may decode to lone surrogates when an endpoint is careless.
WILD = st.text() | st.text(st.characters(codec=None))
CALLS = st.builds(
    lambda id, name, arguments: fe.ToolCall.model_validate(
        {"id": id, "function": {"name": name, "arguments": arguments}}
    ),
    st.text(max_size=8),
    st.sampled_from(TOOLS) | WILD,
    ARGUMENTS,
)
ACTIONS = WILD | st.builds(
    lambda content, made: fe.Message(role="assistant", content=content, tool_calls=made),
    WILD,
    st.lists(CALLS, max_size=5),
)


class Hardened(Arithmetic):
    @fe.tool(thread=False)
    def inline(self, a: Any = None, b: list[Point] | dict[str, int] | None = None) -> Any:
        """Return the arguments."""
        return [a, b]


@pytest.mark.slow
@given(st.lists(ACTIONS, max_size=8))
@settings(max_examples=150, deadline=None)
async def test_any_output_leaves_a_valid_episode(actions: list[Any]) -> None:
    trajectory = await run_episode(Hardened, ReplayPolicy(actions), seed=0)
    assert trajectory.valid
    assert trajectory.terminated != trajectory.truncated
    assert trajectory.reward in (0.0, 1.0)
    for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        assert [m.tool_call_id for m in following.observation] == [c.id for c in turn.message.tool_calls]
        "".join(m.content + (m.name or "") for m in following.observation).encode()  # a tokenizer can read it
    assert Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict()))).reward == trajectory.reward


@pytest.mark.parametrize(
    "message",
    [
        calls(*[call("add", {"a": 1})] * 5000),
        calls(call("add", '{"a": ' + "9" * 100_000 + "}")),
        calls(call("inline", json.dumps({"a": "x" * 5_000_000}))),
        calls(call("inline", '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}")),
        calls(call("x" * 1_000_000, "{}")),
        calls(call("add", json.dumps({"y" * 1_000_000: 1}))),
        calls(call("inline", '{"a": "\\ud800"}')),
        calls(call("inline", '{"a": NaN}')),
    ],
    ids=["many", "big-int", "big-text", "deep", "long-name", "long-key", "surrogate", "nan"],
)
async def test_huge_and_odd_calls_are_answered_in_bounded_space(message: fe.Message) -> None:
    trajectory = await run_episode(Hardened, ReplayPolicy([message, "1"]), seed=0)
    assert trajectory.valid
    answers = trajectory.turns[1].observation if len(trajectory.turns) > 1 else trajectory.final_observation
    assert len(answers) == len(message.tool_calls)
    for answer in answers:
        assert len(answer.content.encode()) <= 20_000  # encodable, too
        assert len((answer.name or "").encode()) <= 256
