"""Cases at the desk: the rules decide, and only what the customer means may be touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import forge_env as fe
from environments.helpdesk.cases import DAYS, Order, draw_case
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy

SOLD = Order("1234", "Ada Arden", "lamp", "delivered", DAYS, on_sale=False)


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, "refunded"),
        ({"days": DAYS + 1}, "refused"),
        ({"on_sale": True}, "refused"),
        ({"status": "on its way", "days": 0}, "refused"),
        ({"status": "being packed", "days": 0}, "cancelled"),
        ({"status": "being packed", "days": 0, "on_sale": True}, "cancelled"),
    ],
)
def test_the_rules(changed: dict[str, Any], outcome: str) -> None:
    assert replace(SOLD, **changed).outcome() == outcome


@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_a_customer_knows_names_one_order(level: int) -> None:
    outcomes = set()
    for seed in range(60):
        case = draw_case(str(seed), level)
        outcomes.add(case.meant.outcome())
        assert len({order.id for order in case.orders}) == len(case.orders) == 10
        said = " ".join([case.opening, *case.facts])
        if level == 1:
            assert case.meant.id in said
            continue
        last = case.facts[-1].split("It is")[-1]
        assert [order for order in case.orders if order.name in said and order.thing in last] == [case.meant]
        assert (case.meant.thing in " ".join(case.facts[:2])) == (level == 2)
    assert outcomes == {"refunded", "cancelled", "refused"}


def of_outcome(level: int, outcome: str) -> fe.Task:
    env = fe.make("helpdesk", levels=[level])
    return next(task for task in (env.task("train", index) for index in range(100)) if task.tags == [outcome])


async def test_the_customer_tells_a_thing_at_a_time_and_changes_their_mind() -> None:
    task = of_outcome(3, "refunded")
    played = await run_episode(lambda: fe.make("helpdesk"), GoldPolicy(), task=task)
    assert (played.reward, played.metrics["questions"]) == (1.0, 3.0)
    told = [turn.observation[0].content for turn in played.turns[1:4]]
    assert [text.split()[0] for text in told] == ["I", "The", "No,"]
    more = await run_episode(lambda: fe.make("helpdesk", max_turns=5), ReplayPolicy(["?"] * 5), task=task)
    assert (more.reward, more.truncation) == (0.0, "turns")
    assert more.final_observation[0].content == "That is right. I know nothing more."


@pytest.mark.parametrize("outcome", ["refunded", "cancelled", "refused"])
async def test_what_is_too_much_or_too_little_earns_nothing(outcome: str) -> None:
    task = of_outcome(1, outcome)
    case = draw_case(task.data["public_case"], 1)
    number, other = case.meant.id, next(order.id for order in case.orders if order != case.meant)
    does = {"refunded": "refund", "cancelled": "cancel"}
    right = [fe.call_tool(does[outcome], number=number)] if outcome in does else []
    end = fe.call_tool("close_case", number=number, outcome=outcome)

    async def earned(*actions: Any) -> float:
        return (await run_episode(lambda: fe.make("helpdesk"), ReplayPolicy(list(actions)), task=task)).reward

    assert await earned(*right, end) == 1.0
    wrongs = [
        [*right],
        [*right, fe.call_tool("refund", number=other), end],
        [*right, fe.call_tool("cancel" if outcome != "cancelled" else "refund", number=number), end],
        [*right, fe.call_tool("close_case", number=other, outcome=outcome)],
        [*right, fe.call_tool("close_case", number=number, outcome="refused" if right else "refunded")],
        *([[end]] if right else []),
    ]
    assert [await earned(*wrong) for wrong in wrongs] == [0.0] * len(wrongs)


async def test_mistakes_are_answered() -> None:
    env = fe.make("helpdesk", levels=[1])
    await env.reset(seed=0)
    for call, said in [
        (fe.call_tool("get_order", number="12"), "Error: there is no order '12'"),
        (fe.call_tool("find_orders", name="Nobody"), "There is none."),
        (fe.call_tool("close_case", number="12", outcome="refunded"), "Error: there is no order '12'"),
    ]:
        observation, _, terminated, *_ = await env.step(call)
        assert (observation[0].content, terminated) == (said, False)
