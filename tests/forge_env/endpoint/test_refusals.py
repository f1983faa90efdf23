"""Requests that an endpoint refuses: for good, for their content, or because it is elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.endpoint.policy import EndpointOptions, EndpointPolicy
from forge_env.errors import GeneratorError
from tests.forge_env.endpoint.server import Server, completion, delta, events, http, tool_call
from tests.forge_env.evaluation.toys import Sums

QUICK: dict[str, Any] = {"retries": 1, "first_delay_s": 0.0, "sample_retries": 0}
ASK = [fe.Message(role="user", content="2 + 2?")]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results"


def number(request: dict[str, Any]) -> int:
    return int(next(message for message in request["messages"] if message["role"] == "user")["content"].split()[0])


def right(request: dict[str, Any]) -> dict[str, Any]:
    return completion(str(number(request) + 1))


@pytest.mark.parametrize(
    ("status", "refused"), [(401, {2}), (403, {2}), (403, {0}), (403, {0, 5}), (404, {2}), (404, {0, 1})]
)
async def test_a_prompt_that_is_always_refused_costs_its_own_sample(status: int, refused: set[int], out: Path) -> None:
    """Also where it is the first of the run, and when the run is resumed."""
    text = http({"error": {"message": "no"}}, status)
    answers = lambda request, n: text if number(request) in refused else right(request)  # noqa: E731
    async with Server(answers) as server:
        options = {"base_url": server.url, "out": out, "epochs": 3, "max_samples": 1, **QUICK}
        first = await fe.evaluate_async(Sums, "m", **options)
        again = await fe.evaluate_async(Sums, "m", resume=True, **options)
    for result in (first, again):
        item = result.summary.environments["Sums"]
        assert item.samples == 36 - 3 * len(refused)
        assert sum(item.invalid.values()) == 3 * len(refused)
    assert first.error is None
    assert again.error is None or status == 401
    late = [sample.error or "" for sample in first.samples if not sample.valid][-1]
    assert "no" in late
    assert ("OPENAI_API_KEY" in late) == (status == 401)


@pytest.mark.parametrize("status", [403, 404])
async def test_refusing_everything_ends_the_run(status: int, out: Path) -> None:
    async with Server(lambda request, n: http({"error": {"message": "no"}}, status)) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, max_samples=1, **QUICK)
        short = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out.with_name("b"), num_tasks=1, **QUICK)
    assert len(server.requests) == 4
    for error in (result.error, short.error):
        assert "rejects every request" in str(error)
    assert result.error.fix


async def test_a_row_of_refusals_ends_a_run_that_began_well(out: Path) -> None:
    no = http({"error": {"message": "no"}}, 403)
    async with Server(lambda request, n: no if n >= 3 else right(request)) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=out, max_samples=1, max_failures=4, **QUICK
        )
    assert "last 4 samples were all lost" in str(result.error)
    assert result.summary.environments["Sums"].samples == 3


@pytest.mark.parametrize(
    "answer",
    [
        completion("", finish="content_filter"),
        completion(None, finish="content_filter"),
        events(delta(role="assistant"), delta(finish="content_filter")),
        http({"error": {"message": "The response was filtered", "code": "content_filter"}}, 400),
        http({"error": {"message": "your prompt was flagged by our moderation"}}, 403),
    ],
)
async def test_what_a_filter_stops_is_named_and_not_scored(answer: Any, out: Path) -> None:
    async with Server(lambda request, n: answer if number(request) < 3 else right(request)) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, **QUICK)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.invalid, result.error) == (9, {"ContentFilterError": 3}, None)
    assert len(server.requests) == 12


async def test_what_a_filter_left_over_is_the_models() -> None:
    async with Server(lambda request, n: completion("4", finish="content_filter")) as server:
        options = EndpointOptions(model="m", base_url=server.url)
        async with EndpointPolicy(options) as policy:
            reply = await policy.session([]).reply(ASK)
    assert (reply.message.content, reply.stop_reason) == ("4", "content_filter")


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "block",
    [
        f'{{"name": "add", "arguments": "{DEEP}"}}',
        f'{{"name": "add", "arguments": {DEEP}',
        '{"name": "add", "arguments": ' + "[" * 900 + "]" * 900 + "}",
        '{"name": "add", "arguments": "' + "[" * 900 + "]" * 900 + '"}',
    ],
)
async def test_arguments_nested_without_end_are_the_models_to_repair(block: str, out: Path) -> None:
    def behave(request: dict[str, Any], n: int) -> Any:
        return completion(f"<tool_call>{block}</tool_call>") if n == 0 else completion("1")

    async with Server(behave) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, num_tasks=1, tools="text", **QUICK)
    (sample,) = result.samples
    assert (sample.valid, sample.score, sample.turns) == (True, 1.0, 2)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize(
    ("location", "fix"),
    [
        ("https://new.example/v1/chat/completions", "--base-url https://new.example/v1"),
        ("/api/v1/chat/completions", "/api/v1"),
        ("https://new.example/login?next=x", "check --base-url"),
        ("", "check --base-url"),
        ("http://[", "check --base-url"),
    ],
)
async def test_an_endpoint_that_has_moved_says_where(status: int, location: str, fix: str, out: Path) -> None:
    """Nothing is asked again, and the key goes nowhere else."""
    headers = {"location": location} if location else {}
    async with Server(lambda request, n: http(b"", status, headers)) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, max_samples=1, **QUICK)
    assert "has moved" in str(result.error)
    assert location.split("?")[0] in str(result.error) or location == "http://["
    assert (result.error.fix or "").endswith(fix)
    assert len(server.requests) == 1
    assert result.summary.environments["Sums"].invalid == {"RedirectedError": 1}


async def test_moved_endpoint_is_named_early(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = http(b"", 308, {"location": "https://new.example/v1/models"})
    monkeypatch.setattr("tests.forge_env.endpoint.server.NO_LIST", moved)
    async with (
        Server(lambda request, n: completion()) as server,
        EndpointPolicy(EndpointOptions(model="m", base_url=server.url)) as policy,
    ):
        with pytest.raises(GeneratorError, match=r"--base-url https://new\.example/v1"):
            await policy.check()


async def test_a_stream_of_two_choices_gives_the_first() -> None:
    call = {"index": 0, **tool_call("add", {"a": 1})}
    other: list[dict[str, Any]] = [
        {"choices": [{"index": 1, "delta": {"content": "7", "tool_calls": [call]}, "finish_reason": None}]},
        {"choices": [{"index": 1, "delta": {}, "finish_reason": "length"}]},
    ]
    pieces = [delta(content="1"), other[0], delta(finish="stop"), other[1]]
    async with (
        Server(lambda request, n: events(*pieces)) as server,
        EndpointPolicy(EndpointOptions(model="m", base_url=server.url, stream=True)) as policy,
    ):
        reply = await policy.session([]).reply(ASK)
    assert (reply.message.content, reply.message.tool_calls, reply.stop_reason) == ("1", [], "stop")
