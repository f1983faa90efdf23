"""Google's API, as Gemini CLI and Google's clients call it, against the gateway."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from forge_env.gateway.gemini import read_gemini
from forge_env.gateway.server import Access, Gateway
from forge_env.types import Message, call_tool
from tests.forge_env.gateway.conftest import Model

pytestmark = pytest.mark.usefixtures("one_tls_context")
PATH = "v1beta/models/gemini-3-pro"
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
GOOGLES = {"type": "OBJECT", "properties": {"place": {"type": "STRING"}}, "required": ["place"]}
USER = {"role": "user", "parts": [{"text": "Rain?"}]}
CALL = call_tool("weather", place="Zürich").tool_calls


async def post(access: Access, call: str, body: Any, **head: str) -> httpx2.Response:
    async with httpx2.AsyncClient(headers=head or {"x-goog-api-key": access.key}) as client:
        return await client.post(f"{access.url}/{call}", json=body)


@pytest.mark.parametrize("how", ["generateContent", "streamGenerateContent", "streamGenerateContent?alt=sse"])
async def test_a_conversation_with_a_function(gateway: Gateway, how: str) -> None:
    said = Message(role="assistant", content="I look.", tool_calls=CALL, reasoning_content="Hm.")
    model = Model(said, "Rain.")
    functions = [{"functionDeclarations": [{"name": "weather", "description": "Now.", "parameters": GOOGLES}]}]
    system = {"parts": [{"text": "Be brief."}]}

    async def ask(*contents: Any) -> Any:
        body = {"contents": contents, "systemInstruction": system, "tools": functions}
        answer = await post(access, f"{PATH}:{how}", body)
        assert answer.status_code == 200, answer.text
        if how.endswith("sse"):
            return json.loads(answer.text.removeprefix("data: "))
        return answer.json()[0] if how.startswith("stream") else answer.json()

    with gateway.open(model) as access:
        first = await ask(USER)
        content = first["candidates"][0]["content"]
        call = {"id": "call-0", "name": "weather", "args": {"place": "Zürich"}}
        assert content["parts"] == [{"text": "Hm.", "thought": True}, {"text": "I look."}, {"functionCall": call}]
        assert (content["role"], first["candidates"][0]["finishReason"]) == ("model", "STOP")
        assert first["modelVersion"] == "gemini-3-pro"
        usage = first["usageMetadata"]
        assert usage["totalTokenCount"] == usage["promptTokenCount"] + usage["candidatesTokenCount"] > 0
        result = {"functionResponse": {"id": "call-0", "name": "weather", "response": {"output": "rain"}}}
        second = await ask(USER, content, {"role": "user", "parts": [result, {"text": "So?"}]})
        assert second["candidates"][0]["content"]["parts"] == [{"text": "Rain."}]
    assert [tool.parameters for tool in model.asked[0].tools] == [PLACE]
    assert model.asked[1].messages == [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Rain?"),
        said,
        Message(role="tool", content="rain", tool_call_id="call-0"),
        Message(role="user", content="So?"),
    ]


async def test_results_without_ids_answer_calls_in_order(gateway: Gateway) -> None:
    model = Model("ok")
    calls = [{"functionCall": {"name": "f", "args": {"x": n}}} for n in (1, 2)]
    results: Any = [{"functionResponse": {"name": "f", "response": {"x": n}}} for n in (1, 2)]
    contents = [USER, {"role": "model", "parts": calls}, {"role": "function", "parts": results}]
    with gateway.open(model) as access:
        assert (await post(access, f"{PATH}:generateContent", {"contents": contents})).status_code == 200
    _, said, *answers = model.asked[0].messages
    assert [(call.id, call.function.arguments) for call in said.tool_calls] == [
        (answer.tool_call_id, answer.content.replace(":", ": ")) for answer in answers
    ]
    assert len({call.id for call in said.tool_calls}) == 2


async def test_results_without_ids_answer_calls_with_ids(gateway: Gateway) -> None:
    """A result with an id answers its call; one without answers the oldest of the others."""
    model = Model("ok")
    calls = [{"functionCall": {"id": name, "name": "f"}} for name in "abc"]
    result = {"name": "f", "response": {}}
    results: Any = [{"functionResponse": part} for part in ({**result, "id": "a"}, result, result)]
    contents = [USER, {"role": "model", "parts": calls}, {"role": "user", "parts": results}]
    with gateway.open(model) as access:
        assert (await post(access, f"{PATH}:generateContent", {"contents": contents})).status_code == 200
    assert [message.tool_call_id for message in model.asked[0].messages[2:]] == ["a", "b", "c"]


def test_nulls_are_unset_and_one_part_may_stand_alone() -> None:
    body = {
        "contents": [{"role": None, "parts": {"text": "Rain?"}}],
        "toolConfig": {"functionCallingConfig": None},
        "generationConfig": {"stopSequences": None, "maxOutputTokens": None},
        "tools": [{"functionDeclarations": None, "googleSearch": None, "computerUse": None}],
    }
    for unset in ({}, {"toolConfig": None, "generationConfig": None, "tools": None}):
        request = read_gemini(body | unset)
        assert request.messages == [Message(role="user", content="Rain?")]
        assert (request.tools, request.stop, request.left_out) == ([], [], [])


def test_programs_cannot_choose_names_of_metrics() -> None:
    tools: Any = [{"googleSearchRetrieval": {}, "enterpriseWebSearch": {}, "aNew": {}, "another": {}}]
    request = read_gemini({"contents": [USER], "tools": tools})
    assert request.left_out == ["google_search_retrieval", "enterprise_web_search", "other", "other"]


async def test_what_a_request_sets(gateway: Gateway) -> None:
    """Stop words, several answers, no functions, names in snake case, tools of Google's left out."""
    model = Model("a stop b", Message(role="assistant", content="c", stop_reason="length"))
    body = {
        "contents": [USER],
        "tools": [{"function_declarations": [{"name": "f", "parametersJsonSchema": PLACE}]}, {"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "NONE"}},
        "generation_config": {"stopSequences": [" stop"], "candidateCount": 2, "maxOutputTokens": 7},
    }
    with gateway.open(model) as access:
        answer = (await post(access, f"models/any:generateContent?key={access.key}", body, accept="*/*")).json()
        count = (await post(access, f"{PATH}:countTokens", {"generateContentRequest": {"contents": [USER]}})).json()
    shown = [(each["content"]["parts"][0]["text"], each["finishReason"]) for each in answer["candidates"]]
    assert shown == [("a", "STOP"), ("c", "MAX_TOKENS")]
    assert (model.asked[0].tools, model.asked[0].left_out, model.asked[0].max_tokens) == ([], ["google_search"], 7)
    assert count == {"totalTokens": 6}


REFUSED: dict[str, tuple[str, Any, int, str, str]] = {
    "audio": (
        f"{PATH}:generateContent",
        {"contents": [{"parts": [{"text": "?"}, {"fileData": {"fileUri": "gs://x", "mimeType": "audio/wav"}}]}]},
        400,
        "INVALID_ARGUMENT",
        "'fileData audio/wav'",
    ),
    "no contents": (f"{PATH}:generateContent", {"contents": []}, 400, "INVALID_ARGUMENT", "contents: "),
    "cache": (f"{PATH}:generateContent", {"contents": [USER], "cachedContent": "c"}, 400, "INVALID_ARGUMENT", "cached"),
    "computer": (
        f"{PATH}:generateContent",
        {"contents": [USER], "tools": [{"computerUse": {}}]},
        400,
        "INVALID_ARGUMENT",
        "'t know the tool computerUse",
    ),
    "too many functions": (
        f"{PATH}:generateContent",
        {"contents": [USER], "tools": [{"functionDeclarations": [{"name": "f"}] * 501}] * 2},
        400,
        "INVALID_ARGUMENT",
        "more than 1,000 functions",
    ),
    "deep": (
        f"{PATH}:generateContent",
        {
            "contents": [USER],
            "tools": [
                {"functionDeclarations": [{"name": "f", "parameters": json.loads('{"a":' * 70 + "1" + "}" * 70)}]}
            ],
        },
        400,
        "INVALID_ARGUMENT",
        "nested more than 64 levels deep",
    ),
    "embeddings": (f"{PATH}:embedContent", {"content": USER}, 404, "NOT_FOUND", "generateContent"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_errors_are_in_googles_form(gateway: Gateway, name: str) -> None:
    call, body, status, kind, why = REFUSED[name]
    with gateway.open(Model()) as access:
        answer = await post(access, call, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["status"]) == (status, status, kind)
    assert why in error["message"]


async def test_another_key_gets_no_answer(gateway: Gateway) -> None:
    with gateway.open(Model()) as access:
        answer = await post(access, f"{PATH}:generateContent", {"contents": [USER]}, **{"x-goog-api-key": "other"})
    assert (answer.status_code, answer.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
