"""Environment with an office API of many tools, a job that needs a few of them, and a reward for the final state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Literal, TypeVar

from pydantic import Field

import forge_env as fe
from environments.distractors.jobs import KINDS, Job
from environments.distractors.office import HOURS, Contact, Event, Mail, Office, draw_office
from environments.seeds import draw_seed
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.types import Action, Task

Level = Literal[1, 2, 3, 4]
Record = TypeVar("Record")
Day = Literal["monday", "tuesday", "wednesday", "thursday", "friday"]


class DistractorsConfig(ToolEnvironmentConfig):
    """Job selection and turn limit."""

    max_turns: int = Field(16, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    levels: list[Level] = Field([1, 2, 3, 4], min_length=1)
    """1: one change; 2: two changes, three records; 3: a request in a mail, or a free hour; 4: a team's day."""


def done(env: Distractors, task: Task) -> float:
    """1 if the office is exactly in the job's goal state, without further changes; otherwise 0."""
    return float(env.office.outcome() == draw_job(task)[1].goal.outcome())


def untouched(env: Distractors, task: Task) -> float:
    """1 if the office was not changed at all; otherwise 0."""
    return float(env.office.outcome() == draw_job(task)[0].outcome())


class Distractors(fe.ToolEnvironment):
    """Office jobs with many tools and look-alike records; the final state is scored."""

    api_version = 1
    config_class = DistractorsConfig
    system_prompt = (
        "You work for an office with tools for contacts (c1, ...), the calendar (e1, ...; an event takes an hour) and "
        "mail (m1, ...). Many records look alike: find the right ones before you change anything, and do what is "
        "asked and nothing more. Mails can't be taken back. When it is done, answer with a short message."
    )
    config: DistractorsConfig
    office: Office
    rubric = fe.Rubric([done], metrics=[untouched])

    def task(self, split: str, index: int) -> Task:
        """The `index`-th job of `split`, in a separately drawn office; one office in five belongs to `eval`."""
        rng = Random(f"distractors/{self.config.seed}/{split}/{index}")
        level = rng.choice(self.config.levels)
        # Office and job are redrawn from these two values, so the task itself needn't hold the state to be looked up.
        kind = rng.randrange(len(KINDS[level]))
        data = {"public_office": draw_seed(rng, split), "public_kind": kind}
        task = Task(id=f"{split}-{self.config.seed}-{index}", prompt="", data=data, difficulty=level, split=split)
        _, job = draw_job(task)
        return task.model_copy(update={"prompt": job.prompt, "tags": [KINDS[level][kind].__name__]})

    def gold_actions(self, task: Task) -> list[Action] | None:
        """The job's tool calls, then a message that ends the episode."""
        return [*(fe.call_tool(name, **arguments) for name, arguments in draw_job(task)[1].calls), "Done."]

    async def setup(self, task: Task) -> None:
        """Draw the office in its state before the job."""
        self.office = draw_job(task)[0]

    # Contacts.

    @fe.tool(thread=False)
    def find_contacts(self, text: str) -> str:
        """Contacts in whose name or team a text occurs.

        Args:
            text: a part of the name or team.
        """
        return _list(_with(self.office.contacts.values(), text))

    @fe.tool(thread=False)
    def get_contact(self, contact_id: str) -> str:
        """One contact.

        Args:
            contact_id: such as c1.
        """
        return str(self._contact(contact_id))

    @fe.tool(thread=False)
    def update_phone(self, contact_id: str, phone: str) -> str:
        """Change the phone number of a contact.

        Args:
            contact_id: such as c1.
            phone: the new number.
        """
        old = self._contact(contact_id)
        self.office.contacts[old.id] = replace(old, phone=phone)
        return str(self.office.contacts[old.id])

    @fe.tool(thread=False)
    def update_team(self, contact_id: str, team: str) -> str:
        """Change the team of a contact.

        Args:
            contact_id: such as c1.
            team: the new team.
        """
        old = self._contact(contact_id)
        self.office.contacts[old.id] = replace(old, team=team)
        return str(self.office.contacts[old.id])

    @fe.tool(thread=False)
    def delete_contact(self, contact_id: str) -> str:
        """Remove a contact for good.

        Args:
            contact_id: such as c1.
        """
        return f"deleted {self.office.contacts.pop(self._contact(contact_id).id)}"

    # Calendar.

    @fe.tool(thread=False)
    def find_events(self, text: str) -> str:
        """Events in whose title a text occurs.

        Args:
            text: a part of the title.
        """
        return _list(_with(self.office.events.values(), text))

    @fe.tool(thread=False)
    def list_events(self, day: Day) -> str:
        """All events of a day.

        Args:
            day: of this week.
        """
        return _list(event for event in self.office.events.values() if event.day == day)

    @fe.tool(thread=False)
    def create_event(self, title: str, day: Day, hour: int, contact_ids: list[str]) -> str:
        """Make an event.

        Args:
            title: its title.
            day: of this week.
            hour: 9 to 16.
            contact_ids: who takes part, such as ["c1", "c2"].
        """
        people = [self._contact(contact).id for contact in contact_ids]
        return str(self.office.create_event(title, day, _hour(hour), people))

    @fe.tool(thread=False)
    def move_event(self, event_id: str, day: Day, hour: int) -> str:
        """Move an event to another time.

        Args:
            event_id: such as e1.
            day: of this week.
            hour: 9 to 16.
        """
        return str(self.office.move_event(self._event(event_id).id, day, _hour(hour)))

    @fe.tool(thread=False)
    def rename_event(self, event_id: str, title: str) -> str:
        """Change the title of an event.

        Args:
            event_id: such as e1.
            title: the new title.
        """
        old = self._event(event_id)
        self.office.events[old.id] = replace(old, title=title)
        return str(self.office.events[old.id])

    @fe.tool(thread=False)
    def cancel_event(self, event_id: str) -> str:
        """Cancel an event.

        Args:
            event_id: such as e1.
        """
        return f"cancelled {self.office.events.pop(self._event(event_id).id)}"

    # Mail.

    @fe.tool(thread=False)
    def find_mails(self, text: str) -> str:
        """Mails in whose subject a text occurs; senders are ids of contacts.

        Args:
            text: a part of the subject.
        """
        return _list(_with(self.office.mails.values(), text))

    @fe.tool(thread=False)
    def read_mail(self, mail_id: str) -> str:
        """Read a mail.

        Args:
            mail_id: such as m1.
        """
        mail = self._mail(mail_id)
        return f"{mail}\n{mail.body}"

    @fe.tool(thread=False)
    def send_mail(self, contact_id: str, subject: str, body: str) -> str:
        """Write a mail to a contact.

        Args:
            contact_id: such as c1.
            subject: the subject.
            body: the text.
        """
        self.office.sent.append((self._contact(contact_id).id, subject))
        return f"sent to {contact_id}"

    @fe.tool(thread=False)
    def forward_mail(self, mail_id: str, contact_id: str) -> str:
        """Send a mail on to a contact.

        Args:
            mail_id: such as m1.
            contact_id: such as c1.
        """
        self.office.sent.append((self._contact(contact_id).id, self._mail(mail_id).id))
        return f"forwarded to {contact_id}"

    @fe.tool(thread=False)
    def archive_mail(self, mail_id: str) -> str:
        """Take a mail out of the inbox.

        Args:
            mail_id: such as m1.
        """
        old = self._mail(mail_id)
        self.office.mails[old.id] = replace(old, archived=True)
        return str(self.office.mails[old.id])

    def _contact(self, contact_id: str) -> Contact:
        return _known(self.office.contacts, contact_id, "contact")

    def _event(self, event_id: str) -> Event:
        return _known(self.office.events, event_id, "event")

    def _mail(self, mail_id: str) -> Mail:
        return _known(self.office.mails, mail_id, "mail")


def draw_job(task: Task) -> tuple[Office, Job]:
    """The task's office in its initial state, and the job."""
    office = draw_office(task.data["public_office"])
    rng = Random(f"distractors/job/{task.data['public_office']}")
    return office, KINDS[task.difficulty][task.data["public_kind"]](rng, office)


def _known(records: dict[str, Record], record_id: str, what: str) -> Record:
    if record_id not in records:
        raise fe.ToolError(f"there is no {what} {record_id[:20]!r}")
    return records[record_id]


def _hour(hour: int) -> int:
    if hour not in HOURS:
        raise fe.ToolError(f"hours are {HOURS[0]} to {HOURS[-1]}")
    return hour


def _with(records: Iterable[object], text: str) -> list[object]:
    return [record for record in records if text.casefold() in str(record).casefold()]


def _list(records: Iterable[object]) -> str:
    return "\n".join(map(str, records)) or "[none]"
