"""A database drawn by seed: people, things of several kinds, and events that link the two, in one of four themes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from random import Random

TOWNS = ("Arden", "Brell", "Corvo", "Dunmar", "Elsin", "Fenby")
NAMES = (
    *("Abel", "Berta", "Cato", "Dina", "Emil", "Frida", "Goran", "Hilda", "Ivo", "Jutta", "Karl", "Lena", "Milo"),
    *("Nora", "Otto", "Petra", "Quint", "Runa", "Silas", "Thea", "Ulf", "Viola", "Wanda", "Yves", "Zita"),
)
FIRST_DAY = date(2024, 1, 1)


@dataclass(frozen=True, slots=True)
class Theme:
    """Names of tables and columns, in the plural and singular that questions use."""

    people: str
    person: str
    things: str
    thing: str
    kind: str
    kinds: tuple[str, ...]
    size: str
    events: str
    event: str
    measure: str
    titles: tuple[str, ...]

    @property
    def schema(self) -> str:
        """SQL of the three tables; an unknown `measure` is NULL."""
        person, thing = f"{self.person}_id", f"{self.thing}_id"
        return (
            f"CREATE TABLE {self.people} (id INTEGER PRIMARY KEY, name TEXT, town TEXT);\n"
            f"CREATE TABLE {self.things} (id INTEGER PRIMARY KEY, name TEXT, {self.kind} TEXT, {self.size} INTEGER);\n"
            f"CREATE TABLE {self.events} (id INTEGER PRIMARY KEY, {person} INTEGER REFERENCES {self.people}(id), "
            f"{thing} INTEGER REFERENCES {self.things}(id), day TEXT, {self.measure} INTEGER);\n"
        )


THEMES = (
    Theme(
        *("members", "member", "books", "book", "genre", ("crime", "history", "poetry", "travel"), "pages"),
        *("loans", "loan", "days_kept"),
        ("Amber", "Beacon", "Cinder", "Dune", "Ember", "Fable", "Glacier", "Harbor", "Island", "Jungle", "Lantern"),
    ),
    Theme(
        *("riders", "rider", "bikes", "bike", "type", ("city", "cargo", "racing", "folding"), "weight"),
        *("rentals", "rental", "minutes"),
        ("Arrow", "Bolt", "Comet", "Dart", "Eagle", "Falcon", "Gale", "Hawk", "Ibex", "Jaguar", "Kestrel", "Lynx"),
    ),
    Theme(
        *("guests", "guest", "dishes", "dish", "course", ("soup", "salad", "main", "dessert"), "price"),
        *("meals", "meal", "rating"),
        ("Aspen", "Bayou", "Cedar", "Delta", "Estate", "Fjord", "Grove", "Haven", "Inlet", "Juniper", "Kelp", "Loft"),
    ),
    Theme(
        *("pilots", "pilot", "drones", "drone", "maker", ("Aerix", "Borea", "Cirrus", "Dynamo"), "reach"),
        *("flights", "flight", "height"),
        ("Atlas", "Breeze", "Condor", "Drift", "Echo", "Flare", "Glider", "Hover", "Icarus", "Jet", "Kite", "Lark"),
    ),
)


@dataclass(frozen=True, slots=True)
class Person:
    """One row of the people table."""

    id: int
    name: str
    town: str


@dataclass(frozen=True, slots=True)
class Thing:
    """One row of the things table."""

    id: int
    name: str
    kind: str
    size: int


@dataclass(frozen=True, slots=True)
class Event:
    """One row of the events table."""

    id: int
    person: Person
    thing: Thing
    day: str
    measure: int | None


@dataclass(frozen=True, slots=True)
class World:
    """All rows of the database."""

    theme: Theme
    people: tuple[Person, ...]
    things: tuple[Thing, ...]
    events: tuple[Event, ...]

    def script(self) -> str:
        """SQL that creates the database; its strings are plain words and need no escaping."""
        people = [f"({p.id}, '{p.name}', '{p.town}')" for p in self.people]
        things = [f"({t.id}, '{t.name}', '{t.kind}', {t.size})" for t in self.things]
        events = [
            f"({e.id}, {e.person.id}, {e.thing.id}, '{e.day}', {'NULL' if e.measure is None else e.measure})"
            for e in self.events
        ]
        tables = [(self.theme.people, people), (self.theme.things, things), (self.theme.events, events)]
        return self.theme.schema + "".join(f"INSERT INTO {table} VALUES {', '.join(rows)};\n" for table, rows in tables)


@lru_cache(maxsize=64)
def draw_world(seed: str) -> World:
    """Draw the database of a seed."""
    rng = Random(f"sql/{seed}")
    theme = rng.choice(THEMES)
    people = tuple(
        Person(number, name, rng.choice(TOWNS))
        for number, name in enumerate(rng.sample(NAMES, rng.randint(12, len(NAMES))), start=1)
    )
    things = tuple(
        Thing(number, name, rng.choice(theme.kinds), rng.randint(5, 90) * 10)
        for number, name in enumerate(rng.sample(theme.titles, rng.randint(9, len(theme.titles))), start=1)
    )
    active = people[: len(people) * 4 // 5]  # some people have no event
    events = tuple(
        Event(
            number,
            rng.choice(active),
            rng.choice(things),
            (FIRST_DAY + timedelta(days=rng.randrange(366))).isoformat(),
            None if rng.random() < 0.15 else rng.randint(1, 60),
        )
        for number in range(1, rng.randint(60, 140))
    )
    return World(theme, people, things, events)
