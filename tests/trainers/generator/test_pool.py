"""Weights that are held stay as they are; a replica that dies comes back with those that the others have."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.errors import GeneratorError
from tests.trainers.buffer import virtual_time
from trainers.actors.remote import ActorDiedError
from trainers.actors.replicas import ReplicaState, ServiceOptions
from trainers.generator.client import REPEATS, GeneratorClient
from trainers.generator.pool import PATIENCE_S, GeneratorPool, HeldWeights
from trainers.generator.types import Completion, Hold, SamplingOptions, WeightsDroppedError, WeightsLostError


class Conversation:
    """A session of a policy, as far as a router knows it."""


@pytest.mark.parametrize(("max_num_seqs", "ahead"), [(4, 1), (64, 8), (512, 64)])
async def test_the_slack_is_an_eighth_of_a_batch(max_num_seqs: int, ahead: int) -> None:
    replicas, mine = [Replica(), Replica()], Conversation()
    calls = []
    for replica in replicas:
        replica.go_on.clear()
    pool, _ = await pool_of(replicas, max_num_seqs)
    for _ in range(ahead + 2):
        calls.append(asyncio.ensure_future(pool.generate([1], SamplingOptions(), mine)))
        await asyncio.sleep(0)
    await settle()
    assert [len(replica.asked) for replica in replicas] == [ahead + 1, 1]
    for replica in replicas:
        replica.go_on.set()
    await asyncio.gather(*calls)


prompts = itertools.count()


class Endpoint:
    """A method as an actor's endpoint: it is called at once, whether or not somebody waits for what it returns."""

    def __init__(self, method: Any) -> None:
        self.call_one = self.broadcast = method

        async def by_rank(*args: Any) -> dict[int, Any]:
            return {0: await method(*args)}

        self.call = lambda *args: asyncio.ensure_future(by_rank(*args))


class Replica:
    """A generator whose completions end when they may and say which weights they began and ended with."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[SamplingOptions] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.updates: list[int] = []
        self.told: list[Any] = []
        self.late_s = 0.0
        self.may_update = asyncio.Event()
        self.may_update.set()
        self.failure: Exception | None = None
        self.running: list[str] = []
        self.aborted: list[str] = []
        self._forge_pids, self._forge_named = (), ""
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gate = Hold()
        self.generate, self.update_weights = Endpoint(self._generate), Endpoint(self._update)
        self.preload = self.halt = Endpoint(self._nothing)
        self.may_set_up = asyncio.Event()
        self.may_set_up.set()
        self.setup = Endpoint(self._set_up)
        self.rests: list[str] = []
        self.sleep, self.wake = Endpoint(partial(self._rest, "sleep")), Endpoint(partial(self._rest, "wake"))
        self.abort = Endpoint(self.aborted.append)
        self.hold, self.release = Endpoint(self._hold), Endpoint(self._release)
        self.get_stats = Endpoint(self._stats)

    def die(self) -> None:
        """Calls under way fail, as Monarch has it, and so do later ones."""
        self.death.set_exception(ActorDiedError("killed"))

    async def _unless_dead(self, event: asyncio.Event) -> None:
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait([waiting, self.death], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.death.done():
            raise ActorDiedError("killed")

    async def _nothing(self) -> None: ...

    async def _set_up(self) -> None:
        await self.may_set_up.wait()
        self.rests.append("loaded")

    async def _rest(self, what: str) -> None:
        if self.death.done():
            raise ActorDiedError("killed")
        self.rests.append(what)

    async def _hold(self) -> None:
        self.gate.held = True

    async def _release(self) -> None:
        self.gate.held = False

    async def _stats(self) -> dict[str, float]:
        return {"tokens": float(len(self.asked)), "in_flight": 0.0}

    async def _generate(
        self, prompt_ids: Any, options: SamplingOptions, request_id: str, held: bool, at_least: int
    ) -> Completion:
        self.gate.check(self.version, held=held, at_least=at_least)
        self.asked.append(options)
        self.running.append(request_id)
        began = self.version
        await self._unless_dead(self.go_on)
        return Completion(prompt_ids, [7], [-1.0], [began], "stop", self.version)

    async def _update(self, version: int, published: Any) -> dict[str, float]:
        await self._unless_dead(self.may_update)
        if self.failure is not None:
            raise self.failure
        self.updates.append(version)
        self.told.append(published)
        self.version = version
        return {"pull_s": version + self.late_s}


class Replicas:
    """What a pool knows of an actor's class; a replica that dies is followed by a new one."""

    mesh_name = "generator"
    num_replicas = 0
    service = ServiceOptions(backoff_s=0.0, max_deaths=2)
    repeatable = frozenset[str]()
    spare = None

    def __init__(self, first: list[Replica]) -> None:
        self.lives = [[replica] for replica in first]
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.buried: list[Replica] = []
        self.fresh: Callable[[], Replica] = Replica

    def prepare_spare(self) -> None:
        """Nothing is prepared."""

    def options(self, num_replicas: int) -> Replicas:
        self.num_replicas = num_replicas
        return self

    def launch(self, number: int) -> Any:
        async def launch(life: int) -> Replica:
            if life:
                await self.may_start.wait()
                self.lives[number].append(self.fresh())
            return self.lives[number][-1]

        return launch

    def watch(self, replica: Replica) -> asyncio.Future[None]:
        async def watch() -> None:
            await asyncio.shield(replica.death)

        return asyncio.ensure_future(watch())

    async def shutdown(self, replica: Replica, *, dead: bool) -> None:
        self.buried.append(replica)


async def pool_of(replicas: list[Replica], max_num_seqs: int = 128) -> tuple[GeneratorPool, Replicas]:
    known = Replicas(replicas)
    pool = GeneratorPool([known.launch(number) for number in range(len(replicas))], known, max_num_seqs)
    pool.model_ready.set()
    await pool.start()
    return pool, known


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def ask(pool: GeneratorPool | HeldWeights, session: object = None, **options: int) -> asyncio.Future[Completion]:
    client = pool.client if isinstance(pool, GeneratorPool) else pool
    return asyncio.ensure_future(client.generate([next(prompts)], SamplingOptions(priority=-3), session, **options))


async def test_one_replica_gets_new_weights_when_nobody_holds_the_old_ones() -> None:
    replica = Replica()
    pool, _ = await pool_of([replica])
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


async def test_of_several_the_least_busy_one_is_held_and_comes_back_up_to_date() -> None:
    replicas = [Replica(), Replica(), Replica()]
    pool, _ = await pool_of(replicas)
    replicas[0].go_on.clear()
    busy = ask(pool)
    await settle()
    async with pool.held() as held:
        await ask(held)
        await settle()
        assert [len(replica.asked) for replica in replicas] == [1, 1, 0]
        await pool.update_weights(1)
        await pool.update_weights(2)
        assert [replica.updates for replica in replicas] == [[1, 2], [], [1, 2]]
        assert (held.version, (await ask(held)).versions) == (0, [0])
        for _ in range(6):
            assert (await ask(pool, Conversation())).versions == [2]
        async with pool.held() as newer:
            assert (newer.version, (await ask(newer)).versions) == (2, [2])
            assert replicas[2].asked[-1].priority < -1000
            only = [len(replica.asked) for replica in replicas]
            async with pool.held() as shared:
                assert shared.version == 2, "weights that are held already are shared"
            replicas[0].go_on.set()
            await asyncio.gather(*(ask(pool, Conversation()) for _ in range(3)))
            assert len(replicas[0].asked) == only[0] + 3, "one replica is left for all others"
    await settle()
    assert replicas[1].updates == [2]
    await busy


async def test_the_slowest_pull_counts_and_whose_it_was_is_told() -> None:
    replicas = [Replica(), Replica()]
    pool, _ = await pool_of(replicas)
    replicas[1].late_s = 2.0
    slowest = {"pull_s": 3.0, "generator0/pull_s": 1.0, "generator1/pull_s": 3.0, "behind": 0.0}
    assert await pool.update_weights(1) == slowest


async def test_while_it_catches_up_others_serve_and_a_cancelled_holder_does_not_stop_it() -> None:
    replicas = [Replica(), Replica()]
    (pool, _), release = await pool_of(replicas), asyncio.Event()

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


async def test_requests_under_way_are_not_waited_for_and_end_where_they_are() -> None:
    replicas = [Replica(), Replica()]
    pool, _ = await pool_of(replicas)
    for replica in replicas:
        replica.go_on.clear()
    requests = [ask(pool), ask(pool)]
    await settle()
    async with pool.held():
        assert await pool.update_weights(1) == {"pull_s": 1.0}
        assert [replica.updates for replica in replicas] == [[], [1]]
        for replica in replicas:
            replica.go_on.set()
        assert [completion.versions for completion in await asyncio.gather(*requests)] == [[0], [0]]


# --- slow ones


def test_a_replica_that_pulls_slowly_delays_only_itself() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica(), Replica()]
        pool, _ = await pool_of(replicas)
        clock = asyncio.get_running_loop().time
        slow = replicas[2]
        slow.go_on.clear()
        asked = [ask(pool) for _ in range(3)]
        await settle()
        assert len(slow.asked) == 1
        slow.may_update.clear()
        for version in (1, 2, 3):
            began = clock()
            assert (await pool.update_weights(version))["behind"] == 1.0
            assert clock() - began == pytest.approx(PATIENCE_S)
            for _ in range(6):
                assert (await ask(pool, Conversation(), at_least=version)).versions == [version]
            async with pool.held() as held:
                assert held.version == version
        assert [replica.updates for replica in replicas] == [[1, 2, 3], [1, 2, 3], []]
        slow.go_on.set()
        assert (await asked[-1]).versions == [0], "what it had under way ends there"
        assert len(slow.asked) == 1, "and it is asked for nothing else"
        slow.may_update.set()
        await settle()
        assert slow.updates == [1, 3], "it loads what it had begun with, then the newest"
        began = clock()
        assert (await pool.update_weights(4))["behind"] == 0.0
        assert clock() == began
        slow.go_on.clear()
        last = asyncio.gather(*(ask(pool, Conversation(), at_least=4) for _ in range(6)))
        await settle()
        assert len(slow.asked) > 1
        slow.go_on.set()
        await last
        await pool.stop()

    virtual_time.run(run())


async def test_the_first_replica_is_waited_for_and_so_is_one_alone() -> None:
    for count in (1, 2):
        replicas = [Replica() for _ in range(count)]
        pool, _ = await pool_of(replicas)
        for replica in replicas:
            replica.may_update.clear()
        update = asyncio.ensure_future(pool.update_weights(1))
        await settle()
        assert not update.done()
        replicas[0].may_update.set()
        await settle()
        assert update.done() == (count == 1)
        replicas[-1].may_update.set()
        await update


async def test_a_request_for_newer_weights_than_a_replica_has_goes_elsewhere() -> None:
    replicas = [Replica(), Replica()]
    pool, _ = await pool_of(replicas)
    client, other = GeneratorClient(2), Conversation()
    client.update(pool.members())  # and hears of no change
    replicas[1].version = 1
    for _ in range(4):
        found = await client.generate([next(prompts)], SamplingOptions(), Conversation(), at_least=1)
        assert found.versions == [1]
    assert not replicas[0].asked
    waiting = asyncio.ensure_future(client.generate([1], SamplingOptions(), other, at_least=2))
    await settle()
    assert not waiting.done()
    replicas[0].version = 2
    client.update(pool.members())
    assert (await waiting).versions == [2]


async def test_setting_back_waits_for_all_so_that_no_version_is_mistaken_for_another() -> None:
    replicas = [Replica(), Replica()]
    pool, _ = await pool_of(replicas)
    replicas[1].may_update.clear()
    with patience(0.0):
        await pool.update_weights(5)
        back = asyncio.ensure_future(pool.set_back(2))
        await settle()
        assert not back.done()
        assert [member.serving for member in pool.members()] == [True, False]
        replicas[1].may_update.set()
        await back
    await pool.update_weights(3)
    assert [replica.updates for replica in replicas] == [[5, 2, 3], [5, 2, 3]]
    assert (await ask(pool)).versions == [3]


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Stragglers are given so long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainers.generator.pool.PATIENCE_S", seconds)
        yield


async def test_weights_dropped_meanwhile_are_left_for_the_newer_ones() -> None:
    replicas = [Replica(), Replica()]
    pool, _ = await pool_of(replicas)
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


@pytest.mark.parametrize("count", [1, 2])
async def test_weights_that_go_with_their_trainer_do_not_keep_the_run_from_being_set_back(count: int) -> None:
    replicas = [Replica() for _ in range(count)]
    pool, _ = await pool_of(replicas)
    for replica in replicas:
        replica.failure = WeightsDroppedError("their trainer is gone")
    lost = asyncio.ensure_future(pool.update_weights(2))
    await settle()
    assert not lost.done()
    lost.cancel()
    await asyncio.wait([lost])
    for replica in replicas:
        replica.failure = None
    async with asyncio.timeout(10):
        await pool.set_back(1)
    assert [replica.updates for replica in replicas] == [[1]] * count
    assert (await ask(pool)).versions == [1]


async def test_a_replica_that_fails_to_catch_up_ends_the_run() -> None:
    replicas = [Replica(), Replica()]
    pool, _ = await pool_of(replicas)
    async with pool.held():
        await pool.update_weights(1)
        replicas[0].failure = ValueError("no such tensor")
    await settle()
    with pytest.raises(GeneratorError, match="generator 0: no such tensor"):
        pool.check()
    with pytest.raises(GeneratorError, match="generator 0: no such tensor"):
        await pool.update_weights(2)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_an_error_inside_releases_the_weights(replicas: int) -> None:
    actors = [Replica() for _ in range(replicas)]
    pool, _ = await pool_of(actors)
    with pytest.raises(ZeroDivisionError):
        async with pool.held() as held:
            raise ZeroDivisionError
    with pytest.raises(GeneratorError, match="version 0 were released"):
        await ask(held)
    await settle()
    await pool.update_weights(1)
    assert [actor.updates for actor in actors] == [[1]] * replicas


async def test_a_cancelled_call_ends_the_request_in_its_replica() -> None:
    replica = Replica()
    pool, _ = await pool_of([replica])
    replica.go_on.clear()
    call = ask(pool)
    await settle()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert replica.aborted == replica.running != []


# --- deaths


async def test_requests_of_a_replica_that_dies_are_answered_by_another() -> None:
    replicas = [Replica(), Replica()]
    pool, known = await pool_of(replicas)
    for replica in replicas:
        replica.go_on.clear()
    requests = [ask(pool) for _ in range(4)]
    await settle()
    known.may_start.clear()
    replicas[0].die()
    await settle()
    assert [replica.metrics.state for replica in pool.replicas] == [ReplicaState.RECOVERING, ReplicaState.HEALTHY]
    assert known.buried == [replicas[0]]
    assert len(replicas[1].asked) == 4
    replicas[1].go_on.set()
    await asyncio.gather(*requests)
    await pool.update_weights(1)
    assert (await ask(pool)).versions == [1]
    known.may_start.set()
    await settle()
    new = known.lives[0][1]
    assert new.updates == [1], "it is back with the weights that the others have"
    for _ in range(4):
        await ask(pool, Conversation())
    assert new.asked
    assert (await pool.stats())["tokens"] == 9 + len(requests) - 4, "what the dead one had counted stays counted"


async def test_one_alone_is_waited_for() -> None:
    replica = Replica()
    pool, known = await pool_of([replica])
    replica.go_on.clear()
    known.may_start.clear()
    request = ask(pool)
    await settle()
    replica.die()
    await settle()
    await pool.update_weights(1)
    assert not request.done()
    known.may_start.set()
    assert (await request).versions == [1]


async def test_what_dies_while_it_is_updated_comes_back_at_the_target() -> None:
    replicas = [Replica(), Replica()]
    pool, known = await pool_of(replicas)
    replicas[0].may_update.clear()
    update = asyncio.ensure_future(pool.update_weights(3))
    await settle()
    replicas[0].die()
    assert await update == {"pull_s": 3.0, "behind": 0.0}
    await settle()
    assert known.lives[0][1].updates == [3]
    assert pool.replicas[0].healthy


async def test_a_replica_that_starts_while_weights_change_loads_until_it_has_the_newest() -> None:
    replicas = [Replica(), Replica()]
    pool, known = await pool_of(replicas)
    await pool.update_weights(1)
    started = Replica()
    started.may_update.clear()
    known.fresh = lambda: started
    replicas[0].die()
    await settle()
    place: Any = "where version 2 lies"
    await pool.update_weights(2, place)
    started.may_update.set()
    await settle()
    assert started.updates[-1] == 2
    assert pool.replicas[0].healthy
    assert replicas[1].told == [None, place]
    assert started.told[-1] == place, "it needs nobody else to find them"


async def test_who_dies_asleep_comes_back_when_the_others_wake() -> None:
    replicas = [Replica(), Replica()]
    pool, known = await pool_of(replicas)
    async with pool.asleep():
        replicas[0].die()
        await settle()
        assert [each.rests for each in known.lives[0]] == [["loaded", "sleep"], []]
    await settle()
    assert [each.rests for each in known.lives[0]] == [["loaded", "sleep"], ["loaded"]]
    assert replicas[1].rests == ["loaded", "sleep", "wake"]
    assert pool.replicas[0].healthy


async def test_who_loads_a_model_is_waited_for_before_all_sleep() -> None:
    replicas = [Replica(), Replica()]
    pool, known = await pool_of(replicas)
    started = Replica()
    started.may_set_up.clear()
    known.fresh = lambda: started
    replicas[0].die()
    await settle()
    everybody = pool.asleep()
    falling_asleep = asyncio.ensure_future(everybody.__aenter__())
    await settle()
    assert not falling_asleep.done()
    started.may_set_up.set()
    await falling_asleep
    assert [started.rests, replicas[1].rests] == [["loaded", "sleep"]] * 2
    await everybody.__aexit__(None, None, None)
    assert [started.rests, replicas[1].rests] == [["loaded", "sleep", "wake"]] * 2


async def test_what_fails_meanwhile_wakes_them_and_is_raised() -> None:
    replica = Replica()
    pool, _ = await pool_of([replica])
    with pytest.raises(ZeroDivisionError):
        async with pool.asleep():
            raise ZeroDivisionError
    assert replica.rests == ["loaded", "sleep", "wake"]


async def test_held_weights_that_die_are_gone_and_nothing_waits_for_them() -> None:
    replicas = [Replica(), Replica()]
    pool, known = await pool_of(replicas)
    async with pool.held() as held:
        number = held.key[0]
        replicas[number].die()
        await settle()
        with pytest.raises(WeightsLostError, match="held weights are gone"):
            await ask(held)
        await pool.update_weights(1)
    assert pool.replicas[number].healthy
    assert known.lives[number][1].updates in ([], [1])
    async with pool.held() as held:
        assert held.version == 1


async def test_a_request_that_kills_whoever_gets_it_is_given_up() -> None:
    replicas = [Replica()]
    pool, known = await pool_of(replicas)
    pool.options = ServiceOptions(backoff_s=0.0, max_deaths=10)

    def busy() -> Replica:
        replica = Replica()
        replica.go_on.clear()
        return replica

    known.fresh = busy
    replicas[0].go_on.clear()
    request = ask(pool)
    for _ in range(REPEATS + 1):
        await settle()
        known.lives[0][-1].die()
    with pytest.raises(GeneratorError, match=f"{REPEATS + 1} generators died with this request"):
        await request


@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_no_request_samples_from_weights_older_than_those_that_have_arrived(count: int, dice: random.Random) -> None:
    """Whatever dies, is held or is slow: that is what bounds the age of a trained token."""
    virtual_time.run(deadly(count, dice))


async def deadly(count: int, dice: random.Random) -> None:
    known_at_first = [Replica() for _ in range(count)]
    pool, known = await pool_of(known_at_first)
    pool.options = ServiceOptions(backoff_s=0.0, max_deaths=10_000)
    requests: list[tuple[int, asyncio.Future[Completion]]] = []
    tasks: set[asyncio.Task[None]] = set()
    arrived, version = 0, 0

    async def update(to: int) -> None:
        nonlocal arrived
        await pool.update_weights(to)
        arrived = to

    async def hold(end: asyncio.Event) -> None:
        with suppress(WeightsLostError):
            async with pool.held():
                await end.wait()

    ends: list[asyncio.Event] = []
    updating: asyncio.Task[None] | None = None

    def living() -> list[Replica]:
        return [lives[-1] for lives in known.lives]

    for _ in range(60):
        what = dice.choice(["ask", "ask", "end", "die", "update", "hold", "release", "rest", "slow", "quick", "wait"])
        replica = dice.choice(living())
        if what == "ask":
            replica.go_on.clear()
            requests.append((arrived, ask(pool, Conversation(), at_least=arrived)))
        elif what == "end":
            replica.go_on.set()
        elif what == "die" and not replica.death.done():
            replica.die()
        elif what == "update" and (updating is None or updating.done()):
            version += 1
            updating = asyncio.create_task(update(version))
        elif what == "hold":
            ends.append(asyncio.Event())
            tasks.add(asyncio.create_task(hold(ends[-1])))
        elif what == "release" and ends:
            ends.pop().set()
        elif what == "slow":
            replica.may_update.clear()
        elif what == "quick":
            replica.may_update.set()
        elif what == "wait":
            await asyncio.sleep(2 * PATIENCE_S)
        for _ in range(dice.randrange(8)):
            await asyncio.sleep(0)
    for end in ends:
        end.set()
    for replica in living():
        replica.may_update.set()
    while not all(request.done() for _, request in requests):
        for replica in living():
            replica.go_on.set()
            replica.may_update.set()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, *([updating] if updating else []))
    for oldest, request in requests:
        if (error := request.exception()) is not None:
            assert "died with this request" in str(error)
        else:
            assert request.result().versions >= oldest
    assert arrived == version
    for replica in living():
        replica.go_on.set()
        replica.may_update.set()
    await asyncio.sleep(10 * PATIENCE_S)  # all that can happen does
    assert (await ask(pool, at_least=version)).versions == [version]
    assert {replica.version for replica in living()} == {version}, "the slow ones have caught up"
    await pool.stop()
