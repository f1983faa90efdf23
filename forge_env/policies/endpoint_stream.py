"""Server-sent events of a streamed chat completion, put together into what the endpoint would have sent at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forge_env.policies.endpoint_errors import EndpointFailureError, MalformedAnswerError, TruncatedAnswerError
from forge_env.policies.endpoint_http import parse_json

TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
Pieces = dict[str, list[str]]
"""Texts as they come in; joining them at the end takes linear time however many there are."""


def assemble(content: bytes) -> dict[str, Any]:
    """The completion that the events spell.

    Raises:
        TruncatedAnswerError: the stream ended before the answer did.
        MalformedAnswerError: an event is no JSON, or no piece of a chat completion.
        EndpointFailureError: an event reports an error.
    """
    whole: dict[str, Any] = {}
    texts: Pieces = {}
    calls: list[_Call] = []
    choice: dict[str, Any] = {"finish_reason": None}
    ended = False
    for line in content.splitlines():
        if not line.startswith(b"data:"):
            continue  # event names, comments, keep-alives
        payload = line[5:].strip()
        if payload == b"[DONE]":
            ended = True
            break
        event = parse_json(payload)
        if not isinstance(event, dict):
            raise MalformedAnswerError(f"an event is {str(event)[:100]!r} where an object is expected")
        if event.get("error"):
            raise EndpointFailureError(f"the endpoint reports: {str(event['error'])[:500]}")
        for key in ("usage", "prompt_token_ids"):
            whole[key] = event.get(key) or whole.get(key)
        pieces = event.get("choices") or []
        if not isinstance(pieces, list):
            raise MalformedAnswerError(f"the choices of an event are {str(pieces)[:100]!r} where a list is expected")
        for piece in pieces:
            if not isinstance(piece, dict) or not piece.get("index"):  # one choice is asked for, and answers count
                _add(choice, texts, calls, piece)
    if choice["finish_reason"] is None and not choice.get("error") and not (ended and (texts or calls)):
        where = "before" if not texts and not calls else "in the middle of"
        raise TruncatedAnswerError(f"the stream ended {where} the answer")
    message: dict[str, Any] = {"role": "assistant", **{key: _joined(pieces) for key, pieces in texts.items()}}
    if calls:
        message["tool_calls"] = [call.whole() for call in calls]
    return {**whole, "choices": [{**choice, "message": message}]}


def _joined(pieces: list[str]) -> str:
    try:
        return "".join(pieces)
    except TypeError as error:
        raise MalformedAnswerError(f"a piece of an event is no text: {str(pieces)[:200]}") from error


@dataclass(slots=True)
class _Call:
    """One tool call in pieces."""

    id: str | None = None
    name: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        return {"id": self.id, "function": {"name": _joined(self.name), "arguments": _joined(self.arguments)}}


def _add(choice: dict[str, Any], texts: Pieces, calls: list[_Call], piece: Any) -> None:
    try:
        delta = piece.get("delta") or {}
        for key in TEXTS:
            if delta.get(key):
                texts.setdefault(key, []).append(delta[key])
        for call in delta.get("tool_calls") or []:
            _add_call(calls, call)
        for key in ("finish_reason", "prompt_token_ids", "error"):
            choice[key] = piece.get(key) or choice.get(key)
        choice.setdefault("token_ids", []).extend(piece.get("token_ids") or [])
        if logprobs := piece.get("logprobs"):
            choice.setdefault("logprobs", {"content": []})["content"].extend(logprobs.get("content") or [])
    except (AttributeError, TypeError, KeyError) as error:
        raise MalformedAnswerError(f"an event has a wrong shape: {str(piece)[:200]}") from error


def _add_call(calls: list[_Call], piece: dict[str, Any]) -> None:
    """Pieces of one call share an index; a piece without one continues the last call unless it brings an id."""
    index = piece.get("index")
    if index is None:
        index = len(calls) if piece.get("id") or not calls else len(calls) - 1
    if not isinstance(index, int) or not 0 <= index <= len(calls):
        raise MalformedAnswerError(f"an event continues tool call {index!r} of {len(calls)}")
    if index == len(calls):
        calls.append(_Call())
    call, function = calls[index], piece.get("function") or {}
    call.id = call.id or piece.get("id")
    call.name.append(function.get("name") or "")
    call.arguments.append(function.get("arguments") or "")
