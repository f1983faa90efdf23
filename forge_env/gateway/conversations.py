"""Which conversation a request goes on with: a program sends all messages every time, and may change any of them.

A request continues a conversation where its messages begin with all that was said there; of several, the longest. Then
only what is new is said to the model, whose exact tokens go on. Else it begins another conversation, and why is known;
where it begins with answers of an earlier one and only the program speaks after them, it branches off there, and the
exact tokens up to that answer go on too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge_env.gateway.request import arguments_object
from forge_env.types import Branch, Message, ToolSpec

NEW = "new"
"""A request that begins as none before."""


@dataclass(eq=False, slots=True)
class Conversation:
    """What was said so far.

    Attributes:
        name: of it, in the order of their beginning.
        tools: that its requests offer.
        why: it began: `NEW`, or what kept its first request from continuing another.
        messages: as the program knows them.
        numbers: of the messages; equal ones have the same number.
        tools_number: of the tools, likewise.
    """

    name: str
    tools: list[ToolSpec]
    why: str = NEW
    messages: list[Message] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    tools_number: int = 0
    calls: dict[str, str] = field(default_factory=dict)
    """Ids of tool calls as the program knows them -> as the model's side does."""
    answers: list[int] = field(default_factory=list)
    """After each of the model's answers here, how many messages there were."""
    cut: bool = False
    """The last answer was cut at a stop word: what the model said after it, it must not read again."""


class Conversations:
    """All conversations of an episode."""

    def __init__(self) -> None:
        self._all: list[Conversation] = []
        self._calls = 0
        self._numbers: dict[Hashable, int] = {}
        """Of all messages and lists of tools. A request may have thousands, and is compared with each conversation."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._all)

    def place(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Conversation, list[Message], Branch | None]:
        """The conversation that a request belongs to, what is new in it, and how it began, where it begins with this
        request and not from nothing."""
        numbers = [self._number(_key(message)) for message in messages]
        offered = self._number(tuple(_sorted(tool.model_dump()) for tool in tools))
        found = max(
            (each for each in self._all if _goes_on(each, messages, numbers, offered)),
            key=lambda each: len(each.messages),
            default=None,
        )
        branch = None
        if found is None:
            why = self._difference(messages, numbers, offered)
            found = Conversation(f"c{len(self._all) + 1}", list(tools), why, tools_number=offered)
            if why != NEW:
                branch = self._branch(why, messages, numbers, found)
            self._all.append(found)
        count = len(found.messages)
        news = list(messages[count:])
        found.messages += news
        found.numbers += numbers[count:]
        return found, [_renamed(message, found.calls) for message in news], branch

    def answered(self, conversation: Conversation, message: Message, *, cut: bool = False) -> Message:
        """The model has answered; the message as the program gets it. Ids of calls are unique in the whole episode.

        Args:
            conversation: in which it has.
            message: the answer.
            cut: at a stop word; the model has said more, so what follows begins another conversation.
        """
        calls = []
        for call in message.tool_calls:
            self._calls += 1
            name = f"call_{self._calls}"
            conversation.calls[name] = call.id
            calls.append(replace(call, id=name))
        shown = replace(message, tool_calls=calls)
        conversation.messages.append(shown)
        conversation.numbers.append(self._number(_key(shown)))
        conversation.cut = cut
        if not cut:
            conversation.answers.append(len(conversation.messages))
        return shown

    def reasons(self) -> dict[str, float]:
        """How many conversations began because of what, for metrics: `fork/asked_again`."""
        counts = Counter(each.why for each in self._all if each.why != NEW)
        return {f"fork/{why.replace(' ', '_')}": float(count) for why, count in counts.items()}

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _branch(self, why: str, messages: Sequence[Message], numbers: Sequence[int], new: Conversation) -> Branch:
        """The last answer of an earlier conversation after which `new` goes its own way; it gets the ids of its calls.

        Args:
            why: the new conversation begins.
            messages: of the request.
            numbers: of the messages.
            new: the conversation.
        """
        last = max((number for number, each in enumerate(messages) if each.role == "assistant"), default=-1) + 1
        for known in reversed(self._all):  # of several that began alike, the latest
            going_on = last in known.answers and last < len(messages) and known.tools_number == new.tools_number
            if going_on and known.numbers[:last] == numbers[:last]:
                new.calls.update(known.calls)
                return Branch(why=why, seat=known.name, turns=known.answers.index(last) + 1, messages=last)
        return Branch(why=why)

    def _difference(self, messages: Sequence[Message], numbers: Sequence[int], offered: int) -> str:
        """Why a request continues none of the conversations, by the one that it has most in common with."""
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
    """How many messages both begin with."""
    return next(
        (index for index, (one, other) in enumerate(zip(known, numbers, strict=False)) if one != other),
        min(len(known), len(numbers)),
    )


def _key(message: Message) -> Hashable:
    """What two messages that say the same have in common. Most programs don't repeat what the model thought."""
    calls = tuple(
        (call.id, call.function.name, _sorted(arguments_object(call.function.arguments))) for call in message.tool_calls
    )
    return message.role, message.content, message.tool_call_id, calls


def _sorted(value: Any) -> str:
    """JSON in one of its many spellings: 1.0 is 1, the order of keys is alphabetical."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _renamed(message: Message, calls: dict[str, str]) -> Message:
    """A message with the ids of calls as the model's side knows them."""
    if message.tool_call_id is None and not message.tool_calls:
        return message
    own = [replace(call, id=calls.get(call.id, call.id)) for call in message.tool_calls]
    answers = message.tool_call_id and calls.get(message.tool_call_id, message.tool_call_id)
    return replace(message, tool_calls=own, tool_call_id=answers)
