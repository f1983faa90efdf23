"""Environment with a simulated customer who answers questions, tools, rules, and a reward for the outcome."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Literal

from pydantic import Field

import forge_env as fe
from environments.helpdesk.cases import DAYS, Order, Outcome, draw_case
from environments.seeds import draw_seed
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.types import Action, Message, Observation, Task

Level = Literal[1, 2, 3]


class HelpdeskConfig(ToolEnvironmentConfig):
    """Case selection and turn limit."""

    max_turns: int = Field(16, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """1: the customer gives the order number; 2: must be asked for name and thing; 3: first names the wrong thing."""


def done(env: Helpdesk) -> float:
    """1 if the required outcome was applied to the right order and to no other; otherwise 0."""
    right = (env.case.meant.outcome(), env.case.meant.id)
    return float(env.closed == right and env.changed == ({right} if right[0] != "refused" else set()))


def questions(env: Helpdesk) -> float:
    """Number of messages to the customer."""
    return float(env.asked)


class Helpdesk(fe.ToolEnvironment):
    """Serve a customer of a shop, by its rules: ask, look up, then refund, cancel or refuse."""

    api_version = 1
    config_class = HelpdeskConfig
    system_prompt = (
        "You serve customers of a shop. A message without a tool call is said to the customer; ask for what you need "
        "to know, one thing at a time. Orders that are still being packed are cancelled. Delivered ones are refunded "
        f"up to {DAYS} days after delivery, but not what was on sale. Everything else is refused. Touch no other order "
        "than the one that the customer means in the end, ask whether you have understood it right, and close the case."
    )
    config: HelpdeskConfig
    rubric = fe.Rubric([done], metrics=[questions])

    def task(self, split: str, index: int) -> Task:
        """The `index`-th case of `split`; one case in five belongs to `eval`."""
        rng = Random(f"helpdesk/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        seed = draw_seed(rng, split)
        case = draw_case(seed, level)
        return Task(
            id=f"{split}-{self.config.seed}-{index}",
            prompt=case.opening,
            data={"public_case": seed},
            difficulty=level,
            tags=[case.meant.outcome()],
            split=split,
        )

    def gold_actions(self, task: Task) -> list[Action] | None:
        """Ask for all of the customer's facts, act by the rules, and close the case."""
        case = draw_case(task.data["public_case"], task.difficulty)
        outcome = case.meant.outcome()
        asked: list[Action] = [f"Question {turn}: can you tell me more?" for turn in range(1, len(case.facts) + 1)]
        name, number = case.meant.name, case.meant.id
        lookups = [fe.call_tool("find_orders", name=name) if case.facts else fe.call_tool("get_order", number=number)]
        tool = {"refunded": "refund", "cancelled": "cancel"}.get(outcome)
        actions = [] if tool is None else [fe.call_tool(tool, number=number)]
        return [*asked, *lookups, *actions, fe.call_tool("close_case", number=number, outcome=outcome)]

    async def setup(self, task: Task) -> None:
        """Draw the task's case and clear all recorded actions."""
        self.case = draw_case(task.data["public_case"], task.difficulty)
        self.asked = 0
        self.changed: set[tuple[Outcome, str]] = set()
        self.closed: tuple[Outcome, str] | None = None

    def is_final(self, message: Message) -> bool:
        """Always False: the tool `close_case` ends the episode."""
        return False

    async def respond(self, message: Message) -> Observation:
        """The customer's next fact, or a closing sentence after the last."""
        facts = self.case.facts
        answer = facts[self.asked] if self.asked < len(facts) else "That is right. I know nothing more."
        self.asked += 1
        return [Message(role="user", content=answer)]

    @fe.tool(thread=False)
    def find_orders(self, name: str) -> str:
        """All orders of a customer.

        Args:
            name: the customer's whole name.
        """
        wanted = name.strip().casefold()
        return _list(order for order in self.case.orders if order.name.casefold() == wanted)

    @fe.tool(thread=False)
    def get_order(self, number: str) -> str:
        """One order.

        Args:
            number: four digits.
        """
        return str(self._order(number))

    @fe.tool(thread=False)
    def refund(self, number: str) -> str:
        """Give the money for an order back. This can't be undone.

        Args:
            number: four digits.
        """
        self.changed.add(("refunded", self._order(number).id))
        return f"The money for {number} was given back."

    @fe.tool(thread=False)
    def cancel(self, number: str) -> str:
        """Cancel an order. This can't be undone.

        Args:
            number: four digits.
        """
        self.changed.add(("cancelled", self._order(number).id))
        return f"Order {number} was cancelled."

    @fe.tool(thread=False)
    def close_case(self, number: str, outcome: Outcome) -> str:
        """Say how the case ended. Nothing can be done after it.

        Args:
            number: of the order that it was about.
            outcome: what was done about it.
        """
        self.closed = (outcome, self._order(number).id)
        self.submit(outcome)
        return "The case is closed."

    def _order(self, number: str) -> Order:
        for order in self.case.orders:
            if order.id == number.strip():
                return order
        raise fe.ToolError(f"there is no order {number[:20]!r}")


def _list(orders: Iterable[Order]) -> str:
    return "\n".join(map(str, orders)) or "There is none."
