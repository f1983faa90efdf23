"""The clients that programs use, unchanged, against the gateway."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

import forge_env as fe
from forge_env.gateway.chat import read_chat
from forge_env.gateway.conversations import Conversations
from forge_env.gateway.messages import read_messages
from forge_env.gateway.request import ModelRequest, arguments_object, merged
from forge_env.gateway.responses import read_responses
from forge_env.gateway.server import MESSAGE_CHARS, MESSAGE_S, Access, Gateway
from forge_env.http.limits import MAX_BODY, MAX_HELD, LoopShare, RefusedRequestError
from forge_env.tools.json_text import arguments_text
from forge_env.tools.turns import call_of
from forge_env.types import FunctionCall, Message, ToolCall, ToolSpec, call_tool
from tests.forge_env.gateway.conftest import Model

if TYPE_CHECKING:
    import anthropic
    import openai

    Clients = tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]

pytestmark = pytest.mark.usefixtures("one_tls_context")
WEATHER = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CALL = call_tool("weather", place="Z\u00fcrich")
"""What a model says that wants to know the weather."""


USER: Any = [{"role": "user", "content": "?"}]

SHOWN = {
    "address": ["test_chat_completions", "test_responses", "test_messages"],
    "models, counting tokens": ["test_models_have_any_name", "test_tokens_are_counted"],
    "text, tool calls, tool results": ["test_chat_completions", "test_responses", "test_messages"],
    "tools": ["test_chat_completions", "test_responses", "test_messages"],
    "tools of a namespace, custom tools": [
        "test_namespaces_and_custom_tools",
        "test_what_clients_cannot_have_is_refused",
    ],
    "names of tools that OpenAI refuses (more than 64 characters, others than letters, digits, `_`, `-`)": [
        "test_names_that_endpoints_refuse"
    ],
    "tool choice": ["test_the_choice_of_tools"],
    "streaming": ["test_chat_completions", "test_responses", "test_messages"],
    "`n`": ["test_several_answers_stop_words_and_no_tools", "test_what_cannot_be_answered_is_refused"],
    "stop words": ["test_several_answers_stop_words_and_no_tools", "test_an_answer_ends_where_a_stop_word_begins"],
    "`previous_response_id`": ["test_responses", "test_what_clients_cannot_have_is_refused"],
    "images": ["test_images_reach_the_model", "test_what_clients_cannot_have_is_refused"],
    "audio, files": ["test_what_clients_cannot_have_is_refused"],
    "tools that run at the provider": ["test_tools_that_run_at_the_provider_are_left_out"],
    "`model`, temperature, top-p, seed, `max_tokens`": ["test_what_the_run_decides"],
    "JSON mode, schemas": ["test_what_the_run_decides"],
    "why an answer ended": [
        "test_chat_completions",
        "test_a_program_is_told_that_its_answer_was_cut_short",
        "test_an_answer_ends_where_a_stop_word_begins",
    ],
    "`usage`": ["test_usage_is_estimated"],
    "any other address": ["test_what_clients_cannot_have_is_refused"],
}
"""The rows of the page's table, and what shows that they are true."""


@pytest.mark.slow
def test_every_row_of_the_page_is_shown() -> None:
    page = Path(fe.__file__).parents[1] / "docs/environments/gateway.md"
    (table,) = re.findall(r"\| \| chat completions \|.*\n\|-+.*\n((?:\|.*\n)+)", page.read_text())
    assert [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()] == list(SHOWN)
    assert {name for names in SHOWN.values() for name in names} <= globals().keys()


@pytest.fixture(scope="module", autouse=True)
def _clients() -> None:
    """Two seconds of imports, which a process that only collects the tests does without."""
    global anthropic, openai
    import anthropic
    import openai


async def send(gateway: Gateway, path: str, body: Any, model: Model | None = None) -> httpx2.Response:
    """Send a request of a new episode."""
    content = body if isinstance(body, bytes | AsyncIterator) else json.dumps(body)
    with gateway.open(model or Model()) as access:
        async with httpx2.AsyncClient(headers={"x-api-key": access.key}) as client:
            return await client.post(f"{access.url}/v1/{path}", content=content)


CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": WEATHER}}]


async def chat(client: openai.AsyncOpenAI, messages: list[Any], stream: bool, **more: Any) -> Message:
    if not stream:
        completion = await client.chat.completions.create(model="any", messages=messages, **more)
        assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
        said = completion.choices[0].message
        assert completion.choices[0].finish_reason == ("tool_calls" if said.tool_calls else "stop")
    else:
        async with client.chat.completions.stream(model="any", messages=messages, **more) as events:
            async for _ in events:
                pass
            said = (await events.get_final_completion()).choices[0].message
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.function.name, arguments=call.function.arguments))
        for call in said.tool_calls or []
        if call.type == "function"
    ]
    return Message(role="assistant", content=said.content or "", tool_calls=calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(gateway: Gateway, stream: bool) -> None:
    model = Model(CALL, "Rain.")
    with gateway.open(model) as access:
        client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather in"}, {"type": "text", "text": "Zürich?"}]},
        ]
        said = await chat(client, messages, stream, tools=CHAT_TOOLS)
        assert said == CALL
        messages += [said.to_openai(), {"role": "tool", "tool_call_id": "call-0", "content": "rain"}]
        assert (await chat(client, messages, stream, tools=CHAT_TOOLS)).content == "Rain."
        await client.close()
    told = model.asked[1]
    assert told.messages == [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Weather in\nZürich?"),  # vLLM's server keeps parts apart in the same way
        CALL,
        Message(role="tool", content="rain", tool_call_id="call-0"),
    ]
    assert [tool.model_dump() for tool in told.tools] == [CHAT_TOOLS[0]["function"]]


async def test_several_answers_stop_words_and_no_tools(gateway: Gateway) -> None:
    model = Model("one. END two", "three", "four")
    with gateway.open(model) as access:
        client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Count."}], "tools": CHAT_TOOLS}
        found = await client.chat.completions.create(**ask, n=2, stop=" END", tool_choice="none", max_tokens=7)
        assert [choice.message.content for choice in found.choices] == ["one.", "three"]
        assert found.model == "m"
        assert (model.asked[0].tools, model.asked[0].max_tokens) == ([], 7)
        assert [model.id for model in (await client.models.list()).data] == ["model"]
        await client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(gateway: Gateway, stream: bool) -> None:
    model = Model(CALL, "Rain.", "Still rain.")
    with gateway.open(model) as access:
        client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)

        async def respond(**body: Any) -> Any:
            if not stream:
                return await client.responses.create(model="any", **body)
            async with client.responses.stream(model="any", **body) as events:
                async for _ in events:
                    pass
                return await events.get_final_response()

        tools: Any = [{"type": "function", "name": "weather", "description": "Now.", "parameters": WEATHER}]
        first = await respond(instructions="Be brief.", input="Weather in Zürich?", tools=tools)
        [call] = first.output
        assert (call.type, call.name, call.arguments) == (
            "function_call",
            "weather",
            CALL.tool_calls[0].function.arguments,
        )
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        said = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        question = {"role": "user", "content": "Weather in Zürich?"}
        second = await respond(instructions="Be brief.", input=[question, said, answer], tools=tools)
        assert second.output_text == "Rain."
        third = await respond(previous_response_id=second.id, input="And now?", tools=tools)
        assert third.output_text == "Still rain."
        with pytest.raises(openai.NotFoundError, match="no response 'resp_of_another'"):
            await client.responses.create(model="any", input="?", previous_response_id="resp_of_another")
        await client.close()
    assert model.asked[1].messages == [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Weather in Zürich?"),
        CALL,
        Message(role="tool", content="rain", tool_call_id="call-0"),
    ]
    assert [message.content for message in model.asked[2].messages[3:]] == ["Rain.", "And now?"]


EXEC = {"type": "custom", "name": "exec", "description": "Run JavaScript."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
AGENTS: Any = [
    {"type": "function", "name": "agents__spawn", "parameters": WEATHER},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Agents.",
        "tools": [{"type": "function", "name": "spawn", "parameters": WEATHER}, {**EXEC, "format": GRAMMAR}],
    },
    {"type": "namespace", "name": "mcp ö", "description": "", "tools": [{"type": "function", "name": "x" * 80}]},
    EXEC,
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["tools", "additional_tools"])
async def test_namespaces_and_custom_tools(gateway: Gateway, stream: bool, place: str) -> None:
    """Each tool has one name for the model; the program gets calls, and repeats them, by its own."""
    spawn, other = call_tool("agents__spawn_2", place="here").tool_calls, call_tool("agents__spawn").tool_calls
    script = call_tool("agents__exec", input="1 +\n1").tool_calls
    wrong = call_tool("exec", code="1").tool_calls
    model = Model(Message(role="assistant", tool_calls=[*spawn, *other, *script, *wrong]), "Done.")
    question: Any = {"role": "user", "content": "?"}
    items: list[Any] = [question]
    more: Any = {"tools": AGENTS}
    if place == "additional_tools":
        items, more = [{"type": place, "role": "developer", "tools": AGENTS}, question], {}
    with gateway.open(model) as access:
        async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
            asked: Any = {"model": "m", **more, "stream": stream}
            answer: Any = await client.responses.create(input=items, **asked)
            if stream:
                done = [event async for event in answer if event.type == "response.output_item.done"]
                output = [event.item for event in done]
            else:
                output = answer.output
            calls = [item.model_dump(exclude_unset=True) for item in output]
            results = [{"type": f"{each['type']}_output", "call_id": each["call_id"], "output": "ok"} for each in calls]
            await client.responses.create(input=[*items, *calls, *results], **asked)
    kept = [{key: each[key] for key in each.keys() - {"id", "call_id", "status"}} for each in calls]
    assert kept == [
        {"type": "function_call", "namespace": "agents", "name": "spawn", "arguments": '{"place": "here"}'},
        {"type": "function_call", "name": "agents__spawn", "arguments": "{}"},
        {"type": "custom_tool_call", "namespace": "agents", "name": "exec", "input": "1 +\n1"},
        {"type": "custom_tool_call", "name": "exec", "input": '{"code": "1"}'},
    ]
    first, second = model.asked
    names = [tool.name for tool in first.tools]
    assert names == ["agents__spawn", "agents__spawn_2", "agents__exec", f"mcp____{'x' * 57}", "exec"]
    assert "start: /.+/" in str(first.tools[2].parameters)
    repeated = [(call.function.name, call.function.arguments) for call in second.messages[1].tool_calls]
    said = [(call.function.name, call.function.arguments) for call in [*spawn, *other, *script]]
    assert repeated[:3] == said
    assert [message.content for message in second.messages[2:]] == ["ok"] * 4


async def test_added_tools_stay_in_a_continued_conversation(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_env.gateway.server.MAX_REMEMBERED", 7 * MESSAGE_CHARS)
    script = call_tool("ns__exec", input="1")
    model = Model("ok", script, "ok")
    tools = [{"type": "namespace", "name": "ns", "tools": [EXEC]}]
    added: Any = [{"type": "additional_tools", "role": "developer", "tools": tools}, *USER]
    with gateway.open(model) as access:
        async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
            first = await client.responses.create(model="m", input=added)
            second: Any = await client.responses.create(model="m", input="?", previous_response_id=first.id)
            with pytest.raises(openai.NotFoundError):  # tools count too: 2 + 1 and 4 + 1 are more than 7
                await client.responses.create(model="m", input="?", previous_response_id=first.id)
    assert [[tool.name for tool in asked.tools] for asked in model.asked] == [["ns__exec"]] * 2
    assert [(item.namespace, item.name) for item in second.output] == [("ns", "exec")]


async def test_a_tool_that_is_added_again_replaces_the_earlier_one(gateway: Gateway) -> None:
    model = Model("a")
    tools = [{"type": "function", "name": "f", "description": text} for text in ("old", "old", "new")]
    added: Any = [{"type": "additional_tools", "tools": [tool]} for tool in tools[1:]]
    await send(gateway, "responses", {"input": [*added, *USER], "tools": tools[:1]}, model)
    assert [tool.description for tool in model.asked[0].tools] == ["new"]


async def test_tools_that_run_at_the_provider_are_left_out(gateway: Gateway) -> None:
    model = Model("a", "b")
    inside = {"type": "namespace", "name": "docs", "tools": [{"type": "file_search"}]}
    tools: Any = [{"type": "web_search"}, inside, {"type": "function", "name": "weather", "parameters": WEATHER}]
    blocks: Any = [SEARCH, {"name": "weather", "input_schema": WEATHER}]
    with gateway.open(model) as access:
        gpt, claude = clients(access)
        async with gpt, claude:
            await gpt.responses.create(model="m", input="?", tools=tools)
            await claude.messages.create(**sends("?"), max_tokens=5, tools=blocks)
    assert [[tool.name for tool in asked.tools] for asked in model.asked] == [["weather"]] * 2
    assert [asked.left_out for asked in model.asked] == [["web_search", "file_search"], ["web_search"]]


@pytest.mark.parametrize("namespace", ["", "ns"])
def test_two_tools_of_one_name_are_refused(namespace: str) -> None:
    tools: Any = [{"type": kind, "name": "run"} for kind in ("function", "custom")]
    if namespace:
        tools = [{"type": "namespace", "name": namespace, "tools": tools}]
    with pytest.raises(RefusedRequestError, match="both named 'run'"):
        read_responses({"input": "?", "tools": tools}, {})


def test_a_tool_without_a_name_is_refused() -> None:
    with pytest.raises(RefusedRequestError, match="a tool of the request has no name"):
        read_messages({"messages": USER, "tools": [{"input_schema": WEATHER}]})


def test_programs_cannot_choose_names_of_metrics() -> None:
    """Types count under their known beginning: a program can't make up metrics."""
    types = ["web_search_1", "web_search_2", "mcp_toolset_x"]
    request = read_messages({"messages": USER, "tools": [{"type": kind, "name": "x"} for kind in types]})
    assert request.left_out == ["web_search", "web_search", "mcp_toolset"]
    request = read_responses({"input": "?", "tools": [{"type": kind} for kind in types]}, {})
    assert request.left_out == ["web_search", "web_search", "mcp"]


async def test_each_client_takes_its_key_from_the_environment(gateway: Gateway) -> None:
    with gateway.open(Model()) as access:
        keys = {value for name, value in access.environment.items() if name.endswith("_API_KEY")}
        assert keys == {access.environment["GOOGLE_API_KEY"]} == {access.key}


async def test_a_program_is_told_that_its_answer_was_cut_short(gateway: Gateway) -> None:
    short = Message(role="assistant", content="It is", stop_reason="length")
    withheld = Message(role="assistant", stop_reason="content_filter")
    with gateway.open(Model(short, short, short, short, withheld)) as access:
        ask: Any = {"model": "any", "messages": [{"role": "user", "content": "?"}]}
        async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
            assert (await client.chat.completions.create(**ask)).choices[0].finish_reason == "length"
            ended = await client.chat.completions.create(**ask, stop=" is")
            assert (ended.choices[0].finish_reason, ended.choices[0].message.content) == ("stop", "It")
            told = await client.responses.create(model="any", input="?")
            assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        async with anthropic.AsyncAnthropic(base_url=access.url, api_key=access.key) as claude:
            assert (await claude.messages.create(**ask, max_tokens=5)).stop_reason == "max_tokens"
            assert (await claude.messages.create(**ask, max_tokens=5)).stop_reason == "refusal"


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(gateway: Gateway, stream: bool) -> None:
    model = Model(CALL, "Rain.")
    with gateway.open(model) as access:
        client = anthropic.AsyncAnthropic(base_url=access.url, api_key=access.key)

        async def ask(messages: list[Any]) -> Any:
            tools: Any = [{"name": "weather", "description": "Now.", "input_schema": WEATHER}]
            body: Any = {"model": "any", "max_tokens": 50, "system": "Be brief.", "messages": messages, "tools": tools}
            if not stream:
                return await client.messages.create(**body)
            async with client.messages.stream(**body) as events:
                return await events.get_final_message()

        question = {"role": "user", "content": "Weather in Zürich?"}
        first = await ask([question])
        assert first.stop_reason == "tool_use"
        [use] = first.content
        assert (use.name, use.input) == ("weather", {"place": "Zürich"})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
        said = {"type": "tool_use", "id": use.id, "name": use.name, "input": use.input}
        answered = [question, {"role": "assistant", "content": [said]}, {"role": "user", "content": [result]}]
        second = await ask(answered)
        assert (second.content[0].text, second.stop_reason) == ("Rain.", "end_turn")
        counted = await client.messages.count_tokens(
            model="any", messages=[{"role": "user", "content": question["content"]}]
        )
        assert 0 < counted.input_tokens < second.usage.input_tokens
        await client.close()
    told = model.asked[1].messages
    assert [message.role for message in told] == ["system", "user", "assistant", "tool"]
    assert told[3] == Message(role="tool", content="rain", tool_call_id="call-0")


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"properties": found}
    return found


def said(*content: Any) -> Any:
    return {"messages": [{"role": "assistant", "content": content}]}


USE = {"type": "tool_use", "id": "1"}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("chat/completions", {"messages": []}, "messages: List should have at least 1 item"),
        ("chat/completions", {"messages": [{"role": "wizard", "content": "?"}]}, "messages.0.role: "),
        ("chat/completions", {"messages": USER, "n": 1000}, "n: "),
        ("chat/completions", {"messages": USER, "functions": [{}]}, "send `tools`"),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "send `tool_calls`",
        ),
        (
            "chat/completions",
            {"messages": USER, "tools": [{"function": {"name": "f"}}, {"function": {"name": "f", "description": "F"}}]},
            "two tools of the request are named 'f'",
        ),
        (
            "responses",
            {"input": "?", "tools": [{"type": "function", "name": "f", "description": text} for text in "ab"]},
            "two tools of the request are named 'f'",
        ),
        ("responses", {"input": []}, "input: it has no message"),
        ("chat/completions", [1], "the request: "),
        ("chat/completions", b"{", "the body is not JSON"),
        ("chat/completions", b"\xff" * 100, "the body is not JSON"),
        ("responses", {"input": [{"type": "reasoning", "summary": None}]}, "input.0.summary: Input should be a valid"),
        (
            "messages",
            {"messages": USER, "tools": [{"name": "weather", "input_schema": nested(70)}]},
            "the parameters of the tool 'weather' are nested more than 64 levels deep",
        ),
        ("messages", said({**USE, "input": nested(70)}), "the arguments of a call are nested more than 64 levels deep"),
        ("messages", {"messages": USER * 10_001}, "messages: List should have at most 10000 items"),
        ("messages", said(*[USE] * 30_000), "the body has more than 120,000 commas, colons and opening brackets"),
        ("messages", {"messages": USER, "stop_sequences": ["x"] * 65}, "stop_sequences: List should have at most 64"),
        ("messages", {"messages": USER, "x": nested(900)}, "the body is nested more than 100 levels deep"),
    ],
)
async def test_what_cannot_be_answered_is_refused(gateway: Gateway, path: str, body: Any, why: str) -> None:
    found = await send(gateway, path, body)
    assert found.status_code == 400
    assert why in found.json()["error"]["message"]


THOUGHT = {"role": "assistant", "content": "a", "reasoning": "hm"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "chat/completions",
            {"messages": [*USER, THOUGHT]},
            Message(role="assistant", content="a", reasoning_content="hm"),
        ),
        ("chat/completions", said({"type": "refusal", "refusal": "no"}), Message(role="assistant", content="no")),
        ("messages", said({"type": "redacted_thinking", "data": "x"}), Message(role="assistant")),
        (
            "responses",
            {"input": [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}]},
            Message(role="assistant", reasoning_content="hm"),
        ),
    ],
)
async def test_turns_as_other_servers_write_them(gateway: Gateway, path: str, body: Any, message: Message) -> None:
    model = Model("a")
    assert (await send(gateway, path, body, model)).status_code == 200
    assert model.asked[0].messages[-1] == message


@pytest.mark.parametrize(
    ("path", "tools"),
    [
        ("chat/completions", lambda names: [{"function": {"name": name}} for name in names]),
        ("responses", lambda names: [{"type": "function", "name": name} for name in names]),
        ("messages", lambda names: [{"name": name, "input_schema": {}} for name in names]),
    ],
)
async def test_names_that_endpoints_refuse(
    gateway: Gateway, path: str, tools: Callable[[Sequence[str]], list[Any]]
) -> None:
    programs, models = ["fs.read", "fs_read", "my tool", "x" * 80], ["fs_read_2", "fs_read", "my_tool", "x" * 64]
    calls = [call_of(name, {}, f"call_{number}") for number, name in enumerate(models)]
    model = Model(Message(role="assistant", tool_calls=calls), "Done.")
    body = {"messages": USER, "input": "?", "max_tokens": 9, "tools": tools(programs)}
    with gateway.open(model) as access:
        async with httpx2.AsyncClient(headers={"x-api-key": access.key}) as client:
            answer = (await client.post(f"{access.url}/v1/{path}", json=body)).json()
            said = answer.get("content") or answer.get("output") or answer["choices"][0]["message"]["tool_calls"]
            assert [each.get("name") or each["function"]["name"] for each in said] == programs
            history = {"input": [*USER, *said]} if "output" in answer else {"messages": [*USER, answer]}
            if "choices" in answer:
                history = {"messages": [*USER, answer["choices"][0]["message"]]}
            await client.post(f"{access.url}/v1/{path}", json={**body, "tools": tools(programs[::-1]), **history})
    first, second = model.asked
    assert [tool.name for tool in first.tools] == [tool.name for tool in second.tools][::-1] == models
    assert [call.function.name for call in second.messages[-1].tool_calls] == models


WEATHER_TOOL: Any = {"name": "weather", "description": "Now.", "parameters": WEATHER}
ANTHROPICS_TOOL: Any = {"name": "weather", "description": "Now.", "input_schema": WEATHER}


def clients(access: Access) -> Clients:
    return (
        openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key, max_retries=0),
        anthropic.AsyncAnthropic(base_url=access.url, api_key=access.key, max_retries=0),
    )


async def test_models_have_any_name(gateway: Gateway) -> None:
    with gateway.open(Model()) as access:
        gpt, claude = clients(access)
        async with gpt, claude:
            for one in (gpt, claude):
                assert [model.id async for model in one.models.list()] == ["model"]
                assert (await one.models.retrieve("any/name:1")).id == "any/name:1"


async def test_tokens_are_counted(gateway: Gateway) -> None:
    with gateway.open(Model()) as access:
        gpt, claude = clients(access)
        async with gpt, claude:
            short = await gpt.responses.input_tokens.count(model="m", input="?")
            long = await gpt.responses.input_tokens.count(model="m", input="? " * 100, instructions="Be brief.")
            assert 0 < short.input_tokens < long.input_tokens - 50
            same = await claude.messages.count_tokens(model="m", messages=USER)
            assert same.input_tokens == short.input_tokens


async def test_the_choice_of_tools(gateway: Gateway) -> None:
    model = Model(*["said"] * 9)
    with gateway.open(model) as access:
        gpt, claude = clients(access)
        named: Any = {"type": "function", "function": {"name": "weather"}}
        async with gpt, claude:
            for choice in ("none", "required", named):
                await gpt.chat.completions.create(model="m", messages=USER, tools=CHAT_TOOLS, tool_choice=choice)
            for said in ("none", "required", {"type": "function", "name": "weather"}):
                tool: Any = {"type": "function", **WEATHER_TOOL}
                await gpt.responses.create(model="m", input="?", tools=[tool], tool_choice=said)
            for kind in ("none", "any", "tool"):
                body: Any = {"tools": [ANTHROPICS_TOOL], "tool_choice": {"type": kind, "name": "weather"}}
                await claude.messages.create(model="m", max_tokens=5, messages=USER, **body)
    assert [[tool.name for tool in asked.tools] for asked in model.asked] == [[], ["weather"], ["weather"]] * 3


async def test_an_answer_ends_where_a_stop_word_begins(gateway: Gateway) -> None:
    said: list[Message | str] = ["one. END two STOP", CALL]
    with gateway.open(Model(*said, *said, *said)) as access:
        gpt, claude = clients(access)
        async with gpt, claude:
            ask: Any = {"model": "m", "messages": USER, "max_tokens": 5}
            chat = (await gpt.chat.completions.create(**ask, stop=["STOP", " END"])).choices[0]
            assert (chat.message.content, chat.finish_reason) == ("one.", "stop")
            assert (await gpt.chat.completions.create(**ask, stop="END")).choices[0].finish_reason == "tool_calls"
            told: Any = await claude.messages.create(**ask, stop_sequences=["STOP", " END"])
            assert (told.content[0].text, told.stop_reason, told.stop_sequence) == ("one.", "stop_sequence", " END")
            assert (await claude.messages.create(**ask, stop_sequences=["END"])).stop_reason == "tool_use"
            async with claude.messages.stream(**ask, stop_sequences=[" END"]) as events:
                streamed = await events.get_final_message()
            assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", " END")


async def test_what_the_run_decides(gateway: Gateway) -> None:
    """It is taken, and changes nothing: neither who answers, nor how, nor what the answer looks like."""

    class Shape(BaseModel):
        a: int

    model = Model(*["no JSON"] * 4, '{"a": 1}', '{"a": 2}')
    with gateway.open(model) as access:
        gpt, claude = clients(access)
        async with gpt, claude:
            options: Any = {"temperature": 0.0, "top_p": 0.1}
            more: Any = {"seed": 7, "max_tokens": 1, "response_format": {"type": "json_object"}, "logprobs": True}
            chat = await gpt.chat.completions.create(model="gpt-9", messages=USER, **options, **more)
            assert (chat.model, chat.choices[0].message.content) == ("gpt-9", "no JSON")
            schema: Any = {"format": {"type": "json_schema", "name": "a", "schema": Shape.model_json_schema()}}
            said = await gpt.responses.create(model="gpt-9", input="?", max_output_tokens=16, text=schema, **options)
            assert (said.model, said.output_text) == ("gpt-9", "no JSON")
            told: Any = await claude.messages.create(model="any", messages=USER, max_tokens=1, extra_body=options)
            assert (told.model, told.content[0].text) == ("any", "no JSON")
            thought: Any = {"type": "enabled", "budget_tokens": 1024}
            assert (await claude.messages.create(model="any", messages=USER, max_tokens=2000, thinking=thought)).content
            parsed = await gpt.chat.completions.parse(model="m", messages=USER, response_format=Shape)
            assert parsed.choices[0].message.parsed == Shape(a=1), "where the model writes what was asked for"
            read = await gpt.responses.parse(model="m", input="?", text_format=Shape)
            assert read.output_parsed == Shape(a=2)
    assert all(asked.messages == [Message(role="user", content="?")] for asked in model.asked)


async def test_usage_is_estimated(gateway: Gateway) -> None:
    text = "word " * 80
    with gateway.open(Model(text, text, text, text)) as access:
        gpt, claude = clients(access)
        async with gpt, claude:
            ask: Any = {"model": "m", "messages": USER, "max_tokens": 5}
            counts = []
            if (chat := (await gpt.chat.completions.create(**ask)).usage) is not None:
                counts.append((chat.prompt_tokens, chat.completion_tokens))
            streaming = await gpt.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
            counts += [
                (last.usage.prompt_tokens, last.usage.completion_tokens) async for last in streaming if last.usage
            ]
            if (said := (await gpt.responses.create(model="m", input="?")).usage) is not None:
                counts.append((said.input_tokens, said.output_tokens))
            told = (await claude.messages.create(**ask)).usage
            counts.append((told.input_tokens, told.output_tokens))
    assert counts == [(5, 104)] * 4


def sends(content: Any) -> Any:
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


TEXT = "reads text and images only"
PNG = "data:image/png;base64,AA=="
FTP: Any = [{"type": "image_url", "image_url": {"url": "ftp://example.org/x.png"}}]
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
BASH = {"type": "bash_20250124", "name": "bash"}
REFUSED: dict[str, tuple[Callable[[Clients], Awaitable[object]], int, str]] = {
    "chat image": (
        lambda c: c[0].chat.completions.create(**sends(FTP)),
        400,
        "neither an https: nor a data:image/ URL",
    ),
    "chat audio": (lambda c: c[0].chat.completions.create(**sends([{"type": "input_audio"}])), 400, TEXT),
    "chat file": (lambda c: c[0].chat.completions.create(**sends([{"type": "file"}])), 400, TEXT),
    "chat speech": (lambda c: c[0].chat.completions.create(**sends("?"), modalities=["audio"]), 400, "modalities"),
    "chat custom tool": (
        lambda c: c[0].chat.completions.create(**sends("?"), tools=[{"type": "custom", "custom": {"name": "x"}}]),
        400,
        r"tools\.0\.type",
    ),
    "responses image": (
        lambda c: c[0].responses.create(model="m", input=sends([{"type": "input_image", "file_id": "f"}])["messages"]),
        400,
        TEXT,
    ),
    "responses shell": (
        lambda c: c[0].responses.create(model="m", input="?", tools=[{"type": "local_shell"}]),
        400,
        "can't call a tool of the type 'local_shell': give a function",
    ),
    "responses conversation": (
        lambda c: c[0].responses.create(model="m", input="?", conversation="conv_1"),
        400,
        "previous_response_id",
    ),
    "messages file": (
        lambda c: c[1].messages.create(**sends([{**IMAGE_BLOCK, "type": "document"}]), max_tokens=5),
        400,
        TEXT,
    ),
    "messages shell": (
        lambda c: c[1].messages.create(**sends("?"), max_tokens=5, tools=[BASH]),
        400,
        "doesn't know the tool 'bash'",
    ),
    "embeddings": (lambda c: c[0].embeddings.create(model="m", input="?"), 404, "there is no POST /v1/embeddings"),
    "completions": (lambda c: c[0].completions.create(model="m", prompt="?"), 404, "there is no POST /v1/completions"),
    "response": (lambda c: c[0].responses.retrieve("resp_1"), 404, "there is no GET /v1/responses/resp_1"),
    "batches": (lambda c: c[1].messages.batches.create(requests=[]), 404, "there is no POST /v1/messages/batches"),
    "files": (lambda c: c[1].beta.files.list(), 404, "there is no GET /v1/files"),
}


MESSAGES = {"messages file", "messages shell", "batches", "files"}
"""Of those, what Anthropic's client asks."""


async def test_images_reach_the_model(gateway: Gateway) -> None:
    """As parts of the user's messages and of tools' results."""
    model = Model("a", "b", "c", "d")
    shown: Any = [{"type": "text", "text": "See:"}, *IMAGE]
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE_BLOCK]}
    use: Any = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    look: Any = {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"}
    output: Any = [{"type": "input_image", "image_url": PNG}]
    with gateway.open(model) as access:
        gpt, claude = clients(access)
        async with gpt, claude:
            await gpt.chat.completions.create(**sends(shown))
            seen: Any = [{"type": "function_call_output", "call_id": "t", "output": output}]
            await gpt.responses.create(model="m", input=[look, *seen])
            turns: Any = [
                *sends([IMAGE_BLOCK])["messages"],
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ]
            await claude.messages.create(model="m", max_tokens=5, messages=turns)
        inline = {
            "contents": [{"parts": [{"text": "See:"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}]}]
        }
        async with httpx2.AsyncClient(headers={"x-goog-api-key": access.key}) as client:
            await client.post(f"{access.url}/v1beta/models/m:generateContent", json=inline)
    chat, responses, messages, gemini = (
        [(m.role, m.content, m.images) for m in asked.messages] for asked in model.asked
    )
    assert chat == gemini == [("user", "See:", (PNG,))]
    assert responses[-1] == ("tool", "", (PNG,))
    assert messages == [("user", "", (PNG,)), ("assistant", "", ()), ("tool", "", (PNG,))]
    assert [asked.images for asked in model.asked] == [1, 1, 2, 1]


@pytest.mark.parametrize("name", REFUSED)
async def test_what_clients_cannot_have_is_refused(gateway: Gateway, name: str) -> None:
    call, status, why = REFUSED[name]
    with gateway.open(Model()) as access:
        gpt, claude = clients(access)
        async with gpt, claude:
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=why) as refused:
                await call((gpt, claude))
    error: Any = refused.value
    told: Any = error.body if name not in MESSAGES else error.body["error"]
    assert (error.status_code, bool(told["message"])) == (status, True), "in the form of the API that the client speaks"


async def test_a_request_that_was_read_when_its_episode_had_ended_is_not_answered() -> None:
    """Its head came before the end, its body after it: the next episode of that environment is not asked."""
    model, began = Model("mine"), asyncio.Event()

    class Watched(Gateway):
        def _access(self, request: Request) -> Access:
            began.set()
            return super()._access(request)

    async with Watched() as gateway:
        access = gateway.open(model)

        async def late() -> AsyncIterator[bytes]:
            yield b'{"messages": [{"role": "user", '
            await began.wait()
            access.close("the limit of 3 turns is reached")
            yield b'"content": "?"}]}'

        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {access.key}"}) as client:
            found = await client.post(f"{access.openai_url}/chat/completions", content=late())
    assert (found.status_code, found.json()["error"]["message"]) == (403, "the limit of 3 turns is reached")
    assert model.asked == []


async def test_what_an_episode_asks_at_once_is_bounded_in_bytes(gateway: Gateway) -> None:
    """However many connections send, and whatever they wait for; others don't feel it."""
    asked, answer = asyncio.Queue[None](), asyncio.Event()

    async def slow(request: ModelRequest) -> Message:
        asked.put_nowait(None)
        await answer.wait()
        return Message(role="assistant", content=str(len(request.messages[0].content)))

    size = MAX_BODY - 1000
    body = {"messages": [{"role": "user", "content": "x" * size}]}
    with gateway.open(slow) as access, gateway.open(Model("small")) as neighbour:
        async with httpx2.AsyncClient(timeout=60.0) as client:

            async def post(whose: Access) -> httpx2.Response:
                head = {"Authorization": f"Bearer {whose.key}"}
                return await client.post(f"{whose.openai_url}/chat/completions", json=body, headers=head)

            waiting = [asyncio.create_task(post(access)) for _ in range(MAX_HELD // MAX_BODY)]
            for _ in waiting:
                await asked.get()
            refused = await post(access)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
            assert (await post(neighbour)).status_code == 200
            answer.set()
            for found in await asyncio.gather(*waiting):
                assert found.json()["choices"][0]["message"]["content"] == str(size)
            assert (await post(access)).status_code == 200, "what was answered is held no more"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "chat/completions",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "reasoning_content": "\ud800",
                        "tool_calls": [{"id": "\udfff", "function": {"name": "\ud83d", "arguments": "\ud800"}}],
                    },
                    {"role": "tool", "tool_call_id": "\udfff", "name": "\ud83d", "content": "\ud83d\ude00"},
                ],
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "\ud800", "description": "\ud800", "parameters": {"\ud800": "\ud800"}},
                    }
                ],
            },
        ),
        (
            "responses",
            {
                "input": [{"type": "reasoning", "summary": [{"text": "\ud800"}]}, {"content": "\ud83d\ude00"}],
                "instructions": "\ud800",
                "tools": [{"type": "function", "name": "x", "description": "\ud800"}],
            },
        ),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "\ud800"},
                            {"type": "tool_use", "id": "\ud800", "name": "\ud800", "input": {"\ud800": "\ud83d\ude00"}},
                        ],
                    }
                ],
                "system": "\ud800\ud83d\ude00",
                "tools": [{"name": "\ud800", "description": "\ud800", "input_schema": {"\ud800": ["\ud800"]}}],
            },
        ),
    ],
)
async def test_halves_of_surrogate_pairs_reach_no_tokenizer(gateway: Gateway, path: str, body: Any) -> None:
    """What cuts text between the two, as JavaScript does, writes them; neither UTF-8 nor a tokenizer has any."""
    model = Model("ok")
    found = await send(gateway, path, body, model)
    assert found.status_code == 200, found.text
    (asked,) = model.asked
    told = [*(message.model_dump() for message in asked.messages), *(tool.model_dump() for tool in asked.tools)]
    text = json.dumps(told, ensure_ascii=False)
    assert ("\U0001f600" in text.encode().decode(), "\ufffd" in text) == (True, True)


async def test_only_the_key_of_a_running_episode_reaches_it(gateway: Gateway) -> None:
    one, other = Model("one"), Model("other")
    ask: Any = {"model": "m", "messages": USER}
    with gateway.open(one) as first:
        with gateway.open(other) as second:
            gpt, claude = clients(second)
            assert (await gpt.chat.completions.create(**ask)).choices[0].message.content == "other"
        for key in (second.key, "sk-none", "x"):
            stranger, claude = (
                client.with_options(base_url=url, api_key=key)
                for client, url in ((gpt, first.openai_url), (claude, first.url))
            )
            with pytest.raises(openai.AuthenticationError, match="belongs to no running episode"):
                await stranger.chat.completions.create(**ask)
            with pytest.raises(anthropic.AuthenticationError, match="belongs to no running episode"):
                await claude.messages.create(**ask, max_tokens=5)
    assert (len(one.asked), len(other.asked)) == (0, 1)


async def test_who_waits_when_its_episode_ends_is_told_why(gateway: Gateway) -> None:
    asked = asyncio.Event()

    async def never(request: ModelRequest) -> Message:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    access = gateway.open(never)
    async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        waiting = asyncio.ensure_future(client.chat.completions.create(**ask))
        await asked.wait()
        access.close("the limit of 3 turns is reached")
        with pytest.raises(openai.PermissionDeniedError, match="the limit of 3 turns is reached"):
            await waiting


async def test_an_answer_that_nobody_waits_for_is_given_up(gateway: Gateway) -> None:
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def slow(request: ModelRequest) -> Message:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        raise AssertionError

    with gateway.open(slow) as access:
        client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        waiting = asyncio.ensure_future(client.chat.completions.create(**ask))
        await asked.wait()
        waiting.cancel()
        await asyncio.wait_for(given_up.wait(), 10)
        await client.close()


async def test_refusals_of_the_episode_reach_the_program(gateway: Gateway) -> None:
    full = RefusedRequestError("the conversation has 900 of 800 tokens", code="context_length_exceeded")
    with gateway.open(Model(full)) as access:
        async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
            ask: Any = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
            with pytest.raises(openai.BadRequestError, match="900 of 800") as refused:
                await client.chat.completions.create(**ask)
    assert refused.value.code == "context_length_exceeded"


async def test_the_body_of_an_answer_does_not_wait_for_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    create = socket.create_server

    def create_server(*arguments: Any, **options: Any) -> socket.socket:
        made.append(create(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(socket, "create_server", create_server)
    async with Gateway():
        [listening] = made
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_huge_request_is_refused(gateway: Gateway) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range((MAX_BODY >> 20) + 2):
            yield b" " * (1 << 20)

    found = await send(gateway, "chat/completions", endless())
    assert (found.status_code, found.json()["error"]["message"]) == (413, "the body has more than 8 MiB")


def _call(arguments: Any) -> list[Any]:
    call = {"id": "c", "type": "function", "function": {"name": "x", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [{"role": "user", "content": "hi"}, said, {"role": "tool", "tool_call_id": "c", "content": "r"}]


@pytest.mark.parametrize("arguments", ["", None, {}, "{}", "null", '"{}"'])
async def test_arguments_of_a_repeated_call(gateway: Gateway, arguments: Any) -> None:
    model = Model("ok")
    assert (await send(gateway, "chat/completions", {"messages": _call(arguments)}, model)).status_code == 200
    assert model.asked[0].messages[1].tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("chat/completions", {"type": "function", "function": {"name": "x", "description": None, "parameters": None}}),
        ("responses", {"type": "function", "name": "x", "description": None, "parameters": None}),
        ("messages", {"name": "x", "description": None, "input_schema": {}}),
    ],
)
async def test_tools_without_description_or_parameters(gateway: Gateway, path: str, tool: Any) -> None:
    model = Model("ok")
    body = {"input": "hi"} if path == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await send(gateway, path, {**body, "tools": [tool]}, model)
    assert answer.status_code == 200, answer.text
    assert model.asked[0].tools == [ToolSpec(name="x")]


@pytest.mark.parametrize("number", ["NaN", "1e999"])
async def test_a_call_with_a_number_that_json_lacks(gateway: Gateway, number: str) -> None:
    """The program gets the arguments as text."""
    arguments = f'{{"n": {number}}}'
    model = Model(Message(role="assistant", tool_calls=[call_of("weather", arguments, "call_0")]))
    answer = await send(gateway, "messages", {"model": "m", "max_tokens": 9, "messages": USER}, model)
    assert answer.json()["content"][0]["input"] == {"arguments": arguments}


async def test_a_malformed_call_is_one_conversation(gateway: Gateway) -> None:
    """A program that repeats it as it got it goes on with the same conversation, over both ways to send arguments."""
    for name, raw in (("", '{"name": "f",}'), ("", '"{}"'), ("", "null"), ("", "[1]"), ("f", '{"n": NaN}')):
        call = call_of(name, raw, "call_0", raw)
        for arguments in (raw, arguments_object(raw)):
            conversations = Conversations()
            question = Message(role="user", content="?")
            conversation, _, _ = conversations.place([question], [])
            shown = conversations.answered(conversation, Message(role="assistant", tool_calls=[call]))
            call_id = shown.tool_calls[0].id
            said = Message(role="assistant", tool_calls=[call_of(name, arguments_text(arguments), call_id)])
            answer = Message(role="tool", tool_call_id=call_id, content="no")
            assert conversations.place([question, said, answer], [])[0] is conversation


async def test_old_responses_make_room_for_new_ones(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_env.gateway.server.MAX_REMEMBERED", 7 * MESSAGE_CHARS)
    with gateway.open(Model(*["ok"] * 4)) as access:
        async with httpx2.AsyncClient(headers={"x-api-key": access.key}) as client:

            async def respond(**body: Any) -> httpx2.Response:
                return await client.post(f"{access.url}/v1/responses", json=body)

            first, second = [(await respond(input="x" * 100)).json()["id"] for _ in range(2)]
            assert (await respond(input="y" * 30, previous_response_id=first)).status_code == 200
            assert (await respond(input="y", previous_response_id=first)).status_code == 404
            assert (await respond(input="y", previous_response_id=second)).status_code == 200


async def test_a_chain_of_responses_is_bounded_and_charged(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[float] = []
    charge = LoopShare.charge
    monkeypatch.setattr(
        LoopShare, "charge", lambda self, client, seconds: (charged.append(seconds), charge(self, client, seconds))[1]
    )
    monkeypatch.setattr("forge_env.gateway.responses.MOST_MESSAGES", 9)
    with gateway.open(Model(*["ok"] * 4)) as access:
        async with httpx2.AsyncClient(headers={"x-api-key": access.key}) as client:
            earlier, statuses = None, []
            for _ in range(3):
                body = {"input": [{"role": "user", "content": ""}] * 3, "previous_response_id": earlier}
                found = await client.post(f"{access.url}/v1/responses", json=body)
                statuses.append(found.status_code)
                earlier = found.json().get("id")
    assert statuses == [200, 200, 400]
    assert "more than 9 items with its earlier responses" in found.json()["error"]["message"]
    assert [3 * MESSAGE_S in charged, 7 * MESSAGE_S in charged] == [True, True]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": 1, "text": 1}] * 2}] * 1000}),
        (
            "chat/completions",
            {"messages": USER, "tools": [{"type": 1}] * 1000, "stop": [1] * 64, "modalities": [1] * 9},
        ),
        ("messages", {"messages": [{"role": 1, "content": [{"type": 1}]}] * 1000, "system": [{"type": 1}] * 1000}),
        ("messages", {"messages": USER, "tools": [{}] * 1000, "stop_sequences": [1] * 64}),
        ("responses", {"input": [{"role": 1, "content": [{"type": 1}], "summary": [1] * 9}] * 1000}),
    ],
)
def test_an_invalid_request_has_few_errors(path: str, body: Any) -> None:
    read = {"chat/completions": read_chat, "messages": read_messages, "responses": partial(read_responses, earlier={})}
    with pytest.raises(RefusedRequestError) as raised:
        read[path](body)
    assert isinstance(raised.value.__cause__, ValidationError)
    assert raised.value.__cause__.error_count() <= 20


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("responses", {"input": "?", "previous_response_id": "\0" * 100_000}),
        ("responses", {"input": [{"type": "x" * 100_000}]}),
        ("messages", {"messages": USER, "tools": [{"type": "x" * 100_000, "name": "x" * 100_000}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]}),
    ],
)
async def test_a_refusal_is_short(gateway: Gateway, path: str, body: Any) -> None:
    found = await send(gateway, path, body)
    assert found.status_code in (400, 404)
    assert len(found.content) < 2000


def test_items_of_a_turn_are_merged() -> None:
    def said(role: Any, text: str, thought: str | None = None, *names: str) -> Message:
        calls = [call_of(name, "{}", name) for name in names]
        return Message(role=role, content=text, reasoning_content=thought, tool_calls=calls)

    items = [
        said("user", "a"),
        said("user", "b"),
        said("assistant", "", "t"),
        said("assistant", "c", "u"),
        said("assistant", "d", None, "f", "g"),
        said("tool", "e"),
        said("assistant", "h"),
    ]
    turn = said("assistant", "cd", "tu", "f", "g")
    assert merged(items) == [items[0], items[1], turn, items[5], items[6]]
    assert items[2] == said("assistant", "", "t"), "the items are unchanged"
