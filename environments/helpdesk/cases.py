"""Cases: the orders of a shop, what a customer wants and knows, and what the rules make of it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["refunded", "cancelled", "refused"]
FIRST = ("Ada", "Bruno", "Clara", "Dario", "Elif", "Femi", "Greta", "Hugo")
LAST = ("Arden", "Brook", "Corvin", "Dalton", "Ember", "Falk")
THINGS = ("lamp", "kettle", "chair", "radio", "tent", "clock", "scarf", "drill")
DAYS = 30
"""Days after delivery within which money is given back."""


@dataclass(frozen=True)
class Order:
    """One order of one thing."""

    id: str
    name: str
    thing: str
    status: str
    """`being packed`, `on its way`, or `delivered`."""
    days: int
    """Since it was delivered; 0 where it wasn't."""
    on_sale: bool

    def __str__(self) -> str:
        when = f"delivered {self.days} days ago" if self.status == "delivered" else self.status
        return f"{self.id}: {self.thing}, ordered by {self.name}, {when}{', on sale' * self.on_sale}"

    def outcome(self) -> Outcome:
        """What the rules say of a customer who doesn't want it any more."""
        if self.status == "being packed":
            return "cancelled"
        return "refunded" if self.status == "delivered" and self.days <= DAYS and not self.on_sale else "refused"


@dataclass(frozen=True)
class Case:
    """What happens at the desk."""

    orders: list[Order]
    opening: str
    """The customer's first words."""
    facts: list[str]
    """What the customer says when asked, in this order."""
    meant: Order
    """The order that it is about."""


def draw_case(seed: str, level: int) -> Case:
    """A case of a level of difficulty, from a seed that it alone has."""
    rng = Random(f"helpdesk/{seed}")
    names = [f"{first} {last}" for first in rng.sample(FIRST, 4) for last in rng.sample(LAST, 1)]
    numbers = rng.sample(range(1000, 10_000), 10)
    things = rng.sample(THINGS, 5)
    orders = [_order(rng, str(number), rng.choice(names[1:]), rng.choice(things)) for number in numbers[3:]]
    own = [_order(rng, str(number), names[0], thing) for number, thing in zip(numbers[:3], things[:3], strict=True)]
    meant, other = own[0], own[1]
    orders = rng.sample([*orders, *own], len(orders) + len(own))
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
