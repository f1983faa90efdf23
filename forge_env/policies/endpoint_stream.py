"""Server-sent events of a streamed chat completion, put together into what the endpoint would have sent at once."""

from __future__ import annotations

from typing import Any

from forge_env.policies.endpoint_errors import EndpointFailureError, MalformedAnswerError, TruncatedAnswerError
from forge_env.policies.endpoint_http import parse_json

TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


def assemble(content: bytes) -> dict[str, Any]:
    """The completion that the events spell.

    Raises:
        TruncatedAnswerError: the stream ended before the answer did.
        MalformedAnswerError: an event is no JSON, or no piece of a chat completion.
        EndpointFailureError: an event reports an error.
    """
    whole: dict[str, Any] = {}
    message: dict[str, Any] = {}
    choice: dict[str, Any] = {"message": message, "finish_reason": None}
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
        for piece in event.get("choices") or []:
            _add(choice, message, piece)
    if not ended and choice["finish_reason"] is None:
        raise TruncatedAnswerError("the stream ended in the middle of the answer")
    return {**whole, "choices": [choice]}


def _add(choice: dict[str, Any], message: dict[str, Any], piece: Any) -> None:
    try:
        delta = piece.get("delta") or {}
        for key in TEXTS:
            if delta.get(key):
                message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls") or []:
            _add_call(message.setdefault("tool_calls", []), call)
        for key in ("finish_reason", "prompt_token_ids"):
            choice[key] = piece.get(key) or choice.get(key)
        choice.setdefault("token_ids", []).extend(piece.get("token_ids") or [])
        if logprobs := piece.get("logprobs"):
            choice.setdefault("logprobs", {"content": []})["content"].extend(logprobs.get("content") or [])
    except (AttributeError, TypeError, KeyError) as error:
        raise MalformedAnswerError(f"an event has a wrong shape: {str(piece)[:200]}") from error


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    """Pieces of one call share an index; a piece without one continues the last call unless it brings an id."""
    index = piece.get("index")
    if index is None:
        index = len(calls) if piece.get("id") or not calls else len(calls) - 1
    if not isinstance(index, int) or not 0 <= index <= len(calls):
        raise MalformedAnswerError(f"an event continues tool call {index!r} of {len(calls)}")
    if index == len(calls):
        calls.append({"id": None, "function": {"name": "", "arguments": ""}})
    call, function = calls[index], piece.get("function") or {}
    call["id"] = call["id"] or piece.get("id")
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
