"""Requests go where their prompt is cached, and never far from balance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainers.generator.routing import Router


def test_turns_of_a_conversation_and_equal_prompts_share_a_replica() -> None:
    router = Router(3, slack=8)
    first = router.choose([1, 2, 3], "a")
    assert router.choose([1, 2, 3], "b") == first, "the group's prompt is cached there"
    assert router.choose([9], "c") != first
    assert router.choose([1, 2, 3, 4, 5], "a") == first


def test_a_busy_replica_is_left_for_the_least_busy_one() -> None:
    router = Router(2, slack=2)
    home = router.choose([1], "a")
    for _ in range(2):
        assert router.choose([1], "a") == home
    assert router.choose([1], "a") != home


@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=200),
)
def test_balance(replicas: int, slack: int, requests: list[tuple[int, int, bool]]) -> None:
    router, running = Router(replicas, slack), []
    for prompt, session, end in requests:
        before = list(router.in_flight)
        replica = router.choose([prompt], session)
        assert before[replica] <= min(before) + slack
        running.append(replica)
        if end:
            router.done(running.pop(0))
    for replica in running:
        router.done(replica)
    assert router.in_flight == [0] * replicas


def test_what_is_remembered_is_bounded() -> None:
    router = Router(2)
    for number in range(20_000):
        router.done(router.choose([number], number))
    assert len(router._homes) <= 8192
