"""Requests go on with the conversation that they continue, and nothing is said to the model twice or never."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.gateway.conversations import NEW, Conversations
from forge_env.types import Branch, FunctionCall, Message, ToolCall, ToolSpec, call_tool

ASK, MORE = Message(role="user", content="Find it."), Message(role="user", content="Go on.")
SYSTEM = Message(role="system", content="You search.")
TOOLS = [ToolSpec(name="look")]


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def result(call: Message, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.tool_calls[0].id)


def begun() -> tuple[Conversations, list[Message]]:
    """A conversation in which the model has called a tool and then said something."""
    known, history = Conversations(), [SYSTEM, ASK]
    first, news, branch = known.place(history, TOOLS)
    assert (news, branch) == ([SYSTEM, ASK], None)
    history.append(known.answered(first, call_tool("look", where="here")))
    history.append(result(history[-1], "nothing"))
    again, news, _ = known.place(history, TOOLS)
    assert again is first
    assert news == [replace(history[-1], tool_call_id="call-0")], "under the id that the model's side knows"
    history.append(known.answered(first, say("Not here.")))
    return known, history


def test_ids_of_calls_are_unique_in_an_episode() -> None:
    known, history = begun()
    other, *_ = known.place([MORE], TOOLS)
    called = known.answered(other, call_tool("look"))
    assert called.tool_calls[0].id not in {call.id for message in history for call in message.tool_calls}


def test_json_is_compared_by_what_it_says() -> None:
    known, history = begun()
    spelled = FunctionCall(name="look", arguments='{"where":"here"}')
    history[2] = replace(history[2], tool_calls=[ToolCall(id=history[2].tool_calls[0].id, function=spelled)])
    assert known.place([*history, MORE], TOOLS)[1] == [MORE]


@pytest.mark.parametrize(
    ("change", "why", "kept"),
    [
        (lambda history: [MORE], NEW, {}),
        (lambda history: [SYSTEM, MORE], NEW, {}),
        (lambda history: history[:2], "asked again", {}),
        (
            lambda history: [*history[:3], result(history[2], "something"), history[4], MORE],
            "the text of a tool was changed",
            {},
        ),
        (
            lambda history: [*history[:3], result(history[2], "something")],
            "the text of a tool was changed",
            {"seat": "c1", "turns": 1, "messages": 3},
        ),
        (lambda history: history[:4], "asked again", {"seat": "c1", "turns": 1, "messages": 3}),
        (lambda history: [*history[:4], say("Nowhere."), MORE], "an answer was changed", {}),
        (
            lambda history: [*history[:4], MORE, MORE],
            "an answer was changed",
            {"seat": "c1", "turns": 1, "messages": 3},
        ),
        (lambda history: [SYSTEM, ASK, say("In short: not here."), MORE], "history compacted", {}),
        (lambda history: [*history, say("I think..."), MORE], "the program spoke for the model", {}),
        (lambda history: [SYSTEM, replace(ASK, content="Find it!"), *history[2:], MORE], NEW, {}),
    ],
)
def test_what_does_not_go_on_says_why(change: object, why: str, kept: dict[str, Any]) -> None:
    known, history = begun()
    assert callable(change)
    messages = change(history)
    conversation, news, branch = known.place(messages, TOOLS)
    assert (conversation.name, conversation.why, len(news)) == ("c2", why, len(messages))
    assert branch == (None if why == NEW else Branch(why=why, **kept))


def test_other_tools_begin_another_conversation() -> None:
    known, history = begun()
    assert known.place([*history, MORE], [])[0].why == "other tools"
    assert known.reasons() == {"fork/other_tools": 1.0}


def test_two_that_go_on_from_one_answer() -> None:
    known, history = begun()
    first, *_ = known.place([*history, MORE], TOOLS)
    known.answered(first, say("Here."))
    second, news, branch = known.place([*history, ASK], TOOLS)
    assert (second.why, len(news)) == ("branched off", len(history) + 1)
    assert branch == Branch(why="branched off", seat="c1", turns=2, messages=len(history))
    third, *_ = known.place([*history, ASK, MORE], TOOLS)
    assert third.why == "the history was changed" or third is second


def test_what_was_said_after_a_stop_word_is_not_read_again() -> None:
    known, history = begun()
    first, *_ = known.place([*history, MORE], TOOLS)
    history += [MORE, known.answered(first, say("Act."), cut=True)]
    second, news, branch = known.place([*history, ASK], TOOLS)
    assert (second.why, len(news)) == ("an answer was cut at a stop word", len(history) + 1)
    assert branch == Branch(why=second.why)
    known.answered(second, say("Done."))
    assert known.place([*history, ASK, say("Done."), MORE], TOOLS)[:2] == (second, [MORE])


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_whatever_a_program_does_the_model_is_told_what_it_sent(dice: random.Random, requests: int) -> None:
    """Programs that go on, retry, cut, reorder, summarise and speak for the model."""
    known = Conversations()
    told: dict[str, list[Message]] = {}
    answered: dict[str, list[list[Message]]] = {}
    histories: list[list[Message]] = [[ASK]]
    for number in range(requests):
        history = list(dice.choice(histories))
        match dice.randrange(6):
            case 0:
                history = history[: dice.randint(1, len(history))]
            case 1:
                dice.shuffle(history)
            case 2:
                history = [SYSTEM, Message(role="user", content=f"In short: {number}")]
            case 3:
                history.append(say("I think..."))
            case _:
                history.append(Message(role="user", content=dice.choice(["Go on.", "And?"])))
        conversation, news, branch = known.place(history, TOOLS)
        if branch is not None and branch.turns:
            before = history[: branch.messages]
            assert told[branch.seat][: branch.messages] == before
            assert conversation.name not in told
            assert all(message.role != "assistant" for message in history[branch.messages :])
            assert sum(len(text) <= branch.messages for text in answered[branch.seat]) == branch.turns
        said = told.setdefault(conversation.name, [])
        said += news
        assert said == history, "together with what was said before, it is what the program sent"
        answer = say(dice.choice(["Yes.", "No."]))
        said.append(answer)
        answered.setdefault(conversation.name, []).append(list(said))
        assert known.answered(conversation, answer) == answer
        histories.append([*history, answer])
    assert len(known) == len(told)
