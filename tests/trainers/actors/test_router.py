"""Calls go where their prompt is cached, unless too many others do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainers.actors.router import PREFIXES_REMEMBERED, Router


class Conversation:
    """A session, as far as a router knows it."""


def test_calls_of_a_conversation_and_equal_prefixes_share_a_replica() -> None:
    router, mine = Router(3, slack=8), Conversation()
    first = router.choose([0, 1, 2], mine, "abc")
    assert router.choose([0, 1, 2], Conversation(), "abc") == first, "the group's prompt is cached there"
    assert router.choose([0, 1, 2], Conversation(), "x") != first
    assert router.choose([0, 1, 2], mine, "abcde") == first


def test_a_conversation_leaves_a_replica_that_is_gone_or_too_busy() -> None:
    router, mine = Router(2, slack=2), Conversation()
    home = router.choose([0, 1], mine)
    assert router.choose([1 - home], mine) == 1 - home
    for _ in range(3):
        assert router.choose([0, 1], mine) == 1 - home
    assert router.choose([0, 1], mine) == home, "three ahead"


@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=200),
)
def test_balance(replicas: int, slack: int, requests: list[tuple[int, int, bool]]) -> None:
    router, running = Router(replicas, slack), []
    conversations = [Conversation() for _ in range(5)]
    for prefix, session, end in requests:
        before = list(router.in_flight)
        replica = router.choose(range(replicas), conversations[session], prefix)
        assert before[replica] <= min(before) + slack
        running.append(replica)
        if end:
            router.done(running.pop(0))
    for replica in running:
        router.done(replica)
    assert router.in_flight == [0] * replicas


def test_every_conversation_returns_to_its_replica_while_it_lives_and_is_forgotten_then() -> None:
    router = Router(4, slack=16)
    conversations = [Conversation() for _ in range(10_000)]
    homes: list[int] = []
    for number, conversation in enumerate(conversations):
        homes.append(router.choose(range(4), conversation, number))
        if number >= 100:
            router.done(homes[number - 100])
    for replica in homes[-100:]:
        router.done(replica)
    assert min(homes.count(replica) for replica in range(4)) > 2400
    for number, conversation in enumerate(conversations):
        assert router.choose(range(4), conversation, (number, 0)) == homes[number]
        router.done(homes[number])
    conversations.clear()
    del conversation
    assert router.sessions == {}
    assert len(router._prefixes) == PREFIXES_REMEMBERED
