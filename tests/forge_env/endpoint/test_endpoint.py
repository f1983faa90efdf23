"""An endpoint as a policy: what is sent, what is read, and every way in which it can misbehave."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest

import forge_env as fe
from forge_env.endpoint.policy import EndpointOptions, EndpointPolicy
from forge_env.errors import GeneratorError, UsageError
from forge_env.policy import Reply
from forge_env.types import Message
from tests.forge_env.endpoint.server import Server, completion, delta, events, http, tool_call
from tests.forge_env.environment.test_tool_environment import Arithmetic

TOOLS = Arithmetic().tools
QUESTION = [Message(role="system", content="Be brief."), Message(role="user", content="2 + 2?")]


class Naps:
    """Delays that are noted and not waited for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


def policy_for(server: Server, **options: Any) -> EndpointPolicy:
    settings = {"model": "m", "base_url": server.url, "retries": 2, **options}
    return EndpointPolicy(EndpointOptions(**settings), sleep=Naps(), rng=random.Random(0))


async def ask(behave: Callable[[dict[str, Any], int], Any], **options: Any) -> tuple[Reply, Server]:
    async with Server(behave) as server, policy_for(server, **options) as policy:
        return await policy.session(TOOLS, seed=5).reply(QUESTION), server


async def test_messages_and_tools_go_out_in_openai_format() -> None:
    reply, server = await ask(
        lambda request, n: completion(), temperature=0.5, max_tokens=9, send_seed=True, extra={"top_k": 1}
    )
    request = server.requests[0]
    assert request["messages"] == [message.to_openai() for message in QUESTION]
    assert request["tools"] == [tool.to_openai() for tool in TOOLS]
    assert {name: request[name] for name in ("model", "temperature", "max_tokens", "seed", "top_k")} == {
        "model": "m",
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 5,
        "top_k": 1,
    }
    assert "stream" not in request
    assert reply.message == Message(role="assistant", content="4")
    assert reply.metadata["usage"] == {"prompt": 10, "completion": 5}
    assert reply.metadata["attempts"] == 1


@pytest.mark.parametrize("tools", ["native", "text"])
async def test_images_go_out_as_parts(tools: str) -> None:
    seen = Message(role="user", content="What is it?", images=("data:image/png;base64,AA==",))
    async with (
        Server(lambda request, n: completion()) as server,
        policy_for(server, tools=tools) as policy,
    ):
        session = policy.session([], seed=5)
        await session.reply([seen])
        await session.reply([Message(role="tool", content="more", tool_call_id="c", images=seen.images)])
    [asked] = [message for message in server.requests[0]["messages"] if message["role"] == "user"]
    assert asked["content"] == seen.parts
    assert server.requests[1]["messages"][-1]["content"][-1] == seen.parts[-1]


async def test_a_conversation_with_native_tool_calls() -> None:
    def behave(request: dict[str, Any], n: int) -> Any:
        return completion(None, calls=[tool_call("add", {"a": 3})]) if n == 0 else completion("4")

    async with Server(behave) as server, policy_for(server) as policy:
        trajectory = await fe.run_episode(Arithmetic, policy, seed=3)
    assert (trajectory.reward, trajectory.metrics["tool_calls"], trajectory.retries) == (1.0, 1.0, 0)
    sent = server.requests[1]["messages"]
    assert [message["role"] for message in sent[-2:]] == ["assistant", "tool"]
    assert sent[-1]["tool_call_id"] == sent[-2]["tool_calls"][0]["id"] == "call_0"
    assert trajectory.turns[1].reply.metadata["usage"] == {"prompt": 10, "completion": 5}


async def test_a_conversation_with_tool_calls_in_the_text() -> None:
    texts = ['Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', "4"]
    async with (
        Server(lambda request, n: completion(texts[n])) as server,
        policy_for(server, tools="text") as policy,
    ):
        trajectory = await fe.run_episode(Arithmetic, policy, seed=3)
    assert (trajectory.reward, trajectory.turns[0].message.content) == (1.0, "Let me see.")
    assert trajectory.turns[0].message.tool_calls[0].function.name == "add"
    first, second = (request["messages"] for request in server.requests)
    assert "tools" not in server.requests[0]
    assert first[0]["role"] == "system"
    assert '"name": "add"' in first[0]["content"]
    assert {message["role"] for message in second} == {"system", "user", "assistant"}
    assert second[-1] == {"role": "user", "content": "<tool_response>\n4\n</tool_response>"}


@pytest.mark.parametrize(
    "text", ["<tool_call>{oops</tool_call>", "<tool_call>[1]", '<tool_call>{"name": 3}</tool_call>']
)
async def test_a_text_call_that_cannot_be_read_is_the_models_to_repair(text: str) -> None:
    reply, _ = await ask(lambda request, n: completion(text), tools="text")
    assert [call.function.name for call in reply.message.tool_calls] == [""]
    assert reply.message.tool_calls[0].function.arguments in text


async def test_streamed_pieces_are_put_together() -> None:
    pieces = [
        delta(role="assistant", content="Let "),
        delta(content="me", reasoning_content="hm"),
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"a"'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ": 3}"}}]),
        delta(tool_calls=[{"index": 1, "id": "b", "function": {"name": "add", "arguments": "{}"}}]),
        delta(finish="tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
    ]
    reply, server = await ask(lambda request, n: events(*pieces), stream=True)
    assert server.requests[0]["stream"] is True
    assert (reply.message.content, reply.message.reasoning_content) == ("Let me", "hm")
    assert [(call.id, call.function.arguments) for call in reply.message.tool_calls] == [("a", '{"a": 3}'), ("b", "{}")]
    assert reply.metadata["usage"] == {"prompt": 7, "completion": 3}


async def test_exact_tokens_where_the_endpoint_is_vllm() -> None:
    def behave(request: dict[str, Any], n: int) -> Any:
        assert request["return_token_ids"] is True
        data = completion(None, calls=[tool_call("add", {"a": 3})]) if n == 0 else completion("4")
        prompt = list(range(4)) + ([50, 51, 9] if n else [])
        data["prompt_token_ids"] = prompt
        data["choices"][0] |= {"token_ids": [50, 51], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1}]}}
        return data

    models = {"data": [{"id": "m", "owned_by": "vllm"}]}
    async with Server(behave, models=models) as server, policy_for(server) as policy:
        await policy.check()
        trajectory = await fe.run_episode(Arithmetic, policy, seed=3)
    (segment,) = trajectory.segments()
    assert segment.token_ids.tolist() == [0, 1, 2, 3, 50, 51, 9, 50, 51]
    assert segment.mask.tolist() == [False] * 4 + [True, True, False, True, True]
    assert not any(turn.reply.forked for turn in trajectory.turns)


GOOD = completion()
HALF = http(GOOD)[:-20]
TOLD: dict[str, Any] = {"message": {"content": "4"}, "prompt_token_ids": [1]}
FAULTS: dict[str, tuple[Any, str]] = {
    "429": (http({"error": {"message": "slow down"}}, 429), "EndpointOverloadedError"),
    "503": (http(b"", 503), "EndpointOverloadedError"),
    "500": (http({"error": "boom"}, 500), "EndpointFailureError"),
    "502 with a page": (http(b"<html>Bad gateway</html>", 502), "EndpointFailureError"),
    "garbage": (http(b"\x00\xffnot json"), "MalformedAnswerError"),
    "empty body": (http(b""), "MalformedAnswerError"),
    "deep nesting": (http(b"[" * 100_000), "MalformedAnswerError"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", "MalformedAnswerError"),
    "closed": (b"", "EndpointUnreachableError"),
    "half an answer": (HALF, "TruncatedAnswerError"),
    "half a header": (b"HTTP/1.1 200 OK\r\ncontent-", "EndpointUnreachableError"),
    "half a stream": (events(delta(content="4"), done=False), "TruncatedAnswerError"),
    "half an event": (events(delta(content="4"))[:-40], "TruncatedAnswerError"),
    "garbage event": (http(b"data: {oops\n\n", headers={"content-type": "text/event-stream"}), "MalformedAnswerError"),
    "error event": (events({"error": {"message": "died"}}), "EndpointFailureError"),
    "bad encoding": (http(b"xx", headers={"content-encoding": "gzip"}), "MalformedAnswerError"),
    "a list": ([], "MalformedAnswerError"),
    "no choices": ({"choices": []}, "MalformedAnswerError"),
    "null message": ({"choices": [{"message": None}]}, "MalformedAnswerError"),
    "number as content": (completion(7), "MalformedAnswerError"),
    "error with status 200": ({"error": {"message": "overloaded"}}, "EndpointFailureError"),
    "calls as text": (completion(None, calls="add(3)"), "MalformedAnswerError"),
    "call as text": (completion(None, calls=["add(3)"]), "MalformedAnswerError"),
    "call without function": (completion(None, calls=[{"id": "a"}]), "MalformedAnswerError"),
    "finished by an error": (completion("", finish="error"), "EndpointFailureError"),
    "aborted": (completion("4", finish="abort"), "EndpointFailureError"),
    "choice with an error": (
        {"choices": [{"error": {"code": 502}, "message": {"role": "assistant", "content": ""}}]},
        "EndpointFailureError",
    ),
    "an empty message": ({"choices": [{"message": {}}]}, "MalformedAnswerError"),
    "nothing said, and no end": ({"choices": [{"message": {"content": None}}]}, "MalformedAnswerError"),
    "nothing but the end of a stream": (events(), "TruncatedAnswerError"),
    "nothing but usage": (events({"choices": [], "usage": {"prompt_tokens": 3}}), "TruncatedAnswerError"),
    "error in a stream's choice": (events({"choices": [{"error": "died", "delta": {}}]}), "EndpointFailureError"),
    "choices of an event as a number": (events({"choices": 5}), "MalformedAnswerError"),
    "tokens without end": (
        {"choices": [{**TOLD, "token_ids": [float("inf")], "logprobs": {"content": [{"logprob": 0}]}}]},
        "MalformedAnswerError",
    ),
    "a log-prob that is none": (
        {"choices": [{**TOLD, "token_ids": [1], "logprobs": {"content": [{"logprob": float("nan")}]}}]},
        "MalformedAnswerError",
    ),
    "log-probs as a number": ({"choices": [{**TOLD, "token_ids": [1], "logprobs": 7}]}, "MalformedAnswerError"),
    "call without name": (completion(None, calls=[{"function": {"arguments": "{}"}}]), "MalformedAnswerError"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_passing_faults_are_retried_and_then_named(fault: str) -> None:
    answer, kind = FAULTS[fault]
    answer = answer if isinstance(answer, bytes) else http(answer)

    async with Server(lambda request, n: answer if n < 2 else GOOD) as server, policy_for(server) as policy:
        reply = await policy.session([]).reply(QUESTION)
    assert (reply.message.content, reply.metadata["attempts"]) == ("4", 3)
    assert policy.errors == {kind: 2}

    async with Server(lambda request, n: answer) as server, policy_for(server) as policy:
        with pytest.raises(GeneratorError) as caught:
            await policy.session([]).reply(QUESTION)
    assert (type(caught.value).__name__, len(server.requests)) == (kind, 3)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {"error": {"message": "bad key"}}, "AccessDeniedError"),
        (404, {"message": "no model m"}, "NoSuchModelError"),
        (402, {}, "OutOfCreditError"),
        (429, {"error": {"message": "pay", "code": "insufficient_quota"}}, "OutOfCreditError"),
        (400, {"error": {"message": "temperature must be 1"}}, "RequestRefusedError"),
    ],
)
async def test_what_cannot_succeed_is_not_asked_again(status: int, body: Any, kind: str) -> None:
    async with Server(lambda request, n: http(body, status)) as server, policy_for(server) as policy:
        with pytest.raises(GeneratorError) as caught:
            await policy.session([]).reply(QUESTION)
    assert (type(caught.value).__name__, len(server.requests)) == (kind, 1)
    assert (policy.fatal is not None) == (kind != "RequestRefusedError")


async def test_an_empty_answer_that_says_why_it_ends_is_the_models() -> None:
    for answer in (completion(None), events(delta(role="assistant"), delta(finish="stop"))):
        reply, _ = await ask(lambda request, n, answer=answer: answer)
        assert reply.message == Message(role="assistant")


async def test_an_endpoint_that_never_answers() -> None:
    async with (
        Server(lambda request, n: None if n == 0 else GOOD) as server,
        policy_for(server, timeout_s=0.2) as policy,
    ):
        reply = await policy.session([]).reply(QUESTION)
    assert reply.metadata["attempts"] == 2
    assert policy.errors == {"EndpointTimeoutError": 1}


async def test_a_dead_endpoint() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = EndpointOptions(model="m", base_url=f"http://127.0.0.1:{port}/v1", retries=1)
    async with EndpointPolicy(options, sleep=Naps()) as policy:
        with pytest.raises(GeneratorError, match="start the server, or check --base-url"):
            await policy.check()
        with pytest.raises(GeneratorError, match="no connection"):
            await policy.session([]).reply(QUESTION)
    assert policy.errors == {"EndpointUnreachableError": 2}


async def test_the_check_names_the_model_that_was_meant() -> None:
    models = {"data": [{"id": "qwen3-8b", "owned_by": "vllm"}]}
    async with Server(lambda request, n: GOOD, models=models) as server, policy_for(server, model="qwen3-8") as policy:
        with pytest.raises(UsageError, match="did you mean 'qwen3-8b'"):
            await policy.check()


async def test_a_refused_model_is_answered_with_what_is_served() -> None:
    models = {"data": [{"id": "large"}, {"id": "small"}]}
    refused = http({"error": {"message": "no such model"}}, 404)
    async with Server(lambda request, n: refused, models=models) as server, policy_for(server, model="smal") as policy:
        await policy.check()  # lists of hosted endpoints are not always whole: the answer counts
        with pytest.raises(GeneratorError, match="did you mean 'small'"):
            await policy.session([]).reply(QUESTION)


@pytest.mark.parametrize(
    ("key", "fix"), [(None, "set FORGE_ENV_TEST_KEY"), ("sk-1", "the key in FORGE_ENV_TEST_KEY is")]
)
async def test_a_refused_key_is_named(key: str | None, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if key:
        monkeypatch.setenv("FORGE_ENV_TEST_KEY", key)
    refused = http({"error": {"message": "bad key"}}, 401)
    async with (
        Server(lambda request, n: refused) as server,
        policy_for(server, api_key_env="FORGE_ENV_TEST_KEY") as policy,
    ):
        with pytest.raises(GeneratorError) as caught:
            await policy.session([]).reply(QUESTION)
    assert fix in (caught.value.fix or "")
    assert server.headers[0].get("authorization") == (f"Bearer {key}" if key else None)


@pytest.mark.parametrize("key", [" sk-1\n", "sk-1"])
async def test_a_key_is_freed_of_blanks(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_ENV_TEST_KEY", key)
    _, server = await ask(lambda request, n: GOOD, api_key_env="FORGE_ENV_TEST_KEY")
    assert server.headers[0]["authorization"] == "Bearer sk-1"


@pytest.mark.parametrize("key", ["sk\u201csecret", "sk\nsecret", "sk\x7fsecret", "skésecret"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_ENV_TEST_KEY", key)
    with pytest.raises(UsageError, match="the API key in FORGE_ENV_TEST_KEY") as caught:
        EndpointPolicy(EndpointOptions(model="m", api_key_env="FORGE_ENV_TEST_KEY"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [404, 429, 500, 503])
async def test_unavailable_list_of_models(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.forge_env.endpoint.server.NO_LIST", http({"error": {"message": "not now"}}, status))
    async with Server(lambda request, n: GOOD) as server, policy_for(server) as policy:
        await policy.check()
        reply = await policy.session([]).reply(QUESTION)
    assert reply.message.content == "4"


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_shows_before_anything_is_asked(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.forge_env.endpoint.server.NO_LIST", http({"error": {"message": "bad key"}}, status))
    async with Server(lambda request, n: GOOD) as server, policy_for(server) as policy:
        with pytest.raises(GeneratorError, match="bad key"):
            await policy.check()


@pytest.mark.parametrize("listed", [{"data": "none"}, {"data": [3, {"id": None}]}, [], "x"])
async def test_a_list_of_models_in_another_shape_is_no_trouble(listed: Any) -> None:
    async with Server(lambda request, n: GOOD, models=listed) as server, policy_for(server) as policy:
        await policy.check()
        reply = await policy.session([]).reply(QUESTION)
    assert reply.message.content == "4"


async def test_delays_grow_vary_and_obey_retry_after() -> None:
    answers = [http({}, 500), http({}, 500), http({}, 429, {"retry-after": "7"}), http(GOOD)]
    async with Server(lambda request, n: answers[n]) as server, policy_for(server, retries=5) as policy:
        await policy.session([]).reply(QUESTION)
        first, second, third = policy._sleep.seconds
    assert 0.25 <= first <= 0.75
    assert 0.5 <= second <= 1.5
    assert third == 7.0


@pytest.mark.parametrize(
    ("asked", "waited"),
    [
        ("7", 7.0),
        ("86400", 20.0),
        ("1e308", 20.0),
        ("1e999", 20.0),
        ("99999999999999999999", 20.0),
        ("Thu, 31 Dec 2099 23:59:59 GMT", 20.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("-5", 0.0),
        ("nan", 0.0),
        ("soon", 0.0),
        ("", 0.0),
    ],
)
async def test_retry_after_is_obeyed_within_reason_and_named_beyond_it(asked: str, waited: float) -> None:
    """`nan` was slept for, and a date of 2099 was waited for, ten minutes at a time."""
    answers = [http({}, 429, {"retry-after": asked})] * 3 + [http(GOOD)]
    options = {"retries": 5, "first_delay_s": 0.0, "longest_delay_s": 20.0}
    told: list[str] = []
    async with Server(lambda request, n: answers[n]) as server, policy_for(server, **options) as policy:
        policy.tell = told.append
        await policy.session([]).reply(QUESTION)
        assert policy._sleep.seconds == [waited] * 3
    assert len(told) == (waited == 20.0), "once, however often it asks"
    assert all("retrying after 20.0s (longest_delay_s)" in text for text in told)


async def test_pauses_before_retries_can_be_ended() -> None:
    """Each request is then tried once more, and no more."""
    never = asyncio.Event()
    paused = asyncio.Event()

    async def sleep(seconds: float) -> None:
        paused.set()
        await never.wait()

    async with Server(lambda request, n: http({}, 429, {"retry-after": "30"})) as server:
        options = EndpointOptions(model="m", base_url=server.url, retries=6)
        async with EndpointPolicy(options, sleep=sleep) as policy:
            asking = asyncio.ensure_future(policy.session([]).reply(QUESTION))
            await paused.wait()
            policy.stop_waiting()
            with pytest.raises(GeneratorError, match="429"):
                await asking
    assert len(server.requests) == 2


async def test_tolerated_shapes() -> None:
    calls = [
        {"function": {"name": "add", "arguments": {"a": 3}}},
        {"id": "x", "function": {"name": "add", "arguments": None}},
        {"id": "x", "function": {"name": "add", "arguments": "not json"}},
    ]
    parts: Any = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    reply, _ = await ask(lambda request, n: completion(parts, calls=calls))
    assert reply.message.content == "42"
    assert [call.function.arguments for call in reply.message.tool_calls] == ['{"a": 3}', "{}", "not json"]
    assert len({call.id for call in reply.message.tool_calls}) == 3


async def test_numbers_as_ids_of_calls_are_texts() -> None:
    calls = [{"id": number, "function": {"name": "add", "arguments": "{}"}} for number in (0, 7)]
    reply, _ = await ask(lambda request, n: completion(None, calls=calls))
    assert [call.id for call in reply.message.tool_calls] == ["0", "7"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_older_form_of_a_call(stream: bool) -> None:
    def answer(request: dict[str, Any], n: int) -> Any:
        if stream:
            pieces = [{"name": "add", "arguments": '{"a"'}, {"arguments": ": 3}"}]
            return events(*(delta(function_call=piece) for piece in pieces), delta(finish="function_call"))
        message = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 3}'}}
        return {"choices": [{"index": 0, "finish_reason": "function_call", "message": message}]}

    reply, _ = await ask(answer, stream=stream)
    assert [(call.function.name, call.function.arguments) for call in reply.message.tool_calls] == [("add", '{"a": 3}')]


async def test_an_answer_without_end_is_cut_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_env.endpoint.http.MAX_ANSWER_BYTES", 1000)
    async with Server(lambda request, n: completion("4" * 2000)) as server, policy_for(server) as policy:
        with pytest.raises(GeneratorError, match="larger than"):
            await policy.session([]).reply(QUESTION)
    assert len(server.requests) == 1


async def test_cancelling_a_request_frees_its_place() -> None:
    never = lambda request, n: None if n == 0 else GOOD  # noqa: E731
    async with Server(never) as server, policy_for(server, concurrency=1) as policy:
        stuck = asyncio.create_task(policy.session([]).reply(QUESTION))
        await server.asked.wait()
        waiting = asyncio.create_task(policy.session([]).reply(QUESTION))
        await asyncio.sleep(0)
        stuck.cancel()
        reply = await waiting
    assert reply.message.content == "4"
    assert policy.limiter.in_flight == 0


async def test_many_requests_share_few_places() -> None:
    async def slowly(request: dict[str, Any], n: int) -> Any:
        await asyncio.sleep(0)
        return GOOD

    async with Server(slowly) as server, policy_for(server, concurrency=8) as policy:
        replies = await asyncio.gather(*(policy.session([]).reply(QUESTION) for _ in range(200)))
    assert len(replies) == 200
    assert server.most_in_flight <= 8


# --- what goes back to the endpoint is what the model said


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "reasoning_details"])
@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_go_back_with_the_calls_of_their_turn(field: str, stream: bool) -> None:
    detail: dict[str, Any] = {"type": "reasoning.text", "index": 0, "text": "I add.", "signature": "s"}
    thoughts: Any = [detail] if field == "reasoning_details" else "I add."
    pieces: list[Any] = [{**detail, "text": "I "}, {**detail, "text": "add."}] if field == "reasoning_details" else []

    def behave(request: dict[str, Any], n: int) -> Any:
        if n:
            return completion("4")
        if not stream:
            data = completion(None, calls=[tool_call("add", {"a": 3})])
            data["choices"][0]["message"][field] = thoughts
            return data
        told = [delta(**{field: [piece]}) for piece in pieces] or [delta(**{field: "I "}), delta(**{field: "add."})]
        return events(*told, delta(tool_calls=[{"index": 0, **tool_call("add", {"a": 3})}]), delta(finish="tool_calls"))

    async with Server(behave) as server, policy_for(server, stream=stream) as policy:
        trajectory = await fe.run_episode(Arithmetic, policy, seed=3)
    assert (trajectory.reward, trajectory.turns[0].message.reasoning_content) == (1.0, "I add.")
    [turn] = [message for message in server.requests[1]["messages"] if message["role"] == "assistant"]
    assert turn[field] == thoughts


async def test_an_endpoint_that_refuses_thoughts_is_sent_none() -> None:
    def behave(request: dict[str, Any], n: int) -> Any:
        if any("reasoning_content" in message for message in request["messages"]):
            return http({"error": {"message": "messages.2: property 'reasoning_content' is unsupported"}}, 400)
        answers = sum(message["role"] == "tool" for message in request["messages"])
        data = completion("4") if answers == 2 else completion(None, calls=[tool_call("add", {"a": 3}, f"c{answers}")])
        data["choices"][0]["message"]["reasoning_content"] = "hm"
        return data

    async with Server(behave) as server, policy_for(server) as policy:
        for _ in range(2):
            trajectory = await fe.run_episode(Arithmetic, policy, seed=3)
            assert (trajectory.reward, len(trajectory.turns)) == (1.0, 3)
        assert policy.errors == {}
    assert len(server.requests) == 3 + 1 + 3, "it was refused once"


async def test_another_refusal_is_told_as_it_is() -> None:
    def behave(request: dict[str, Any], n: int) -> Any:
        if n:
            return http({"error": {"message": "unknown tool_call_id"}}, 400)
        data = completion(None, calls=[tool_call("add", {"a": 3})])
        data["choices"][0]["message"]["reasoning"] = "hm"
        return data

    async with Server(behave) as server, policy_for(server) as policy:
        session = policy.session(TOOLS)
        await session.reply(QUESTION)
        with pytest.raises(GeneratorError, match="unknown tool_call_id"):
            await session.reply([Message(role="tool", content="4", tool_call_id="call_0")])
        assert not policy.refuses_reasoning


THOUGHT = '<think>\nI could <tool_call>{"name": "add"}</tool_call>.\n</think>\n\n'
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


@pytest.mark.parametrize("tools", ["native", "text"])
async def test_calls_in_the_text_are_read_and_go_back_as_they_were(tools: str) -> None:
    """A server without parsers."""
    async with (
        Server(lambda request, n: completion([f"{THOUGHT}So: {CALLED}", f"{THOUGHT}4\n"][n])) as server,
        policy_for(server, tools=tools) as policy,
    ):
        trajectory = await fe.run_episode(Arithmetic, policy, seed=3)
    first, last = (turn.message for turn in trajectory.turns)
    assert (trajectory.reward, trajectory.metrics["tool_calls"]) == (1.0, 1.0)
    assert (first.content, last.content) == ("So:", "4")
    assert first.reasoning_content == last.reasoning_content == 'I could <tool_call>{"name": "add"}</tool_call>.'
    assert server.requests[1]["messages"][-2:] == [
        {"role": "assistant", "content": f"{THOUGHT}So: {CALLED}"},
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"},
    ]


async def test_a_malformed_call_is_answered_with_what_is_wrong_with_it() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 3}\n</tool_call>'
    async with (
        Server(lambda request, n: completion([text, CALLED, "4"][n])) as server,
        policy_for(server) as policy,
    ):
        trajectory = await fe.run_episode(Arithmetic, policy, seed=3)
    assert (trajectory.reward, trajectory.metrics["tool_errors"]) == (1.0, 1.0)
    said, answer = server.requests[1]["messages"][-2:]
    assert said == {"role": "assistant", "content": text}
    assert (
        "the tool call could not be read: it is not valid JSON: it ends too early, at line 1, column 38"
        in (answer["content"])
    )


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        *((word, "length") for word in ("length", "model_length", "max_tokens", "MAX_TOKENS", "max_output_tokens")),
        *((word, "length") for word in ("MaxTokens", "max-tokens", "incomplete", "context_length_exceeded")),
        *((word, "content_filter") for word in ("content_filter", "ContentFilter", "SAFETY", "refusal")),
        *((word, "stop") for word in ("stop", "eos", "end_turn", "tool_calls", "STOP")),
    ],
)
async def test_why_a_reply_ended(word: str, reason: str) -> None:
    reply, _ = await ask(lambda request, n: completion(finish=word))
    assert reply.stop_reason == reason
