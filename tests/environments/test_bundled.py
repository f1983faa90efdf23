"""Checks on every bundled environment: its package, validation, separate splits, and any model output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forge_env as fe
from forge_env.environment.optional import gold_actions
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.sandbox import SandboxEngine
from forge_env.validation.checks import Validator
from tests.forge_env.cli.test_hostile_output import WILD
from tests.sandboxes.conftest import engine_fixture

ASYNC = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[2]
OVERVIEW = (ROOT / "docs" / "environments" / "bundled.md").read_text()
BUNDLED = [e.name for e in fe.list_environments() if e.source.startswith("forge-env ") and not e.needs]
SANDBOXED = {"coding_rlvr", "repairs", "terminal", "data_analysis"}
TOOLS = ["python", "bash", "sql", "query", "", "functions.bash", "submit"]
ARGUMENTS = ["code", "command", "query", "sql"]
TEXTS = WILD | st.sampled_from(
    ["<guess>crane</guess>", "<action>hit</action>", "#### 4", "```python\ndef f(:\n```", "\0"]
)
CALLS = st.builds(
    lambda name, arguments: fe.ToolCall.model_validate({"id": "c", "function": {"name": name, "arguments": arguments}}),
    st.sampled_from(TOOLS) | WILD,
    WILD | st.builds(lambda key, text: json.dumps({key: text}), st.sampled_from(ARGUMENTS), TEXTS),
)
ACTIONS = TEXTS | st.builds(
    lambda content, made: fe.Message(role="assistant", content=content, tool_calls=made),
    TEXTS,
    st.lists(CALLS, max_size=3),
)


engine = engine_fixture()


def test_names_of_the_bundled_environments() -> None:
    without_sandbox = (
        "blackjack calculator cards distractors frozen_lake gsm8k helpdesk nim search sql text_world tic_tac_toe wordle"
    )
    assert set(BUNDLED) == SANDBOXED | set(without_sandbox.split())


@pytest.mark.parametrize("name", BUNDLED)
def test_each_is_a_package_with_everything(name: str) -> None:
    package = ROOT / "environments" / name
    readme = (package / "README.md").read_text()
    assert readme.startswith(f"# {name}\n")
    assert re.search(r"[Ll]evel|[Dd]ifficulty", readme), "what makes a task difficult"
    assert "Baselines" in readme
    assert f"(../../environments/{name}/README.md)" in OVERVIEW
    assert list((ROOT / "tests" / "environments" / name).glob("test_*.py"))
    cls = type(fe.make(name))
    assert vars(cls)["api_version"] == fe.API_VERSION
    env = fe.make(name)
    for split in env.splits[:2]:
        assert any(gold_actions(env, env.task(split, index)) is not None for index in range(5))


SLOW = {"blackjack", "distractors", "frozen_lake", "text_world"}
WITHOUT_SANDBOX = sorted(set(BUNDLED) - SANDBOXED)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WITHOUT_SANDBOX]
)
async def test_validation_passes(name: str) -> None:
    checks = [check async for check in Validator(lambda: fe.make(name), num_tasks=6).run()]
    assert {check.status for check in checks} <= {"ok", "note"}, checks


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("data_analysis", "public_shop"),
        ("distractors", "public_office"),
        ("frozen_lake", "public_lake"),
        ("search", "public_corpus"),
        ("sql", "public_world"),
        ("text_world", "public_world"),
    ],
)
def test_splits_share_no_world(name: str, key: str) -> None:
    env = fe.make(name, **({"levels": [3]} if name == "frozen_lake" else {}))
    train, held_out = ({str(env.task(split, index).data[key]) for index in range(50)} for split in ("train", "eval"))
    assert not train & held_out


async def play(name: str, actions: list[Any], engine: SandboxEngine | None) -> None:
    options = {"wall_s": 1.0, "cpu_s": 0.5} if name in SANDBOXED else {}
    trajectory = await run_episode(
        lambda: fe.make(name, sandboxes=engine, **options), ReplayPolicy(actions or [""]), seed=3
    )
    assert trajectory.valid, trajectory.error
    assert trajectory.terminated != trajectory.truncated
    assert -1.0 <= trajectory.reward <= 1.0
    for turn in trajectory.turns:
        for message in turn.observation:
            message.content.encode()  # a tokenizer can read it


@ASYNC
@pytest.mark.parametrize("name", WITHOUT_SANDBOX)
@given(st.lists(ACTIONS, max_size=8))
async def test_any_output_leaves_a_valid_episode(name: str, actions: list[Any]) -> None:
    await play(name, actions, None)


@ASYNC
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SANDBOXED))
@given(actions=st.lists(ACTIONS, max_size=4))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
async def test_any_output_is_valid_in_a_sandbox(name: str, engine: SandboxEngine, actions: list[Any]) -> None:
    await play(name, actions, engine)


@ASYNC
@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize(
    "action",
    [
        "x" * 3_000_000,
        "<answer>" * 100_000,
        "<guess>" + "a" * 1_000_000 + "</guess>",
        "#### " + "9" * 500_000,
        "```python\n" * 50_000,
        "\ud800",
        fe.Message(role="assistant", tool_calls=[fe.call_tool("bash", command="true").tool_calls[0]] * 3000),
        fe.call_tool("python", code="print('x' * 10**8)"),
        fe.call_tool("sql", query="SELECT " * 100_000),
        fe.call_tool("bash", command="a" * 2_000_000),
    ],
    ids=["long", "tags", "guess", "number", "fences", "surrogate", "calls", "output", "query", "command"],
)
async def test_huge_output_is_answered(name: str, action: Any, engine: SandboxEngine) -> None:
    await play(name, [action, action], engine)
