"""An office drawn by seed: contacts, calendar and mail in memory, with names and titles that are easily confused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

FIRST = ("Anna", "Ben", "Clara", "David")
LAST = ("Berg", "Berger", "Bergman", "Holm", "Holt")
TEAMS = ("sales", "legal", "design", "finance")
TITLES = ("Budget review", "Budget preview", "Hiring plan", "Hiring panel", "Launch prep", "Launch party")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")
HOURS = tuple(range(9, 17))


@dataclass(frozen=True, slots=True)
class Contact:
    """A contact of the office."""

    id: str
    name: str
    team: str
    phone: str

    def __str__(self) -> str:
        return f"{self.id}: {self.name}, {self.team}, phone {self.phone}"


@dataclass(frozen=True, slots=True)
class Event:
    """One hour in the calendar; `people` are ids of contacts."""

    id: str
    title: str
    day: str
    hour: int
    people: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.id}: {self.title}, {self.day} at {self.hour}, with {', '.join(self.people)}"


@dataclass(frozen=True, slots=True)
class Mail:
    """A mail from a contact; `archived` mails are no longer in the inbox."""

    id: str
    sender: str
    subject: str
    body: str
    archived: bool = False

    def __str__(self) -> str:
        return f"{self.id}: from {self.sender}, {self.subject!r}{', archived' if self.archived else ''}"


@dataclass(slots=True)
class Office:
    """State of the office."""

    contacts: dict[str, Contact] = field(default_factory=dict)
    events: dict[str, Event] = field(default_factory=dict)
    mails: dict[str, Mail] = field(default_factory=dict)
    sent: list[tuple[str, str]] = field(default_factory=list)
    """Sent mails as `(to, what)`: the contact's id, and the id of the forwarded mail or the subject of a new one."""

    def outcome(self) -> tuple[object, ...]:
        """State to compare with the goal: everything except the ids of events and the order of sent mails."""
        events = sorted((event.title, event.day, event.hour, sorted(event.people)) for event in self.events.values())
        return self.contacts, events, self.mails, sorted(self.sent)

    def create_event(self, title: str, day: str, hour: int, people: list[str]) -> Event:
        """Add an event to the calendar."""
        number = max((int(known[1:]) for known in self.events), default=0) + 1
        event = Event(f"e{number}", title, day, hour, tuple(people))
        self.events[event.id] = event
        return event

    def move_event(self, event_id: str, day: str, hour: int) -> Event:
        """Move an event to another day and hour."""
        self.events[event_id] = replace(self.events[event_id], day=day, hour=hour)
        return self.events[event_id]

    def busy(self, people: list[str], day: str) -> set[int]:
        """Hours of a day at which any of `people` has an event."""
        return {event.hour for event in self.events.values() if event.day == day and {*people} & {*event.people}}


def draw_office(seed: str) -> Office:
    """Draw the office of a seed. Some contacts share a name, some events a title and some mails a subject."""
    rng = Random(f"distractors/{seed}")
    office = Office()
    names = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], 10)
    shared = rng.sample(names, 4)
    everyone = [(name, team) for name in names for team in rng.sample(TEAMS, 2 if name in shared else 1)]
    for number, (name, team) in enumerate(rng.sample(everyone, len(everyone)), start=1):
        office.contacts[f"c{number}"] = Contact(f"c{number}", name, team, f"{rng.randint(1000, 9999)}")
    people = list(office.contacts)
    slots = rng.sample([(title, day) for title in TITLES for day in DAYS], 14)
    for number, (title, day) in enumerate(slots, start=1):
        attending = tuple(sorted(rng.sample(people, rng.randint(2, 3))))
        office.events[f"e{number}"] = Event(f"e{number}", title, day, rng.choice(HOURS), attending)
    pairs = rng.sample([(sender, title) for sender in people for title in TITLES], 10)
    for number, (sender, title) in enumerate(pairs, start=1):
        office.mails[f"m{number}"] = Mail(f"m{number}", sender, title, f"Some thoughts on the {title.lower()}.")
    return office
