"""Chat completions as endpoints of several makers write them, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge_env.endpoint.answers import assemble, read_answer
from forge_env.endpoint.errors import EndpointFailureError
from tests.forge_env.endpoint.server import delta

F = {"name": "f", "arguments": "{}"}
CALL_F = [("x", "f", "{}")]


def whole(finish: str = "stop", usage: Any = None, **message: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": finish, "message": message}], "usage": usage}


def piece(index: Any, call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    call = {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}
    return delta(tool_calls=[{key: value for key, value in call.items() if value is not None}])


def stream(*events: Any, before: bytes = b"") -> bytes:
    return before + b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
TEXT = {"type": "text", "text": "b"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (whole(content=["a", "b"]), ("ab", None, "stop", [])),
        (whole(content=[THINKING, TEXT]), ("b", "hm", "stop", [])),
        (whole(content="a", reasoning={"effort": "low"}), ("a", None, "stop", [])),
        (whole("FinishReason.MAX_TOKENS", content="a"), ("a", None, "length", [])),
        (whole(tool_calls=[{"id": "x", **F}]), ("", None, "stop", CALL_F)),
        (stream(delta("stop", content="a"), before=b"\xef\xbb\xbf"), ("a", None, "stop", [])),
        (stream(delta("stop", content="a"), before=b"data: \n\n"), ("a", None, "stop", [])),
        (stream({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}), ("a", None, "stop", [])),
        (
            stream(delta(content="a"), {"choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}]}),
            ("a", None, "stop", []),
        ),
        (stream(delta(content="a"), {"message": "ping"}, delta("stop")), ("a", None, "stop", [])),
        (whole(content=[TEXT], reasoning_details={"a": 1}), ("b", None, "stop", [])),
        (
            stream(delta(content=[THINKING], reasoning_content=None), delta("stop", content="b")),
            ("b", "hm", "stop", []),
        ),
        (whole("length.", content="a"), ("a", None, "length", [])),
        (stream(delta(content=[THINKING]), delta("stop", content=[TEXT])), ("b", "hm", "stop", [])),
        (stream(piece(1, "x", "f", "{}")), ("", None, "stop", CALL_F)),
        (stream(piece("0", "x", "f", {})), ("", None, "stop", CALL_F)),
        (stream(piece(0, "x", "f", "{"), piece(0, "x", "f", "}")), ("", None, "stop", CALL_F)),
        (
            stream(piece(0, "x", "f", "{}"), piece(0, "y", "g", "{"), piece(0, None, None, "}")),
            ("", None, "stop", [*CALL_F, ("y", "g", "{}")]),
        ),
    ],
)
def test_answers_of_several_makers(answer: dict[str, Any] | bytes, expected: tuple[Any, ...]) -> None:
    reply, _ = read_answer(assemble(answer) if isinstance(answer, bytes) else answer)
    calls = [(call.id, call.function.name, call.function.arguments) for call in reply.message.tool_calls]
    assert (reply.message.content, reply.message.reasoning_content, reply.stop_reason, calls) == expected


@pytest.mark.parametrize(
    ("words", "stop_reason"),
    [
        ("length MAX_TOKENS model_length REASON_MAX_LEN FINISH_REASON_MAX_TOKENS token_limit ERROR_LIMIT", "length"),
        (
            "truncated not_finished max-output-tokens model_context_window_exceeded time_limit maximum_tokens",
            "length",
        ),
        ("content_filter SPII IMAGE_SAFETY guardrail_intervened ERROR_TOXIC policy_violation", "content_filter"),
        ("eos end_turn COMPLETE tool_use function_call normal stop_sequence FINISH_REASON_STOP <|im_end|>", "stop"),
    ],
)
def test_finish_reasons_of_several_makers(words: str, stop_reason: str) -> None:
    reasons = {word: read_answer(whole(word, content="a"))[0].stop_reason for word in words.split()}
    assert reasons == dict.fromkeys(reasons, stop_reason)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 7.0, "completion_tokens": 3.0},
        {"input_tokens": 7, "output_tokens": 3},
        {"prompt_tokens": None, "input_tokens": 7, "completion_tokens": 3},
    ],
)
def test_usage_of_several_makers(usage: dict[str, Any]) -> None:
    reply, _ = read_answer(whole(content="a", usage=usage))
    assert reply.metadata["usage"] == {"prompt": 7, "completion": 3}


@pytest.mark.parametrize(
    "answer",
    [
        {"object": "error", "message": "boom", "code": 500},
        whole("cancelled", content="bo"),
        whole("FINISH_REASON_ERROR"),
        whole("engine_failed"),
        stream(delta(content="a"), {"message": "boom", "code": 500}),
    ],
)
def test_reports_of_failures(answer: dict[str, Any] | bytes) -> None:
    with pytest.raises(
        EndpointFailureError, match=r"the endpoint reports: (boom|cancelled|FINISH_REASON_ERROR|engine_failed)"
    ):
        read_answer(assemble(answer) if isinstance(answer, bytes) else answer)
