"""Programs repeat the model's answers as verifiers has recorded for its harnesses, over each API.

Reference: `replay_view` of the harnesses of verifiers 0.4.1.dev86.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.gateway.chat import chat_completion, read_chat
from forge_env.gateway.conversations import Conversations
from forge_env.gateway.messages import message_response, read_messages
from forge_env.gateway.request import Answer, ModelRequest
from forge_env.gateway.responses import read_responses, response
from forge_env.types import Message, call_tool

Turn = dict[str, Any] | list[dict[str, Any]]
"""An answer in the program's history: a message, or the items of the responses API."""
TOOL = {"type": "object", "properties": {"path": {"type": "string"}}}
TEXTS = ["", "\n\n", " ", "I look.", "\n\nI look.\n", "  def f():\n\n    pass\n"]


class Chat:
    """A program that uses chat completions."""

    def __init__(self) -> None:
        self.history: list[Any] = [{"role": "user", "content": "Go."}]

    def asked(self) -> ModelRequest:
        function = {"name": "look", "description": "Look.", "parameters": TOOL}
        return read_chat({"messages": self.history, "tools": [{"type": "function", "function": function}]})

    def heard(self, request: ModelRequest, answer: Message, rewrite: Callable[[Any], Any]) -> None:
        message = chat_completion(request, [Answer.of(answer)])["choices"][0]["message"]
        self.history.append(rewrite(copy.deepcopy(message)))
        calls = message.get("tool_calls") or []
        self.history += [{"role": "tool", "tool_call_id": call["id"], "content": "a\n"} for call in calls]
        if not calls:
            self.history.append({"role": "user", "content": "And?"})


class Messages(Chat):
    """A program that uses Anthropic's messages."""

    def asked(self) -> ModelRequest:
        return read_messages({"messages": self.history, "tools": [{"name": "look", "input_schema": TOOL}]})

    def heard(self, request: ModelRequest, answer: Message, rewrite: Callable[[Any], Any]) -> None:
        blocks = message_response(request, [Answer.of(answer)])["content"]
        self.history.append(rewrite({"role": "assistant", "content": copy.deepcopy(blocks)}))
        uses = [block for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "a\n"} for use in uses]
        self.history.append({"role": "user", "content": results or "And?"})


class Responses(Chat):
    """A program that uses responses."""

    def asked(self) -> ModelRequest:
        tool = {"type": "function", "name": "look", "parameters": TOOL}
        return read_responses({"input": self.history, "tools": [tool]}, {})

    def heard(self, request: ModelRequest, answer: Message, rewrite: Callable[[Any], Any]) -> None:
        items = response("resp_1", request, [Answer.of(answer)], {})["output"]
        self.history += rewrite(copy.deepcopy(items)) or items  # a turn that says nothing stays
        calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        self.history += [{"type": "function_call_output", "call_id": name, "output": "a\n"} for name in calls]
        if not calls:
            self.history.append({"role": "user", "content": "And?"})


def each_text(change: Callable[[str], str | None]) -> Callable[[Turn], Turn]:
    """Change the texts of a turn; a text that becomes None is left out."""

    def rewrite(turn: Turn) -> Turn:
        if isinstance(turn, list):
            items = [
                item for item in turn if item["type"] != "message" or change(item["content"][0]["text"]) is not None
            ]
            for item in items:
                if item["type"] == "message":
                    item["content"][0]["text"] = change(item["content"][0]["text"])
            return items
        if isinstance(blocks := turn["content"], list):
            kept = [block for block in blocks if block["type"] != "text" or change(block["text"]) is not None]
            for block in kept:
                if block["type"] == "text":
                    block["text"] = change(block["text"])
            return {**turn, "content": kept or ""}
        return {**turn, "content": change(turn["content"] or "")}

    return rewrite


def pad_thoughts(turn: Turn) -> Turn:
    """Give a turn without thoughts a blank one."""
    if isinstance(turn, list):
        blank = {"type": "reasoning", "summary": [{"type": "summary_text", "text": " "}]}
        return turn if any(item["type"] == "reasoning" for item in turn) else [blank, *turn]
    if isinstance(blocks := turn["content"], list) and not any(block["type"] == "thinking" for block in blocks):
        return {**turn, "content": [{"type": "thinking", "thinking": " ", "signature": ""}, *blocks]}
    return turn if isinstance(turn["content"], list) else {"reasoning_content": " ", **turn}


def leave_out_thoughts(turn: Turn) -> Turn:
    if isinstance(turn, list):
        return [item for item in turn if item["type"] != "reasoning"]
    if isinstance(blocks := turn["content"], list):
        return {**turn, "content": [block for block in blocks if block["type"] != "thinking"] or ""}
    return {name: value for name, value in turn.items() if name != "reasoning_content"}


def same(turn: Turn) -> Turn:
    return turn


def drop_blank(text: str) -> str | None:
    """The text, unless it has no words."""
    return text if text.strip() else None


REWRITES: dict[str, list[Callable[[Turn], Turn]]] = {
    "as it was": [same],
    "drop_blank_text: Claude Code, Kimi, OpenCode, Pi, Prime": [each_text(drop_blank)],
    "strip_text: Hermes": [each_text(lambda text: text.strip() or None), pad_thoughts],
    "thoughts left out": [leave_out_thoughts],
    "ends of lines": [each_text(lambda text: "\r\n".join(line.rstrip() for line in text.split("\n")))],
    "all": [leave_out_thoughts, pad_thoughts, each_text(lambda text: text.strip() or None)],
}


@pytest.mark.parametrize("program", [Chat, Messages, Responses])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(TEXTS), st.sampled_from([None, "Hm.\n"]), st.booleans(), st.sampled_from(sorted(REWRITES))
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_replayed_conversation_stays_one(program: type[Chat], turns: list[tuple[str, str | None, bool, str]]) -> None:
    known, client = Conversations(), program()
    for number, (text, thoughts, calls, name) in enumerate(turns):
        request = client.asked()
        conversation, _, branch = known.place(request.messages, request.tools)
        assert (conversation.name, branch) == ("c1", None)
        said = call_tool("look", path=f"/{number}") if calls else Message(role="assistant")
        shown = known.answered(
            conversation,
            Message(role="assistant", content=text, reasoning_content=thoughts, tool_calls=said.tool_calls),
        )

        def rewrite(turn: Turn, name: str = name) -> Turn:
            for change in REWRITES[name]:
                turn = change(turn)
            return turn

        client.heard(request, shown, rewrite)
    request = client.asked()
    assert known.place(request.messages, request.tools)[0].name == "c1"
    assert len(known) == 1
