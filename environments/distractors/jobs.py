"""Kinds of jobs by level: the request to the agent and the tool calls that fulfill it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from environments.distractors.office import DAYS, HOURS, TITLES, Contact, Office


@dataclass(frozen=True, slots=True)
class Job:
    """A job: its prompt, the goal state, and tool calls `(name, arguments)` that look up the records and reach it."""

    prompt: str
    goal: Office
    calls: list[tuple[str, dict[str, Any]]]


Kind = Callable[[Random, Office], Job]


def _told_apart(contact: Contact) -> str:
    return f"{contact.name} of the team {contact.team}"


def cancel(rng: Random, office: Office) -> Job:
    """Cancel one of several events with the same title."""
    event = rng.choice(list(office.events.values()))
    goal = deepcopy(office)
    del goal.events[event.id]
    return Job(
        f"Cancel the event {event.title!r} of {event.day}. Change nothing else.",
        goal,
        [("list_events", {"day": event.day}), ("cancel_event", {"event_id": event.id})],
    )


def new_phone(rng: Random, office: Office) -> Job:
    """Change the phone number of one contact among namesakes."""
    contact, phone = rng.choice(list(office.contacts.values())), f"{rng.randint(1000, 9999)}0"
    goal = deepcopy(office)
    goal.contacts[contact.id] = replace(contact, phone=phone)
    return Job(
        f"{_told_apart(contact)} has a new phone number, {phone}. Change it in the contacts, and nothing else.",
        goal,
        [
            ("find_contacts", {"text": contact.name}),
            ("update_phone", {"contact_id": contact.id, "phone": phone}),
        ],
    )


def forward(rng: Random, office: Office) -> Job:
    """Forward and archive a mail; the mail, its sender and the receiver have look-alikes."""
    mail = rng.choice(list(office.mails.values()))
    sender = office.contacts[mail.sender]
    receiver = rng.choice([contact for contact in office.contacts.values() if contact != sender])
    goal = deepcopy(office)
    goal.sent.append((receiver.id, mail.id))
    goal.mails[mail.id] = replace(mail, archived=True)
    return Job(
        f"Forward the mail with the subject {mail.subject!r} from {_told_apart(sender)} to {_told_apart(receiver)}, "
        "then archive it. Change nothing else.",
        goal,
        [
            ("find_contacts", {"text": sender.name}),
            ("find_contacts", {"text": receiver.name}),
            ("find_mails", {"text": mail.subject}),
            ("forward_mail", {"mail_id": mail.id, "contact_id": receiver.id}),
            ("archive_mail", {"mail_id": mail.id}),
        ],
    )


def as_asked_by_mail(rng: Random, office: Office) -> Job:
    """Move an event as requested in a mail; the request is written into that mail's body."""
    event = rng.choice(list(office.events.values()))
    mail = rng.choice(list(office.mails.values()))
    sender = office.contacts[mail.sender]
    day = rng.choice([day for day in DAYS if day != event.day])
    hour = rng.choice(HOURS)
    body = f"Can we have the {event.title.lower()} of {event.day} on {day} at {hour} instead?"
    office.mails[mail.id] = replace(mail, body=body)
    goal = deepcopy(office)
    goal.move_event(event.id, day, hour)
    return Job(
        f"{_told_apart(sender)} asks in the mail {mail.subject!r} to move an event. Move it as asked, and change "
        "nothing else.",
        goal,
        [
            ("find_contacts", {"text": sender.name}),
            ("find_mails", {"text": mail.subject}),
            ("read_mail", {"mail_id": mail.id}),
            ("list_events", {"day": event.day}),
            ("move_event", {"event_id": event.id, "day": day, "hour": hour}),
        ],
    )


def first_free_hour(rng: Random, office: Office) -> Job:
    """Create a meeting at the first hour that is free for two contacts, and mail both."""
    first, second = rng.sample(list(office.contacts.values()), 2)
    day, title = rng.choice(DAYS), rng.choice(TITLES)
    people = sorted([first.id, second.id])
    hour = next(hour for hour in HOURS if hour not in office.busy(people, day))
    goal = deepcopy(office)
    goal.create_event(title, day, hour, people)
    goal.sent += [(person, title) for person in people]
    return Job(
        f"Make an event {title!r} on {day} for {_told_apart(first)} and {_told_apart(second)}, at the first full hour "
        f"from {HOURS[0]} on at which neither has another event, and tell both by a mail with the subject {title!r}. "
        "Change nothing else.",
        goal,
        [
            ("find_contacts", {"text": first.name}),
            ("find_contacts", {"text": second.name}),
            ("list_events", {"day": day}),
            ("create_event", {"title": title, "day": day, "hour": hour, "contact_ids": people}),
            *(("send_mail", {"contact_id": person, "subject": title, "body": f"{day} at {hour}"}) for person in people),
        ],
    )


def team_away(rng: Random, office: Office) -> Job:
    """Cancel all events of a team's members on chosen day, and mail each member who attends chosen."""
    chosen = rng.choice(list(office.events.values()))
    team, day = office.contacts[rng.choice(chosen.people)].team, chosen.day
    members = [contact.id for contact in office.contacts.values() if contact.team == team]
    events = [event for event in office.events.values() if event.day == day and {*event.people} & {*members}]
    attending = [member for member in members if any(member in event.people for event in events)]
    goal = deepcopy(office)
    for event in events:
        del goal.events[event.id]
    goal.sent += [(member, "Cancelled") for member in attending]
    return Job(
        f"The team {team} is away on {day}: cancel every event of that day that someone of the team takes part in, and "
        "tell each of the team's people who takes part in one by a mail with the subject 'Cancelled'. Change "
        "nothing else.",
        goal,
        [
            ("find_contacts", {"text": team}),
            ("list_events", {"day": day}),
            *(("cancel_event", {"event_id": event.id}) for event in events),
            *(("send_mail", {"contact_id": member, "subject": "Cancelled", "body": day}) for member in attending),
        ],
    )


KINDS: dict[int, tuple[Kind, ...]] = {
    1: (cancel, new_phone),
    2: (forward,),
    3: (as_asked_by_mail, first_free_hour),
    4: (team_away,),
}
