"""Parse chat completions, streamed or whole, into a `Reply` with its token usage."""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass, field
from typing import Any

from forge_env.endpoint.errors import (
    ContentFilterError,
    EndpointFailureError,
    MalformedAnswerError,
    TruncatedAnswerError,
    beginning,
)
from forge_env.endpoint.history import REASONING
from forge_env.endpoint.http import parse_json
from forge_env.policy import Reply, estimated_tokens, words_of
from forge_env.tools.turns import call_of
from forge_env.types import Message, ToolCall, clean_unicode

# ---
# Tokens of one request, as reported by the endpoint or estimated, so that limits and budgets always apply.
#
# The estimate is one token per four bytes of UTF-8 of the messages and tools sent and of the reply: about right for
# English and code, within a factor of two for other scripts. It is marked as an estimate wherever it is shown.

MOST_TOKENS = 10**9
"""Largest credible number of tokens of a request; larger figures are ignored."""


def told(value: Any) -> dict[str, int]:
    """Return the plausible token counts in an answer's `usage`: `prompt`, `cached` (part of the prompt), `completion`.

    Some endpoints use the names of OpenAI's Responses API, or give numbers as floats.
    """
    if not isinstance(value, dict):
        return {}
    details = value.get("prompt_tokens_details")
    prompt, completion = value.get("prompt_tokens"), value.get("completion_tokens")
    raw = {
        "prompt": value.get("input_tokens") if prompt is None else prompt,
        "completion": value.get("output_tokens") if completion is None else completion,
        "cached": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    numbers = {name: number for name, number in raw.items() if type(number) is int or type(number) is float}
    usage = {name: int(number) for name, number in numbers.items() if 0 <= number <= MOST_TOKENS}
    if "cached" in usage:
        usage["cached"] = min(usage["cached"], usage.get("prompt", 0))
    return usage


def fill_in(reply: Reply, body: dict[str, Any]) -> None:
    """Complete `reply.metadata["usage"]`; `estimated` is set to 1 if a figure is an estimate."""
    usage: dict[str, int] = reply.metadata["usage"]
    written = len(reply.token_ids) or estimated_tokens(words_of(reply.message))
    if usage.get("prompt") and (usage.get("completion") or ("completion" in usage and not written)):
        return
    sent = json.dumps([body.get("messages"), body.get("tools")], ensure_ascii=False, separators=(",", ":"))
    usage["prompt"] = usage.get("prompt") or reply.prompt_length or estimated_tokens(sent)
    usage["completion"] = usage.get("completion") or written
    if not reply.token_ids:
        usage["estimated"] = 1


# ---
# Parse a chat completion from JSON into a `Reply`.
#
# Mistakes of the *endpoint* (no choices, malformed tool calls) raise `MalformedAnswerError`; mistakes of the *model*
# (arguments that are not JSON, an unknown tool) stay in the message, for the environment to answer. Lone surrogates,
# which JSON allows and UTF-8 does not, are replaced in texts.

FAILED = re.compile(r"error(?!_limit)|fail|abort|cancel|preempt|timeout|overload|interrupt|rate_limit|system_resource")
FILTERED = re.compile(
    r"filter|safety|recitation|prohibited|block|refus|sensitive|toxic|spii|guardrail|moderation|flagged|policy"
)
CUT = re.compile(r"length|limit|truncat|incomplete|not_finished|context|(?:^|_)max(?:imum)?_|out_of_tokens")
"""Words in the finish reasons of failed, withheld and truncated replies at OpenAI, Mistral, Anthropic, Google, Amazon,
xAI, Cohere, TGI and others."""


def _words(finish: str) -> str:
    """A finish reason in lower case with underscores: "max_tokens" for "FinishReason.MaxTokens" and "max-tokens"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[\s-]+", "_", finish.rstrip(".").rpartition(".")[2]).lower()


def read_answer(data: Any) -> tuple[Reply, dict[str, Any]]:
    """Return the reply of a chat completion, as parsed by the endpoint, and the endpoint's fields with its thoughts.

    Raises:
        EndpointFailureError: it is an error report sent with a success status.
        ContentFilterError: a filter removed the whole answer.
        MalformedAnswerError: it isn't a chat completion.
    """
    data = _mapping(data, "the answer")
    _check_report(data)
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        raise MalformedAnswerError(f"the answer has no choices: {beginning(data, 200)}")
    choice = _mapping(choices[0], "choice 0")
    finish = choice.get("finish_reason")
    word = _words(finish) if isinstance(finish, str) else ""
    is_filtered = FILTERED.search(word) is not None
    if choice.get("error") or (FAILED.search(word) and not is_filtered):
        raise EndpointFailureError(f"the endpoint reports: {beginning(choice.get('error') or finish, 500)}")
    raw = _mapping(choice.get("message"), "the message")
    message = Message(
        role="assistant",
        content=_text(raw.get("content"), "content") or _text(raw.get("refusal"), "refusal"),
        tool_calls=_tool_calls(raw),
        reasoning_content=_reasoning(raw) or None,
    )
    if not raw or (finish is None and message == Message(role="assistant")):
        raise MalformedAnswerError(f"the answer has neither content nor a finish reason: {beginning(data, 200)}")
    stop_reason = "content_filter" if is_filtered else "length" if CUT.search(word) else "stop"
    if stop_reason == "content_filter" and not message.content and not message.tool_calls:
        raise ContentFilterError("the endpoint's content filter withheld the whole answer")
    reply = Reply(message=message, stop_reason=stop_reason)
    _read_tokens(reply, data, choice)
    reply.metadata["usage"] = told(data.get("usage"))
    return reply, {name: raw[name] for name in REASONING if raw.get(name)}


def _check_report(data: dict[str, Any], *, begun: bool = False) -> None:
    """Raise `EndpointFailureError` if an answer, or an event of a stream that may have begun, reports an error."""
    report = data.get("error")
    is_note = begun and not data.get("code") and not data.get("status") and data.get("object") != "error"
    if "choices" not in data and not is_note:
        report = report or data.get("message") or data.get("detail")
    if report:
        raise EndpointFailureError(f"the endpoint reports: {beginning(report, 500)}")


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedAnswerError(f"{what} is {beginning(value, 100)!r} where an object is expected")
    return value


def _text(value: Any, what: str) -> str:
    """Check that a value is text and return it. Lists of texts or content parts are joined; null becomes ""."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "".join(_text(part.get("text") if isinstance(part, dict) else part, what) for part in value)
    if not isinstance(value, str):
        raise MalformedAnswerError(f"{what} is {beginning(value, 100)!r} where text is expected")
    return clean_unicode(value)


def _reasoning(raw: dict[str, Any]) -> str:
    for text in (raw.get("reasoning_content"), raw.get("reasoning")):
        if text and isinstance(text, str | list):
            return _text(text, "reasoning")
    details = _list(raw.get("reasoning_details"))
    kinds = ("text", "summary") if details else ("thinking",)  # a part of Mistral's content
    parts = [part for part in details or _list(raw.get("content")) if isinstance(part, dict)]
    return "".join(_text(next(filter(None, map(part.get, kinds)), None), "reasoning") for part in parts)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _tool_calls(raw: dict[str, Any]) -> list[ToolCall]:
    given = raw.get("tool_calls") or []
    if not given and raw.get("function_call"):  # the older form of a call
        given = [{"function": raw["function_call"]}]
    if not isinstance(given, list):
        raise MalformedAnswerError(f"tool_calls is {beginning(given, 100)!r} where a list is expected")
    calls: list[ToolCall] = []
    seen: set[str] = set()
    for index, item in enumerate(given):
        call = _mapping(item, f"tool call {index}")
        function = _mapping(call.get("function", call), f"the function of tool call {index}")
        if function.get("name") is None:
            raise MalformedAnswerError(f"tool call {index} has no name")
        given_id = call.get("id")  # a number at some endpoints
        text = str(given_id) if type(given_id) is int else _text(given_id, "the id of a tool call")
        call_id = text or f"call_{index}"
        while call_id in seen:  # answers are matched by id
            call_id += f"_{index}"
        seen.add(call_id)
        calls.append(call_of(function["name"], function.get("arguments"), call_id))
    return calls


def _read_tokens(reply: Reply, data: dict[str, Any], choice: dict[str, Any]) -> None:
    """Store the exact tokens in `reply`, if the endpoint returns them (vLLM's `return_token_ids` and `logprobs`)."""
    prompt = choice.get("prompt_token_ids") or data.get("prompt_token_ids")
    sampled, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if not (prompt and sampled and logprobs):
        return
    import numpy as np

    try:
        prompt_ids, token_ids = np.array(prompt, np.int32), np.array(sampled, np.int32)
        values = np.array([item["logprob"] for item in logprobs["content"]], np.float32)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise MalformedAnswerError(f"token ids or log-probs have a wrong shape: {error!r}") from error
    shaped = prompt_ids.ndim == token_ids.ndim == values.ndim == 1
    if not shaped or not np.isfinite(values).all() or min(prompt_ids.min(), token_ids.min()) < 0:
        raise MalformedAnswerError("token ids or log-probs have invalid values")
    if len(values) == len(token_ids):  # otherwise none are stored: training needs exact tokens
        reply.prompt_ids, reply.token_ids = prompt_ids, token_ids
        reply.logprobs, reply.versions = values, np.full(len(token_ids), -1, np.int32)


# ---
# Assemble the server-sent events of a streamed chat completion into the equivalent whole answer.

TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
Pieces = dict[str, list[str]]
"""Pieces of texts by field; they are joined once at the end, which takes linear time."""


def assemble(content: bytes) -> dict[str, Any]:
    """Assemble the events of a stream into one chat completion.

    Raises:
        TruncatedAnswerError: the stream ended before the answer did.
        MalformedAnswerError: an event is not JSON, or not a piece of a chat completion.
        EndpointFailureError: an event reports an error.
    """
    whole: dict[str, Any] = {}
    texts: Pieces = {}
    calls: list[_Call] = []
    details: list[dict[str, Any]] = []
    choice: dict[str, Any] = {"finish_reason": None}
    ended = False
    for line in content.removeprefix(codecs.BOM_UTF8).splitlines():
        if not line.startswith(b"data:"):
            continue  # event names, comments, keep-alives
        payload = line[5:].strip()
        if payload == b"[DONE]":
            ended = True
            break
        if not payload:
            continue
        event = parse_json(payload)
        if not isinstance(event, dict):
            raise MalformedAnswerError(f"an event is {beginning(event, 100)!r} where an object is expected")
        _check_report(event, begun=bool(texts or calls))
        for key in ("usage", "prompt_token_ids"):
            whole[key] = event.get(key) or whole.get(key)
        pieces = event.get("choices") or []
        if not isinstance(pieces, list):
            raise MalformedAnswerError(
                f"the choices of an event are {beginning(pieces, 100)!r} where a list is expected"
            )
        for piece in pieces:
            if not isinstance(piece, dict) or not piece.get("index"):  # one choice is requested; others are ignored
                _add(choice, texts, calls, details, piece)
    if choice["finish_reason"] is None and not choice.get("error") and not (ended and (texts or calls)):
        where = "before" if not texts and not calls else "in the middle of"
        raise TruncatedAnswerError(f"the stream ended {where} the answer")
    message: dict[str, Any] = {"role": "assistant", **{key: _joined(pieces) for key, pieces in texts.items()}}
    if calls:
        message["tool_calls"] = [call.whole() for call in calls]
    if details:
        message["reasoning_details"] = details
    return {**whole, "choices": [{**choice, "message": message}]}


def _joined(pieces: list[str]) -> str:
    try:
        return "".join(pieces)
    except TypeError as error:
        raise MalformedAnswerError(f"a piece of an event is not text: {beginning(pieces, 200)}") from error


@dataclass(slots=True)
class _Call:
    """Pieces of one tool call."""

    index: Any
    id: str | int | None = None
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        return {"id": self.id, "function": {"name": self.name, "arguments": _joined(self.arguments)}}


def _add(choice: dict[str, Any], texts: Pieces, calls: list[_Call], details: list[dict[str, Any]], piece: Any) -> None:
    try:
        delta = piece.get("delta") or {}
        if not delta and not texts and not calls:  # a whole message may also repeat what was streamed before it
            delta = piece.get("message") or {}
        if isinstance(parts := delta.get("content"), list):
            delta = {**delta, "reasoning_content": _reasoning(delta), "content": _text(parts, "content")}
        for key in TEXTS:
            if delta.get(key):
                texts.setdefault(key, []).append(delta[key])
        for call in delta.get("tool_calls") or []:
            _add_call(calls, call)
        if function := delta.get("function_call"):
            _add_call(calls, {"index": 0, "function": function})
        for part in delta.get("reasoning_details") or []:
            _add_detail(details, part)
        for key in ("finish_reason", "prompt_token_ids", "error"):
            choice[key] = piece.get(key) or choice.get(key)
        choice.setdefault("token_ids", []).extend(piece.get("token_ids") or [])
        if logprobs := piece.get("logprobs"):
            choice.setdefault("logprobs", {"content": []})["content"].extend(logprobs.get("content") or [])
    except (AttributeError, TypeError, KeyError) as error:
        raise MalformedAnswerError(f"an event has a wrong shape: {beginning(piece, 200)}") from error


def _add_detail(details: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a piece of OpenRouter's `reasoning_details`; successive pieces with the same index and type form one part."""
    last = details[-1] if details else {}
    if not last or any(last.get(name) != part.get(name) for name in ("index", "type")):
        details.append(dict(part))
        return
    for name, value in part.items():
        if name in ("text", "summary", "data") and last.get(name) and value:
            last[name] += value
        elif value is not None:
            last[name] = value


def _add_call(calls: list[_Call], piece: dict[str, Any]) -> None:
    """Add a fragment of a streamed tool call.

    Fragments of a call share an index. A fragment with neither index nor id continues the last call. Some endpoints
    give all calls the same index, so a fragment with a name and a new id begins a call. Others repeat the name in every
    fragment.
    """
    index, call_id, function = piece.get("index"), piece.get("id"), piece.get("function") or {}
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    same = [call for call in calls if index is None or call.index == index][-1:]
    is_new = call_id not in (None, "") and any(call.id not in (None, "", call_id) for call in same)
    if not same or (is_new and (name or index is None)):
        if not name and call_id in (None, "") and index is not None:
            raise MalformedAnswerError(f"an event continues tool call {index!r}, which has not begun")
        same = [_Call(index)]
        calls += same
    (call,) = same
    call.id = call_id if call.id is None else call.id
    call.name += name if name != call.name else ""
    call.arguments.append(arguments if isinstance(arguments, str) else json.dumps(arguments))
