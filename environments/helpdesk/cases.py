"""Cases: the orders of a shop, the customer's request and answers, and the outcome that the rules require."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["refunded", "cancelled", "refused"]
FIRST = ("Ada", "Bruno", "Clara", "Dario", "Elif", "Femi", "Greta", "Hugo")
LAST = ("Arden", "Brook", "Corvin", "Dalton", "Ember", "Falk")
THINGS = ("lamp", "kettle", "chair", "radio", "tent", "clock", "scarf", "drill")
DAYS = 30
"""Days after delivery within which an order is refunded."""


@dataclass(frozen=True)
class Order:
    """An order of one thing."""

    id: str
    name: str
    thing: str
    status: str
    """`being packed`, `on its way`, or `delivered`."""
    days: int
    """Days since delivery; 0 if not delivered."""
    on_sale: bool

    def __str__(self) -> str:
        when = f"delivered {self.days} days ago" if self.status == "delivered" else self.status
        return f"{self.id}: {self.thing}, ordered by {self.name}, {when}{', on sale' * self.on_sale}"

    def outcome(self) -> Outcome:
        """Outcome that the rules require if the customer no longer wants this order."""
        if self.status == "being packed":
            return "cancelled"
        return "refunded" if self.status == "delivered" and self.days <= DAYS and not self.on_sale else "refused"


@dataclass(frozen=True)
class Case:
    """Everything that determines one episode."""

    orders: list[Order]
    opening: str
    """The customer's first message."""
    facts: list[str]
    """The customer's answers to questions, in order."""
    meant: Order
    """The order that the customer means in the end."""


def draw_case(seed: str, level: int) -> Case:
    """Draw the case of a seed and a level of difficulty."""
    rng = Random(f"helpdesk/{seed}")
    names = [f"{first} {last}" for first in rng.sample(FIRST, 4) for last in rng.sample(LAST, 1)]
    numbers = rng.sample(range(1000, 10_000), 10)
    things = rng.sample(THINGS, 5)
    orders = [_order(rng, str(number), rng.choice(names[1:]), rng.choice(things)) for number in numbers[3:]]
    theirs = [_order(rng, str(number), names[0], thing) for number, thing in zip(numbers[:3], things[:3], strict=True)]
    meant, other = theirs[0], theirs[1]
    orders = rng.sample([*orders, *theirs], len(orders) + len(theirs))
    if level == 1:
        return Case(orders, f"Hello, I don't want my order {meant.id} any more.", [], meant)
    name = f"I am {meant.name}."
    if level == 2:
        return Case(
            orders, "Hello, I ordered something that I don't want any more.", [name, f"The {meant.thing}."], meant
        )
    facts = [name, f"The {other.thing}.", f"No, wait, the {other.thing} is fine. It is the {meant.thing}."]
    return Case(orders, "Hello, I ordered something that I don't want any more.", facts, meant)


def _order(rng: Random, number: str, name: str, thing: str) -> Order:
    (status,) = rng.choices(("being packed", "on its way", "delivered"), (3, 1, 6))
    days = rng.randint(1, 3 * DAYS // 2) if status == "delivered" else 0
    return Order(number, name, thing, status, days, rng.random() < 0.2)
