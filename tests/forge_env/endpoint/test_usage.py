"""Tokens told, estimated and limited: whatever an endpoint says of them, limits and budgets act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.endpoint.answers import MOST_TOKENS, fill_in, told
from forge_env.evaluation.rescoring import rescore
from forge_env.policy import Reply
from forge_env.types import Message
from tests.forge_env.endpoint.server import Server, completion, http, tool_call
from tests.forge_env.evaluation.toys import Sums

QUICK: dict[str, Any] = {"retries": 0, "sample_retries": 0}
WORDS = "four " * 80
"""400 bytes: an estimate of 100 tokens."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results"


def untold(text: str, **more: Any) -> dict[str, Any]:
    answer = completion(text, **more)
    del answer["usage"]
    return answer


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner)
)


@given(
    st.dictionaries(st.sampled_from(["prompt_tokens", "completion_tokens", "prompt_tokens_details"]), json_values)
    | json_values,
    st.text(),
)
def test_every_usage_is_made_credible(given_usage: Any, text: str) -> None:
    reply = Reply(message=Message(role="assistant", content=text), metadata={"usage": told(given_usage)})
    fill_in(reply, {"messages": [{"role": "user", "content": "2 + 2?"}]})
    usage = reply.metadata["usage"]
    assert 0 < usage["prompt"] <= MOST_TOKENS
    assert 0 <= usage["completion"] <= MOST_TOKENS
    assert (usage["completion"] > 0) or not text
    assert usage.get("cached", 0) <= usage["prompt"]


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 10**400, "completion_tokens": 5},
        {"prompt_tokens": -(10**6), "completion_tokens": -50000},
        {"prompt_tokens": 0, "completion_tokens": 0},
        {"prompt_tokens": True, "completion_tokens": "many"},
        7,
        None,
    ],
)
async def test_absurd_figures_end_no_run_and_are_replaced(usage: Any, out: Path) -> None:
    prices = out.with_name("prices.yaml")
    prices.write_text("m: {input: 1.0, output: 10.0}\n")
    async with Server(lambda request, n: completion("5", usage=usage)) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, prices=prices, **QUICK)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.invalid, item.estimated_requests) == (12, {}, 12)
    assert 12 <= item.prompt_tokens < 12_000
    assert item.cost > 0


async def test_without_a_count_a_budget_acts_by_an_estimate_and_says_so(out: Path) -> None:
    prices = out.with_name("prices.yaml")
    prices.write_text("m: {input: 0, output: 10.0}\n")  # 100 tokens estimated: 0.001 a sample
    async with Server(lambda request, n: untold(WORDS)) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=out, prices=prices, budget=0.0035, max_samples=1, **QUICK
        )
    assert "budget" in str(result.error)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.completion_tokens, item.estimated_requests) == (4, 400, 4)
    assert "4 of 4 replies had no token count" in (out / "report.md").read_text()
    assert (out / "run.log").read_text().count("does not count tokens") == 1


async def test_a_token_limit_binds_in_a_single_turn_and_rescoring_keeps_it(out: Path) -> None:
    """The endpoint ignores what it was asked for: the answer beyond the limit is recorded and not scored."""
    environment = "tests.forge_env.evaluation.toys:Sums"
    async with Server(lambda request, n: completion("1")) as server:
        right = await fe.evaluate_async(
            environment, "m", base_url=server.url, out=out, num_tasks=1, token_limit=5, **QUICK
        )
        over = await fe.evaluate_async(
            environment, "m", base_url=server.url, out=out.with_name("over"), num_tasks=1, token_limit=4, **QUICK
        )
    assert [request["max_tokens"] for request in server.requests] == [5, 4]
    assert right.summary.environments["Sums"].truncated == {}
    assert right.samples[0].score == 1.0
    item = over.summary.environments["Sums"]
    assert (item.truncated, over.samples[0].score, over.samples[0].turns) == ({"tokens": 1}, 0.0, 1)
    again = await rescore(out.with_name("over"), out.with_name("again"))
    assert (again.changed, again.result.samples[0].truncation) == ([], "tokens")


async def test_each_reply_may_be_as_long_as_what_is_left(out: Path) -> None:
    def behave(request: dict[str, Any], n: int) -> Any:
        if n == 2:
            return completion("1", finish="length", usage={"prompt_tokens": 10, "completion_tokens": 1})
        return completion(None, calls=[tool_call("add", {"a": 1})])

    async with Server(behave) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=out, num_tasks=1, token_limit=11, max_tokens=8, **QUICK
        )
    assert [request["max_tokens"] for request in server.requests] == [8, 6, 1]
    assert result.samples[0].truncation == "tokens"


async def test_a_model_that_knows_the_bound_by_its_other_name_gets_that(out: Path) -> None:
    message = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    refused = http({"error": {"message": message}}, 400)
    async with Server(lambda request, n: refused if "max_tokens" in request else completion("1")) as server:
        result = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=out, token_limit=50, start_concurrency=1, concurrency=1, **QUICK
        )
    assert (result.summary.status, result.summary.request_errors) == ("complete", {})
    assert [request.get("max_completion_tokens") for request in server.requests] == [None] + [50] * 12


async def test_the_other_name_of_the_field_is_lowered_where_it_is_in_use(out: Path) -> None:
    async with Server(lambda request, n: completion("1")) as server:
        await fe.evaluate_async(
            Sums,
            "m",
            base_url=server.url,
            out=out,
            num_tasks=1,
            token_limit=50,
            extra={"max_completion_tokens": 90},
            **QUICK,
        )
    assert "max_tokens" not in server.requests[0]
    assert server.requests[0]["max_completion_tokens"] == 50
