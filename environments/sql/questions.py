"""Kinds of questions by level. Each computes its answer from the rows in Python and provides an SQL query for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from environments.sql.world import World


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer (a whole number or a name as text), and a query whose only value is the answer."""

    text: str
    answer: str
    query: str


Kind = Callable[[Random, World], Question | None]


def only_highest(counts: Mapping[str, int]) -> str | None:
    """The key with the highest count, or None if several keys share it."""
    ranked = Counter(counts).most_common(2)
    return None if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]) else ranked[0][0]


def people_of_town(rng: Random, world: World) -> Question | None:
    """A count with one condition."""
    theme, town = world.theme, rng.choice(world.people).town
    count = sum(person.town == town for person in world.people)
    return Question(
        f"How many {theme.people} are from {town}?",
        str(count),
        f"SELECT COUNT(*) FROM {theme.people} WHERE town = '{town}'",
    )


def largest_of_kind(rng: Random, world: World) -> Question | None:
    """The maximum among the rows of one kind."""
    theme, kind = world.theme, rng.choice(world.things).kind
    name = only_highest({thing.name: thing.size for thing in world.things if thing.kind == kind})
    query = f"SELECT name FROM {theme.things} WHERE {theme.kind} = '{kind}' ORDER BY {theme.size} DESC LIMIT 1"
    text = f"What is the name of the {theme.thing} with the highest {theme.size} among those whose {theme.kind} is "
    return None if name is None else Question(f"{text}{kind}?", name, query)


def known_of_month(rng: Random, world: World) -> Question | None:
    """A count of the known measures in a range of days."""
    theme, month = world.theme, f"2024-{rng.randint(1, 12):02}"
    count = sum(event.day.startswith(month) and event.measure is not None for event in world.events)
    return Question(
        f"How many {theme.events} of the month {month} have a known {theme.measure}?",
        str(count),
        f"SELECT COUNT({theme.measure}) FROM {theme.events} WHERE day LIKE '{month}-%'",
    )


def events_of_town(rng: Random, world: World) -> Question | None:
    """A count over two tables."""
    theme, town = world.theme, rng.choice(world.people).town
    count = sum(event.person.town == town for event in world.events)
    return Question(
        f"How many {theme.events} are there of {theme.people} from {town}?",
        str(count),
        f"SELECT COUNT(*) FROM {theme.events} e JOIN {theme.people} p ON p.id = e.{theme.person}_id "
        f"WHERE p.town = '{town}'",
    )


def total_of_kind(rng: Random, world: World) -> Question | None:
    """A sum over two tables."""
    theme, kind = world.theme, rng.choice(world.things).kind
    total = sum(event.measure or 0 for event in world.events if event.thing.kind == kind)
    return Question(
        f"What is the sum of {theme.measure} over all {theme.events} of {theme.things} whose {theme.kind} is {kind}? "
        "Unknown ones count 0.",
        str(total),
        f"SELECT COALESCE(SUM(e.{theme.measure}), 0) FROM {theme.events} e "
        f"JOIN {theme.things} t ON t.id = e.{theme.thing}_id WHERE t.{theme.kind} = '{kind}'",
    )


def busiest_with_kind(rng: Random, world: World) -> Question | None:
    """The largest group over three tables."""
    theme, kind = world.theme, rng.choice(world.things).kind
    name = only_highest(Counter(event.person.name for event in world.events if event.thing.kind == kind))
    query = (
        f"SELECT p.name FROM {theme.events} e JOIN {theme.people} p ON p.id = e.{theme.person}_id "
        f"JOIN {theme.things} t ON t.id = e.{theme.thing}_id WHERE t.{theme.kind} = '{kind}' "
        "GROUP BY p.id ORDER BY COUNT(*) DESC LIMIT 1"
    )
    text = f"Which {theme.person} has the most {theme.events} of {theme.things} whose {theme.kind} is {kind}?"
    return None if name is None else Question(text, name, query)


def kind_of_town(rng: Random, world: World) -> Question | None:
    """The group with the largest sum over three tables."""
    theme, town = world.theme, rng.choice(world.people).town
    totals: Counter[str] = Counter()
    for event in world.events:
        if event.person.town == town:
            totals[event.thing.kind] += event.measure or 0
    name = only_highest(totals)
    query = (
        f"SELECT t.{theme.kind} FROM {theme.events} e JOIN {theme.people} p ON p.id = e.{theme.person}_id "
        f"JOIN {theme.things} t ON t.id = e.{theme.thing}_id WHERE p.town = '{town}' "
        f"GROUP BY t.{theme.kind} ORDER BY SUM(COALESCE(e.{theme.measure}, 0)) DESC LIMIT 1"
    )
    text = f"Which {theme.kind} has the highest sum of {theme.measure} over the {theme.events} of {theme.people} from "
    return None if name is None else Question(f"{text}{town}?", name, query)


def without_kind(rng: Random, world: World) -> Question | None:
    """A count of rows without a matching row."""
    theme, kind = world.theme, rng.choice(world.things).kind
    some = {event.person.id for event in world.events if event.thing.kind == kind}
    return Question(
        f"How many {theme.people} have not a single one of the {theme.events} of {theme.things} whose {theme.kind} is "
        f"{kind}?",
        str(sum(person.id not in some for person in world.people)),
        f"SELECT COUNT(*) FROM {theme.people} WHERE id NOT IN (SELECT e.{theme.person}_id FROM {theme.events} e "
        f"JOIN {theme.things} t ON t.id = e.{theme.thing}_id WHERE t.{theme.kind} = '{kind}')",
    )


def above_average(rng: Random, world: World) -> Question | None:
    """A count of rows above the average of their group."""
    theme = world.theme
    sizes: dict[str, list[int]] = {}
    for thing in world.things:
        sizes.setdefault(thing.kind, []).append(thing.size)
    count = sum(thing.size * len(sizes[thing.kind]) > sum(sizes[thing.kind]) for thing in world.things)
    return Question(
        f"How many {theme.things} have a {theme.size} above the average {theme.size} of the {theme.things} with the "
        f"same {theme.kind}?",
        str(count),
        f"SELECT COUNT(*) FROM {theme.things} t WHERE {theme.size} > "
        f"(SELECT AVG({theme.size}) FROM {theme.things} o WHERE o.{theme.kind} = t.{theme.kind})",
    )


def several_kinds(rng: Random, world: World) -> Question | None:
    """A count of groups with a minimum number of distinct values."""
    theme, least = world.theme, rng.randint(2, 3)
    kinds: dict[int, set[str]] = {}
    for event in world.events:
        kinds.setdefault(event.person.id, set()).add(event.thing.kind)
    return Question(
        f"How many {theme.people} have {theme.events} of {theme.things} of at least {least} different values of "
        f"{theme.kind}?",
        str(sum(len(some) >= least for some in kinds.values())),
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {theme.events} e JOIN {theme.things} t ON t.id = e.{theme.thing}_id "
        f"GROUP BY e.{theme.person}_id HAVING COUNT(DISTINCT t.{theme.kind}) >= {least})",
    )


KINDS: dict[int, tuple[Kind, ...]] = {
    1: (people_of_town, largest_of_kind, known_of_month),
    2: (events_of_town, total_of_kind),
    3: (busiest_with_kind, kind_of_town),
    4: (without_kind, above_average, several_kinds),
}
