"""Match requests to conversations: a program sends all messages with every request, and may change any of them.

A request continues a conversation if its messages begin with all messages of that conversation; if several match, the
longest is used. Only the new messages are then sent to the model, and the exact tokens of the conversation continue.
Otherwise a new conversation starts; the reason is recorded. If its messages begin with those of an earlier conversation
up to one of the model's answers, and all later ones are the program's, it branches off after that answer, and the exact
tokens up to there continue too.

Messages are compared by their words. Many programs strip texts, drop blank ones, leave out thoughts or put them before
the text, write the JSON of a call anew or list the tools in another order. The conversation then continues as the model
saw it, and the change is counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from forge_env.gateway.request import arguments_object
from forge_env.tools.turns import split_thoughts
from forge_env.types import Branch, Message, ToolSpec

MAX_EXACT = 2**53
"""Integers up to this size are exact in every JSON library."""
NEW = "new"
"""Reason for a conversation whose first request has nothing in common with earlier ones."""


@dataclass(eq=False, slots=True)
class Conversation:
    """One conversation of a program with the model.

    Attributes:
        name: `c1`, `c2` and so on, in the order in which the conversations began.
        why: why it began: `NEW`, or the reason that its first request does not continue another conversation.
        messages: the messages so far, as the program sees them.
        numbers: a number for each message; messages of the same words have the same number.
        tools_number: the number of the set of tools, likewise.
        repeated: number of messages that the program has sent again.
    """

    name: str
    tools: list[ToolSpec]
    why: str = NEW
    messages: list[Message] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    tools_number: int = 0
    repeated: int = 0
    calls: dict[str, str] = field(default_factory=dict)
    """Ids of tool calls as the program sees them -> ids as the model sees them."""
    answers: list[int] = field(default_factory=list)
    """Number of messages after each of the model's answers in this conversation."""
    cut: bool = False
    """Whether the last answer was cut at a stop word; the model must not see again what it generated after that."""


class Conversations:
    """All conversations of an episode."""

    def __init__(self) -> None:
        self._all: list[Conversation] = []
        self._calls = 0
        self._numbers: dict[Hashable, int] = {}
        """Numbers of all messages and sets of tools: requests with thousands of messages are compared by number."""
        self._rewrites: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._all)

    def place(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Conversation, list[Message], Branch | None]:
        """Return the conversation that a request belongs to, the request's new messages, and a `Branch` if the request
        starts a conversation that has messages in common with an earlier one."""
        numbers = [self._message_number(message) for message in messages]
        offered = self._number(frozenset(_sorted(tool.model_dump()) for tool in tools))
        match = max(
            (each for each in self._all if _goes_on(each, messages, numbers, offered)),
            key=lambda each: len(each.messages),
            default=None,
        )
        branch = None
        if match is None:
            why = self._difference(messages, numbers, offered)
            match = Conversation(f"c{len(self._all) + 1}", list(tools), why, tools_number=offered)
            if why != NEW:
                branch = self._branch(why, messages, numbers, match)
            self._all.append(match)
        count = len(match.messages)
        self._count_rewrites(match, messages, tools)
        added = list(messages[count:])
        match.messages += added
        match.numbers += numbers[count:]
        return match, [_renamed(message, match.calls) for message in added], branch

    def answered(self, conversation: Conversation, message: Message, *, cut: bool = False) -> Message:
        """Add the model's answer, and return it as sent to the program: with call ids that are unique in the episode.

        Args:
            cut: whether the answer was cut at a stop word. The model generated more, so the next request starts a new
                conversation.
        """
        calls = []
        for call in message.tool_calls:
            self._calls += 1
            name = f"call_{self._calls}"
            conversation.calls[name] = call.id
            calls.append(replace(call, id=name))
        shown = replace(message, tool_calls=calls)
        conversation.messages.append(shown)
        conversation.numbers.append(self._message_number(shown))
        conversation.cut = cut
        if not cut:
            conversation.answers.append(len(conversation.messages))
        return shown

    def reasons(self) -> dict[str, float]:
        """Number of conversations by the reason that they began, as metrics such as `fork/asked_again`."""
        counts = Counter(each.why for each in self._all if each.why != NEW)
        return {f"fork/{why.replace(' ', '_')}": float(count) for why, count in counts.items()}

    def rewrites(self) -> dict[str, float]:
        """Number of messages (of requests, for the order of tools) that the program rewrote without changing a word, as
        metrics such as `rewritten/white_space`."""
        return {f"rewritten/{what}": float(count) for what, count in self._rewrites.items()}

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _message_number(self, message: Message) -> int:
        exact = _key(message, message.content)
        if (number := self._numbers.get(exact)) is None:
            number = self._numbers[exact] = self._number(_key(message, _words(message)))
        return number

    def _count_rewrites(self, known: Conversation, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Count the rewrites among messages that the program sends again for the first time."""
        pairs = zip(known.messages, messages, strict=False)
        for ours, theirs in islice(pairs, known.repeated, None):
            self._rewrites.update(_rewrites(ours, theirs))
        known.repeated = len(known.messages)
        if [tool.name for tool in tools] != [tool.name for tool in known.tools]:
            self._rewrites["order_of_tools"] += 1

    def _branch(self, why: str, messages: Sequence[Message], numbers: Sequence[int], new: Conversation) -> Branch:
        """Find the answer of an earlier conversation after which `new` branches off; copy that one's call ids."""
        last = max((number for number, each in enumerate(messages) if each.role == "assistant"), default=-1) + 1
        for known in reversed(self._all):  # the latest of several that match
            branches = last in known.answers and last < len(messages)
            if branches and known.numbers[:last] == numbers[:last]:
                new.calls.update(known.calls)
                if known.tools_number == new.tools_number:
                    new.tools = known.tools  # in the order that the model has read
                return Branch(why=why, seat=known.name, turns=known.answers.index(last) + 1, messages=last)
        return Branch(why=why)

    def _difference(self, messages: Sequence[Message], numbers: Sequence[int], offered: int) -> str:
        """Why a request continues no conversation, judged by the one with which it has the most messages in common."""
        common = [(_common(known.numbers, numbers), known) for known in self._all]
        length, known = max(common, key=lambda each: each[0], default=(0, None))
        if known is None or not any(message.role != "system" for message in messages[:length]):
            return NEW
        if length == len(messages):
            return "asked again"
        if length == len(known.messages) and known.cut:
            return "an answer was cut at a stop word"
        if length == len(known.messages):
            return "other tools" if known.tools_number != offered else "the program spoke for the model"
        ours, theirs = known.messages[length], messages[length]
        if ours.role == "tool" and ours.tool_call_id == theirs.tool_call_id:
            return "the text of a tool was changed"
        if known.messages[length - 1].role == "assistant":
            return "branched off"
        if len(messages) < len(known.messages):
            return "history compacted"
        return "an answer was changed" if ours.role == "assistant" else "the history was changed"


def _goes_on(known: Conversation, messages: Sequence[Message], numbers: Sequence[int], offered: int) -> bool:
    """Whether a request continues a conversation."""
    count = len(known.messages)
    return (
        len(messages) > count
        and not known.cut
        and known.tools_number == offered
        and known.numbers == numbers[:count]
        and all(message.role != "assistant" for message in messages[count:])
    )


def _common(known: Sequence[int], numbers: Sequence[int]) -> int:
    """Number of leading messages that both have in common."""
    return next(
        (index for index, (one, other) in enumerate(zip(known, numbers, strict=False)) if one != other),
        min(len(known), len(numbers)),
    )


def _key(message: Message, content: str) -> Hashable:
    """Key by which messages are compared. Thoughts are left out: most programs don't send them back."""
    calls = tuple(
        (call.id, call.function.name, _sorted(arguments_object(call.function.arguments))) for call in message.tool_calls
    )
    return message.role, content, message.tool_call_id, calls, message.images


def _words(message: Message) -> str:
    """A message's text without thoughts, blank lines, and white space at the ends of lines."""
    text = message.content
    if message.role == "assistant":
        _, text = split_thoughts(text, only_leading=True)
    return "\n".join(line.rstrip() for line in text.split("\n") if line and not line.isspace()).strip()


def _rewrites(ours: Message, theirs: Message) -> Iterator[str]:
    """Name the differences between a message and its repetition, whose words are the same."""
    if ours.content != theirs.content:
        yield "white_space"
    if ours.reasoning_content and not (theirs.reasoning_content or "").strip():
        yield "thoughts_left_out"
    elif (ours.reasoning_content or "") != (theirs.reasoning_content or ""):
        yield "thoughts_changed"
    calls = zip(ours.tool_calls, theirs.tool_calls, strict=True)
    if any(one.function.arguments != other.function.arguments for one, other in calls):
        yield "arguments"


def _sorted(value: Any) -> str:
    """Canonical JSON: 1.0 is written as 1, and keys are sorted."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, int) and MAX_EXACT < abs(value) < 10**300:
        value = float(value)  # as JavaScript reads it
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _renamed(message: Message, calls: dict[str, str]) -> Message:
    """A copy of a message with the ids of calls as the model sees them."""
    if message.tool_call_id is None and not message.tool_calls:
        return message
    renamed = [replace(call, id=calls.get(call.id, call.id)) for call in message.tool_calls]
    answers = message.tool_call_id and calls.get(message.tool_call_id, message.tool_call_id)
    return replace(message, tool_calls=renamed, tool_call_id=answers)
