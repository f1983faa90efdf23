"""The clients that programs use, unchanged, against the gateway."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from forge_env.gateway.request import ModelRequest, RefusedRequestError
from forge_env.gateway.server import MAX_BODY, Gateway
from forge_env.types import FunctionCall, Message, ToolCall, call_tool

WEATHER = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CALL = call_tool("weather", place="Z\u00fcrich")
"""What a model says that wants to know the weather."""


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as gateway:
        yield gateway


class Model:
    """Answers as it is told to, and remembers what it was asked."""

    def __init__(self, *answers: Message | str | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[ModelRequest] = []

    async def __call__(self, request: ModelRequest) -> Message:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Message(role="assistant", content=answer) if isinstance(answer, str) else answer


CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": WEATHER}}]


async def chat(client: openai.AsyncOpenAI, messages: list[Any], stream: bool, **more: Any) -> Message:
    if not stream:
        completion = await client.chat.completions.create(model="any", messages=messages, **more)
        assert completion.usage is not None
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
            {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Zürich?"}]},
        ]
        said = await chat(client, messages, stream, tools=CHAT_TOOLS)
        assert said == CALL
        messages += [said.to_openai(), {"role": "tool", "tool_call_id": "call-0", "content": "rain"}]
        assert (await chat(client, messages, stream, tools=CHAT_TOOLS)).content == "Rain."
        await client.close()
    told = model.asked[1]
    assert told.messages == [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Weather in Zürich?"),
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
            assert told.incomplete_details is not None
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
        counted = await client.messages.count_tokens(model="any", messages=[question])
        assert 0 < counted.input_tokens < second.usage.input_tokens
        await client.close()
    told = model.asked[1].messages
    assert [message.role for message in told] == ["system", "user", "assistant", "tool"]
    assert told[3] == Message(role="tool", content="rain", tool_call_id="call-0")


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, "this model reads text only"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "wizard", "content": "?"}]}, r"messages\.0\.role: "),
        ({"messages": [{"role": "user", "content": "?"}], "n": 1000}, r"n: "),
        ({"messages": [{"role": "user", "content": "?"}], "functions": [{}]}, "send `tools`"),
        ([1], "the request: "),
    ],
)
async def test_what_cannot_be_answered_is_refused(gateway: Gateway, body: Any, why: str) -> None:
    with gateway.open(Model()) as access:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {access.key}"}) as client:
            found = await client.post(f"{access.openai_url}/chat/completions", json=body)
    assert found.status_code == 400
    assert re.search(why, found.json()["error"]["message"]), found.text


async def test_only_the_key_of_a_running_episode_reaches_it(gateway: Gateway) -> None:
    one, other = Model("one"), Model("other")
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Who are you?"}]}
    with gateway.open(one) as first:
        with gateway.open(other) as second:
            client = openai.AsyncOpenAI(base_url=second.openai_url, api_key=second.key)
            assert (await client.chat.completions.create(**ask)).choices[0].message.content == "other"
        for key in (second.key, "sk-none", ""):
            async with openai.AsyncOpenAI(base_url=first.openai_url, api_key=key or "x") as stranger:
                with pytest.raises(openai.AuthenticationError, match="of no running episode"):
                    await stranger.chat.completions.create(**ask)
        claude = anthropic.AsyncAnthropic(base_url=first.url, api_key="none")
        with pytest.raises(anthropic.AuthenticationError, match="of no running episode"):
            await claude.messages.create(**ask, max_tokens=5)
        await client.close()
        await claude.close()
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

    with gateway.open(Model()) as access:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {access.key}"}) as client:
            found = await client.post(f"{access.openai_url}/chat/completions", content=endless())
    assert (found.status_code, found.json()["error"]["message"]) == (413, "more than 32 MiB")
