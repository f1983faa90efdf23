"""Jobs are done by the right calls, and by nothing less or more."""

from __future__ import annotations

from collections import Counter

import pytest

import forge_env as fe
from environments.distractors import Distractors, DistractorsConfig
from environments.distractors.environment import draw_job
from environments.distractors.jobs import KINDS
from environments.distractors.office import draw_office
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import ReplayPolicy

CHANGES = ("cancel_event", "update_phone", "forward_mail", "archive_mail", "move_event", "create_event", "send_mail")


async def played(task: fe.Task, calls: list[fe.Message]) -> float:
    trajectory = await run_episode(lambda: fe.make("distractors"), ReplayPolicy([*calls, "Done."]), task=task)
    assert trajectory.valid
    return trajectory.reward


@pytest.mark.parametrize("level", list(KINDS))
async def test_every_change_is_needed_and_no_other_is_allowed(level: int) -> None:
    env = Distractors(DistractorsConfig(levels=[level]))
    seen: Counter[str] = Counter()
    for index in range(6):
        task = env.task("train", index)
        seen[task.tags[0]] += 1
        calls = [fe.call_tool(name, **arguments) for name, arguments in draw_job(task)[1].calls]
        names = [name for name, _ in draw_job(task)[1].calls]
        assert await played(task, calls) == 1.0
        assert await played(task, []) == 0.0
        for number, name in enumerate(names):
            left_out = [*calls[:number], *calls[number + 1 :]]
            assert await played(task, left_out) == float(name not in CHANGES), (task.prompt, name)
        assert await played(task, [*calls, fe.call_tool("send_mail", contact_id="c1", subject="Hi", body="")]) == 0.0
        assert await played(task, [*calls, fe.call_tool("update_team", contact_id="c2", team="it")]) == 0.0
    assert len(seen) == len(KINDS[level])


def test_records_look_alike_and_are_told_apart() -> None:
    for seed in range(10):
        office = draw_office(str(seed))
        contacts = list(office.contacts.values())
        assert max(Counter(contact.name for contact in contacts).values()) == 2
        assert len({(contact.name, contact.team) for contact in contacts}) == len(contacts)
        events = list(office.events.values())
        assert max(Counter(event.title for event in events).values()) > 1
        assert len({(event.title, event.day) for event in events}) == len(events)
        mails = list(office.mails.values())
        assert len({(mail.sender, mail.subject) for mail in mails}) == len(mails)


async def test_a_wrong_id_is_answered() -> None:
    env = Distractors()
    await env.reset(options={"split": "eval", "index": 0})
    for call in [
        fe.call_tool("cancel_event", event_id="e99"),
        fe.call_tool("forward_mail", mail_id="m1", contact_id="c99"),
        fe.call_tool("create_event", title="x", day="monday", hour=8, contact_ids=[]),
        fe.call_tool("move_event", event_id="e1", day="sunday", hour=9),
    ]:
        observation, *_ = await env.step(call)
        assert observation[0].content.startswith("Error:")
    _, reward, _, _, info = await env.step("Done.")
    assert (reward, info["metrics"]["untouched"]) == (0.0, 1.0)
