"""Requests go on with the conversation that they continue, and nothing is said to the model twice or never."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
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
KEPT = {"seat": "c1", "turns": 1, "messages": 3}
"""What a branch keeps of a conversation whose second answer is changed."""


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


def thinking(
    rewrite: Callable[[Message], Message] = lambda message: message,
) -> tuple[Conversations, list[Message]]:
    """A conversation in which the model thinks, calls a tool with nested arguments and adds blank lines."""
    known, history = Conversations(), [SYSTEM, replace(ASK, content="Find it.\n\n  def f():\n    pass\n")]
    first, *_ = known.place(history, TOOLS)
    call = call_tool("look", where="here", depth=1, near={"b": 2.5, "a": [1, None]})
    history.append(known.answered(first, replace(call, content="\n\n", reasoning_content="Where?")))
    answer = result(history[-1], " nothing\n")
    known.place([*map(rewrite, history), answer], TOOLS)
    history.append(answer)
    history.append(known.answered(first, replace(say("I look.\n\nNot here.\n"), reasoning_content="Hm.")))
    return known, history


def respelled(message: Message) -> Message:
    """The message with its calls' arguments in another spelling."""
    calls = []
    for call in message.tool_calls:
        items = reversed(json.loads(call.function.arguments).items())
        values = {key: float(value) if isinstance(value, int) else value for key, value in items}
        calls.append(ToolCall(id=call.id, function=FunctionCall(name=call.function.name, arguments=json.dumps(values))))
    return replace(message, tool_calls=calls)


REWRITES: dict[str, Callable[[Message], Message]] = {
    "strip": lambda message: replace(message, content=message.content.strip()),
    "drop blank text": lambda message: message if message.content.strip() else replace(message, content=""),
    "drop blank parts": lambda message: replace(message, content=re.sub(r"\n\s*\n", "\n", message.content)),
    "add a part": lambda message: replace(message, content=message.content + "\n \n"),
    "leave out thoughts": lambda message: replace(message, reasoning_content=None),
    "blank thoughts": lambda message: replace(message, reasoning_content=" "),
    "write arguments anew": respelled,
}
"""What programs do to the messages that they send again, without changing a word."""


@pytest.mark.parametrize(
    ("rewrite", "metrics"),
    [
        ("strip", {"rewritten/white_space": 4}),
        ("drop blank text", {"rewritten/white_space": 1}),
        ("drop blank parts", {"rewritten/white_space": 3}),
        ("add a part", {"rewritten/white_space": 5}),
        ("leave out thoughts", {"rewritten/thoughts_left_out": 2}),
        ("blank thoughts", {"rewritten/thoughts_left_out": 2, "rewritten/thoughts_changed": 3}),
        ("write arguments anew", {"rewritten/arguments": 1}),
    ],
)
def test_a_rewrite_that_changes_no_word_is_counted(rewrite: str, metrics: dict[str, float]) -> None:
    known, history = thinking(REWRITES[rewrite])
    conversation, news, branch = known.place([*map(REWRITES[rewrite], history), MORE], TOOLS)
    assert (conversation.name, news, branch) == ("c1", [MORE], None)
    assert conversation.messages[:-1] == history, "as the model knows them"
    assert known.rewrites() == metrics


@given(st.lists(st.sampled_from(sorted(REWRITES)), max_size=4), st.integers(1, 8), st.randoms(use_true_random=False))
def test_programs_that_rewrite_keep_one_conversation(names: list[str], turns: int, dice: random.Random) -> None:
    known, history = thinking()
    news = [MORE]
    for turn in range(turns):
        text = dice.choice(["\n\n", "", "Done. ", "\n a\n\n  b\n", "\tcode"]) + dice.choice(["", str(turn)])
        for name in names:
            history = [REWRITES[name](message) if dice.random() < 0.8 else message for message in history]
        conversation, told, _ = known.place([*history, *news], TOOLS)
        assert (conversation.name, [message.content for message in told]) == ("c1", [news[0].content])
        answer = known.answered(conversation, call_tool("look", where=text, turn=turn))
        history += [*news, answer]
        news = [result(answer, text)]
    assert len(known) == 1


@pytest.mark.parametrize(
    "text",
    [
        "I look. Not here.",
        "I look.\n\nNot here",
        "I look.\n\nnot here.",
        "I look.\n\n Not here.",
        "I look.\n\nNot  here.",
        "Not here.\n\nI look.",
        "I look.",
        "",
    ],
)
def test_other_words_begin_another_conversation(text: str) -> None:
    """White space within a text may be code."""
    known, history = thinking()
    assert known.place([*history[:-1], say(text), MORE], TOOLS)[0].why == "an answer was changed"


def test_a_call_with_other_arguments_begins_another_conversation() -> None:
    known, history = thinking()
    call = history[2].tool_calls[0]
    for old, new in (('"here"', '"here "'), ("2.5", "2.50001"), ("null", "0"), ('"depth"', '"Depth"')):
        function = FunctionCall(name="look", arguments=call.function.arguments.replace(old, new))
        changed = replace(history[2], tool_calls=[ToolCall(id=call.id, function=function)])
        assert known.place([*history[:2], changed, *history[3:], MORE], TOOLS)[0].why == "an answer was changed"


def test_tools_may_come_in_any_order() -> None:
    known, history = Conversations(), [ASK]
    tools = [ToolSpec(name="look"), ToolSpec(name="write"), ToolSpec(name="ask")]
    for turn in range(6):
        conversation, *_ = known.place(history, tools[turn % 3 :] + tools[: turn % 3])
        history += [known.answered(conversation, say(f"{turn}")), MORE]
    assert (len(known), conversation.tools) == (1, tools)
    assert known.rewrites() == {"rewritten/order_of_tools": 4.0}


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
        (lambda history: [*history[:3], result(history[2], "something")], "the text of a tool was changed", KEPT),
        (lambda history: history[:4], "asked again", KEPT),
        (lambda history: [*history[:4], say("Nowhere."), MORE], "an answer was changed", {}),
        (lambda history: [*history[:4], MORE, MORE], "an answer was changed", KEPT),
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
    more = [*TOOLS, ToolSpec(name="write")]
    conversation, _, branch = known.place([*history, MORE], more)
    assert (conversation.why, conversation.tools) == ("other tools", more)
    assert branch == Branch(why="other tools", seat="c1", turns=2, messages=len(history))
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
