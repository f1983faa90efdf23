"""Requests go where their prompt is cached, and never far from balance; weights that are held stay as they are."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.errors import GeneratorError
from trainers.generator.pool import PROMPTS_REMEMBERED, GeneratorPool, HeldWeights, Router
from trainers.generator.types import Completion, EngineFailedError, SamplingOptions, WeightsDroppedError


class Conversation:
    """A session of a policy, as far as a router knows it."""


def test_turns_of_a_conversation_and_equal_prompts_share_a_replica() -> None:
    router, mine = Router(3, slack=8), Conversation()
    first = router.choose([1, 2, 3], mine)
    assert router.choose([1, 2, 3], Conversation()) == first, "the group's prompt is cached there"
    assert router.choose([9], Conversation()) != first
    assert router.choose([1, 2, 3, 4, 5], mine) == first


def test_a_busy_replica_is_left_for_the_least_busy_one() -> None:
    router, mine = Router(2, slack=2), Conversation()
    home = router.choose([1], mine)
    for _ in range(2):
        assert router.choose([1], mine) == home
    assert router.choose([1], mine) != home


@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=200),
)
def test_balance(replicas: int, slack: int, requests: list[tuple[int, int, bool]]) -> None:
    router, running = Router(replicas, slack), []
    conversations = [Conversation() for _ in range(5)]
    for prompt, session, end in requests:
        before = list(router.in_flight)
        replica = router.choose([prompt], conversations[session])
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
        homes.append(router.choose([number], conversation))
        if number >= 100:
            router.done(homes[number - 100])
    for replica in homes[-100:]:
        router.done(replica)
    assert min(homes.count(replica) for replica in range(4)) > 2400
    for number, conversation in enumerate(conversations):
        assert router.choose([number, 0], conversation) == homes[number]
        router.done(homes[number])
    del conversations, conversation
    gc.collect()
    assert len(router._conversations) == 0
    assert len(router._prompts) == PROMPTS_REMEMBERED


@pytest.mark.parametrize(("max_num_seqs", "ahead"), [(4, 1), (64, 8), (512, 64)])
async def test_the_slack_is_an_eighth_of_a_batch(max_num_seqs: int, ahead: int) -> None:
    replicas, mine = [Replica(), Replica()], Conversation()
    calls = []
    for replica in replicas:
        replica.go_on.clear()
    pool = GeneratorPool(replicas, max_num_seqs)
    for _ in range(ahead + 2):
        calls.append(asyncio.ensure_future(pool.generate([1], SamplingOptions(), mine)))
        await asyncio.sleep(0)
    assert [len(replica.asked) for replica in replicas] == [ahead + 1, 1]
    for replica in replicas:
        replica.go_on.set()
    await asyncio.gather(*calls)


prompts = itertools.count()


class Endpoint:
    """A method as an actor's endpoint."""

    def __init__(self, method: Any) -> None:
        self.call_one = self.call = method


class Replica:
    """A generator whose completions end when they may and say which weights they began and ended with."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[dict[str, Any]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.updates: list[int] = []
        self.may_update = asyncio.Event()
        self.may_update.set()
        self.failure: Exception | None = None
        self.generate, self.update_weights = Endpoint(self._generate), Endpoint(self._update)

    async def _generate(self, prompt_ids: list[int], options: dict[str, Any], request_id: str) -> Completion:
        self.asked.append(options)
        began = self.version
        await self.go_on.wait()
        return Completion(prompt_ids, [7], [-1.0], [began], "stop", self.version)

    async def _update(self, version: int) -> dict[str, float]:
        await self.may_update.wait()
        if self.failure is not None:
            raise self.failure
        self.updates.append(version)
        self.version = version
        return {"pull_s": float(version)}


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def ask(pool: GeneratorPool | HeldWeights, session: object = None) -> asyncio.Future[Completion]:
    return asyncio.ensure_future(pool.generate([next(prompts)], SamplingOptions(priority=-3), session))


async def test_one_replica_gets_new_weights_when_nobody_holds_the_old_ones() -> None:
    replica = Replica()
    pool = GeneratorPool([replica])
    async with pool.held() as first, pool.held() as second:
        assert (first.version, second.version) == (0, 0)
        update = asyncio.ensure_future(pool.update_weights(1))
        await settle()
        assert not update.done()
        following = pool.held()
        later = asyncio.ensure_future(following.__aenter__())
        assert (await ask(first)).versions == (await ask(pool)).versions == [0]
        await settle()
        assert not later.done(), "who comes later holds the new weights, so that they arrive at all"
    assert await update == {"pull_s": 1.0}
    assert (await later).version == 1
    await following.__aexit__(None, None, None)


async def test_requests_for_held_weights_go_first() -> None:
    replica = Replica()
    pool = GeneratorPool([replica])
    async with pool.held() as held:
        await asyncio.gather(ask(held), ask(pool))
    (one, other) = (options["priority"] for options in replica.asked)
    assert one < -1000
    assert other == -3


async def test_of_several_the_least_busy_one_is_held_and_comes_back_up_to_date() -> None:
    replicas = [Replica(), Replica(), Replica()]
    pool = GeneratorPool(replicas)
    replicas[0].go_on.clear()
    busy = ask(pool)
    await settle()
    async with pool.held() as held:
        await ask(held)
        assert [len(replica.asked) for replica in replicas] == [1, 1, 0]
        await pool.update_weights(1)
        await pool.update_weights(2)
        assert [replica.updates for replica in replicas] == [[1, 2], [], [1, 2]]
        assert (held.version, (await ask(held)).versions) == (0, [0])
        for _ in range(6):
            assert (await ask(pool, Conversation())).versions == [2]
        async with pool.held() as newer:
            assert (newer.version, (await ask(newer)).versions) == (2, [2])
            assert replicas[2].asked[-1]["priority"] < -1000
            only = [len(replica.asked) for replica in replicas]
            async with pool.held() as shared:
                assert shared.version == 2, "weights that are held already are shared"
            replicas[0].go_on.set()
            await asyncio.gather(*(ask(pool, Conversation()) for _ in range(3)))
            assert len(replicas[0].asked) == only[0] + 3, "one replica is left for all others"
    assert replicas[1].updates == [2]
    await busy


async def test_while_it_catches_up_others_serve_and_a_cancelled_holder_does_not_stop_it() -> None:
    replicas = [Replica(), Replica()]
    pool, release = GeneratorPool(replicas), asyncio.Event()

    async def hold() -> None:
        async with pool.held():
            await release.wait()

    holder = asyncio.ensure_future(hold())
    await settle()
    await pool.update_weights(1)
    replicas[0].may_update.clear()
    release.set()
    await settle()
    holder.cancel()
    await asyncio.gather(holder, return_exceptions=True)
    for _ in range(4):
        assert (await ask(pool, Conversation())).versions == [1]
    assert replicas[0].asked == []
    replicas[0].may_update.set()
    await settle()
    assert (await ask(pool)).versions == [1]
    assert (replicas[0].updates, len(replicas[0].asked)) == ([1], 1)


async def test_new_weights_have_not_arrived_while_an_ordinary_request_samples_from_held_ones() -> None:
    replicas = [Replica(), Replica()]
    pool = GeneratorPool(replicas)
    for replica in replicas:
        replica.go_on.clear()
    requests = [ask(pool), ask(pool)]
    await settle()
    async with pool.held():
        update = asyncio.ensure_future(pool.update_weights(1))
        await settle()
        assert replicas[1].updates == [1]
        assert not update.done()
        replicas[0].go_on.set()
        assert await update == {"pull_s": 1.0}
    replicas[1].go_on.set()
    await asyncio.gather(*requests)


async def test_weights_dropped_meanwhile_are_left_for_the_newer_ones() -> None:
    replicas = [Replica(), Replica()]
    pool = GeneratorPool(replicas)
    async with pool.held():
        await pool.update_weights(1)
        replicas[0].failure = WeightsDroppedError("version 2 is there")
    assert (await ask(pool, Conversation())).versions == [1]
    assert replicas[0].asked == []
    replicas[0].failure = None
    await pool.update_weights(2)
    assert replicas[0].updates == [2]
    assert (await ask(pool)).versions == [2]
    assert len(replicas[0].asked) == 1


async def test_a_replica_that_fails_to_catch_up_ends_the_run() -> None:
    replicas = [Replica(), Replica()]
    pool = GeneratorPool(replicas)

    async def hold() -> None:
        async with pool.held():
            await pool.update_weights(1)
            replicas[0].failure = RuntimeError("no such tensor")

    with pytest.raises(RuntimeError, match="no such tensor"):
        await hold()
    with pytest.raises(EngineFailedError, match="generator 0: no such tensor"):
        pool.check()


@pytest.mark.parametrize("replicas", [1, 2])
async def test_an_error_inside_releases_the_weights(replicas: int) -> None:
    actors = [Replica() for _ in range(replicas)]
    pool = GeneratorPool(actors)
    with pytest.raises(ZeroDivisionError):
        async with pool.held() as held:
            raise ZeroDivisionError
    with pytest.raises(GeneratorError, match="version 0 were released"):
        await ask(held)
    await pool.update_weights(1)
    assert [actor.updates for actor in actors] == [[1]] * replicas
