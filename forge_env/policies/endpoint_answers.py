"""A chat completion as JSON, read into a `Reply`.

What the *endpoint* does wrong (no choices, tool calls of a wrong shape) is a `MalformedAnswerError`; what the
*model* wrote wrong (arguments that are no JSON, a tool that isn't there) stays in the message, for the environment
to answer. Texts are freed of lone surrogates, which JSON allows and UTF-8 does not.
"""

from __future__ import annotations

import json
import math
from typing import Any

from forge_env.policies.endpoint_errors import ContentFilterError, EndpointFailureError, MalformedAnswerError
from forge_env.policies.endpoint_usage import told
from forge_env.policy import Reply
from forge_env.tools import clean_unicode
from forge_env.types import FunctionCall, Message, ToolCall

FAILED = ("error", "abort", "network_error", "insufficient_system_resource")
"""Reasons to finish that are the endpoint's trouble, not the model's choice."""


def read_answer(data: Any) -> Reply:
    """The reply in a chat completion.

    Raises:
        EndpointFailureError: it is an error report sent with a status of success.
        ContentFilterError: a filter left nothing of it.
        MalformedAnswerError: it isn't shaped as a chat completion.
    """
    data = _mapping(data, "the answer")
    if data.get("error"):
        raise EndpointFailureError(f"the endpoint reports: {str(data['error'])[:500]}")
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        raise MalformedAnswerError(f"the answer has no choices: {str(data)[:200]}")
    choice = _mapping(choices[0], "choice 0")
    finish = choice.get("finish_reason")
    if choice.get("error") or finish in FAILED:
        raise EndpointFailureError(f"the endpoint reports: {str(choice.get('error') or finish)[:500]}")
    raw = _mapping(choice.get("message"), "the message")
    message = Message(
        role="assistant",
        content=_text(raw.get("content"), "content") or _text(raw.get("refusal"), "refusal"),
        tool_calls=_tool_calls(raw),
        reasoning_content=_text(raw.get("reasoning_content") or raw.get("reasoning"), "reasoning") or None,
    )
    if not raw or (finish is None and message == Message(role="assistant")):
        raise MalformedAnswerError(f"the answer says nothing, nor why it ends: {str(data)[:200]}")
    if finish == "content_filter" and not message.content and not message.tool_calls:
        raise ContentFilterError("the endpoint's content filter withheld the whole answer")
    reply = Reply(message=message, stop_reason=finish if finish in ("length", "content_filter") else "stop")
    _read_tokens(reply, data, choice)
    reply.metadata["usage"] = told(data.get("usage"))
    return reply


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedAnswerError(f"{what} is {str(value)[:100]!r} where an object is expected")
    return value


def _text(value: Any, what: str) -> str:
    """Text, also from a list of content parts; "" for null."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "".join(_text(part.get("text"), what) for part in value if isinstance(part, dict))
    if not isinstance(value, str):
        raise MalformedAnswerError(f"{what} is {str(value)[:100]!r} where text is expected")
    return clean_unicode(value)


def _tool_calls(raw: dict[str, Any]) -> list[ToolCall]:
    given = raw.get("tool_calls") or []
    if not isinstance(given, list):
        raise MalformedAnswerError(f"tool_calls is {str(given)[:100]!r} where a list is expected")
    calls: list[ToolCall] = []
    seen: set[str] = set()
    for index, item in enumerate(given):
        call = _mapping(item, f"tool call {index}")
        function = _mapping(call.get("function"), f"the function of tool call {index}")
        name = function.get("name")
        if not isinstance(name, str):
            raise MalformedAnswerError(f"the name of tool call {index} is {str(name)[:100]!r} where text is expected")
        call_id = _text(call.get("id"), "the id of a tool call") or f"call_{index}"
        while call_id in seen:  # answers are matched by id
            call_id += f"_{index}"
        seen.add(call_id)
        arguments = _arguments(function.get("arguments"))
        calls.append(ToolCall(id=call_id, function=FunctionCall(name=clean_unicode(name), arguments=arguments)))
    return calls


def _arguments(value: Any) -> str:
    """JSON text as the model wrote it; some servers send the parsed object instead."""
    if value is None:
        return "{}"
    return clean_unicode(value) if isinstance(value, str) else json.dumps(value)


def _read_tokens(reply: Reply, data: dict[str, Any], choice: dict[str, Any]) -> None:
    """Exact tokens, where the endpoint gives them (vLLM's `return_token_ids` and `logprobs`)."""
    prompt = choice.get("prompt_token_ids") or data.get("prompt_token_ids")
    sampled, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if not (prompt and sampled and logprobs):
        return
    try:
        ids = [int(token) for token in prompt], [int(token) for token in sampled]
        values = [float(item["logprob"]) for item in logprobs["content"]]
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise MalformedAnswerError(f"token ids or log-probs have a wrong shape: {error!r}") from error
    if not all(map(math.isfinite, values)) or not all(0 <= token < 2**31 for tokens in ids for token in tokens):
        raise MalformedAnswerError("token ids or log-probs are no numbers that a model could give")
    if len(values) == len(sampled):  # all or nothing: what trains must be exact
        reply.prompt_ids, reply.token_ids = ids
        reply.logprobs, reply.versions = values, [-1] * len(sampled)
