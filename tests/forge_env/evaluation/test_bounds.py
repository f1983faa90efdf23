"""Bounds on a reply that the model's context can't hold: never the model's zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.endpoint.policy import blames_bound, largest
from forge_env.errors import UsageError
from tests.forge_env.endpoint.server import Server, completion, http, tool_call
from tests.forge_env.evaluation.toys import Sums

QUICK: dict[str, Any] = {"retries": 1, "first_delay_s": 0.0, "sample_retries": 0}
CONTEXT = 1024
PROMPT = 50


def right(request: dict[str, Any]) -> dict[str, Any]:
    question = next(message for message in request["messages"] if message["role"] == "user")
    return completion(str(int(question["content"].split()[0]) + 1))


def refused(message: str) -> bytes:
    return http({"error": {"message": message, "code": 400}}, 400)


def alone(request: dict[str, Any], n: int) -> Any:
    """Refuses a bound that is larger than the context, as vLLM does."""
    bound = request.get("max_tokens") or 0
    text = f"max_tokens={bound} cannot be greater than max_model_len=max_total_tokens={CONTEXT}. Please request fewer"
    return refused(text) if bound > CONTEXT else right(request)


def together(request: dict[str, Any], n: int) -> Any:
    """Refuses prompt and bound that are larger than the context together."""
    bound = request.get("max_tokens") or 0
    text = (
        f"This model's maximum context length is {CONTEXT} tokens. However, you requested {PROMPT + bound} tokens "
        f"({PROMPT} in the messages, {bound} in the completion). Please reduce the length."
    )
    return refused(text) if bound + PROMPT > CONTEXT else right(request)


def output(request: dict[str, Any], n: int) -> Any:
    """Refuses a bound for being larger than any reply."""
    bound = request.get("max_tokens") or 0
    return refused(f"max_tokens: {bound} > 512, which is the limit") if bound > 512 else right(request)


Behave = Callable[[dict[str, Any], int], Any]


@pytest.mark.parametrize("behave", [alone, together, output])
@pytest.mark.parametrize("limit", [CONTEXT - 10, CONTEXT, CONTEXT + 1, 4000])
async def test_token_limit_near_or_above_the_context(behave: Behave, limit: int, tmp_path: Path) -> None:
    async with Server(behave) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=tmp_path / "out", token_limit=limit, **QUICK
        )
    item = result.summary.environments["Sums"]
    assert (item.samples, item.truncated, item.invalid) == (12, {}, {})
    assert item.score.value == 1.0


@pytest.mark.parametrize("behave", [alone, together, output])
async def test_a_users_bound_above_the_context_ends_the_run_with_its_fix(behave: Behave, tmp_path: Path) -> None:
    async with Server(behave) as server:
        with pytest.raises(UsageError, match="lower --max-tokens"):
            await fe.evaluate_async(Sums, "m", base_url=server.url, out=tmp_path / "out", max_tokens=4000, **QUICK)


async def test_a_users_bound_that_only_this_prompt_leaves_no_room_for_is_lowered(tmp_path: Path) -> None:
    async with Server(together) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=tmp_path / "out", max_tokens=CONTEXT - 20, **QUICK
        )
    item = result.summary.environments["Sums"]
    assert (item.samples, item.truncated, item.invalid) == (12, {}, {})


@pytest.mark.parametrize("settings", [{"token_limit": 4000}, {"max_tokens": 1000}, {}])
async def test_a_conversation_that_is_full_is_truncated(settings: dict[str, Any], tmp_path: Path) -> None:
    """Whatever bound is sent, and without one: every conversation is full at its second turn."""

    def behave(request: dict[str, Any], n: int) -> Any:
        if len(request["messages"]) > 2:
            return refused(
                f"This model's maximum context length is {CONTEXT} tokens. However, your prompt contains more"
            )
        return (
            together(request, n)
            if request.get("max_tokens", 0) > 900
            else completion(None, calls=[tool_call("add", {"a": 1})])
        )

    async with Server(behave) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=tmp_path / "out", num_tasks=3, **settings, **QUICK
        )
    item = result.summary.environments["Sums"]
    assert (item.samples, item.truncated, item.invalid) == (3, {"context": 3}, {})


async def test_the_token_limit_holds_where_the_endpoint_takes_no_bound(tmp_path: Path) -> None:
    """Its replies of 5 tokens each are counted: the third goes beyond."""

    def behave(request: dict[str, Any], n: int) -> Any:
        return (
            refused("max_tokens is too large")
            if "max_tokens" in request
            else completion(None, calls=[tool_call("add", {"a": 1})])
        )

    async with Server(behave) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=tmp_path / "out", num_tasks=1, token_limit=12, **QUICK
        )
    item = result.summary.environments["Sums"]
    assert (item.truncated, item.invalid) == ({"tokens": 1}, {})
    assert ["max_tokens" in request for request in server.requests] == [True, False, False, False]


async def test_what_has_nothing_to_do_with_lengths_is_not_asked_again(tmp_path: Path) -> None:
    async with Server(lambda request, n: refused("temperature must be 1")) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=tmp_path / "out", num_tasks=1, token_limit=12, **QUICK
        )
    assert result.summary.environments["Sums"].invalid == {"RequestRefusedError": 1}
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("max_tokens=4000 cannot be greater than max_model_len=max_total_tokens=1024.", 1024),
        ("This model's maximum context length is 128,000 tokens. However, you requested 130000 tokens", 128000),
        ("max_tokens is too large: 100000. This model supports at most 16384 completion tokens", 16384),
        ("max_tokens: 100000 > 8192, which is the maximum allowed number of output tokens", 8192),
        ("`inputs` tokens + `max_new_tokens` must be <= 8193. Given: 10 and 10000", 8193),
        ("maxOutputTokens value of 100000 but the supported range is from 1 to 65537", None),
    ],
)
def test_what_refusals_say_of_the_largest_bound(text: str, tokens: int | None) -> None:
    assert blames_bound(text)
    assert largest(text) == tokens
