"""A service heals, keeps its promises to callers, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("monarch")

from forge_env.errors import UsageError
from tests.trainers.actors.counter import Counter, NotAllowedError
from tests.trainers.actors.signals import kill, stop
from trainers.actors.remote import ActorDiedError, FurtherActorDiedError, RemoteError
from trainers.actors.replicas import Replica, ReplicaMetrics, ReplicaState, ServiceDownError, ServiceOptions
from trainers.actors.router import ServiceOverloadedError
from trainers.actors.service import Service, ServiceEndpoint

PATIENCE_S = 60.0


@asynccontextmanager
async def counters(
    replicas: int = 2, *args: Any, options: ServiceOptions | None = None, **kwargs: Any
) -> AsyncIterator[Service]:
    before = _children()
    service = await Counter.options(num_replicas=replicas, service=options).as_service(*args, **kwargs)
    try:
        yield service
    finally:
        await service.stop()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, [psutil.Process(p) for p in _children() - before], 10)
    assert not alive, gone


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Wait for other processes."""
    async with asyncio.timeout(PATIENCE_S):
        while not await true():  # noqa: ASYNC110 - what other processes do is no event here
            await asyncio.sleep(0.02)


async def healthy(service: Service, count: int) -> None:
    async def enough() -> bool:
        return sum(replica.healthy for replica in service.replicas) == count

    await until(enough)


def pid_of(replica: Replica) -> int:
    return int(replica.actor._forge_pids[0])


@pytest.mark.stack
async def test_calls_sessions_fan_outs_and_errors() -> None:
    async with counters(2, 10) as service:
        assert await service.add.route(5, times=2) == 20
        assert sorted(await service.get.fanout()) == [10, 20]
        assert sorted(await service.call_all("get")) == [10, 20]
        async with service.session():
            values = [await service.add.route(1) for _ in range(4)]
        assert values == list(range(values[0], values[0] + 4)), "all on one replica"
        session, other = await service.start_session(), await service.start_session()
        assert session != other
        assert await service.where.using(session=session).route() == await service.where.using(session=session).route()
        assert (await service.get_metrics()).total_sessions == 1
        await service.terminate_session(session)

        with pytest.raises(NotAllowedError, match="no such thing") as caught:
            await service.fail.route("no such thing")
        assert "counter.py" in "".join(traceback.format_exception(caught.value)), "where it was raised over there"
        with pytest.raises(TypeError):
            await service.add.route(1, 2, 3, 4)
        with pytest.raises(NotAllowedError):
            await service.fail.fanout("all of you")
        assert await service.call_all("fail", "all of you") == [None, None]

        metrics = await service.get_metrics()
        assert (metrics.total_sessions, metrics.healthy_replicas, metrics.total_replicas) == (0, 2, 2)
        assert sum(each.deaths for each in metrics.replicas.values()) == 0
        summary = await service.get_metrics_summary()
        assert sum(each["failed_requests"] for each in summary["replicas"].values()) == 6
        assert {each["state"] for each in summary["replicas"].values()} == {"healthy"}
        with pytest.raises(NotImplementedError, match=r"\.add\.route"):
            await service.add.call_one(1)
        with pytest.raises(AttributeError, match="no endpoint 'ad'"):
            await service.ad.route(1)

        for unreadable in (service.fail_in_two_parts, service.fail_in_order):
            with pytest.raises(RemoteError, match=r"counter\.TwoPartsError: no room: it is full") as sent:
                await unreadable.route()
            assert "counter.py" in "".join(traceback.format_exception(sent.value)), "where it was raised over there"
        with pytest.raises(FurtherActorDiedError) as other:
            await service.lose_another.route()
        assert str(other.value) == "the judge has ended", "the replica itself lives"
        with pytest.raises(FurtherActorDiedError, match="the judge has ended"):
            await service.lose_another.fanout()
        with pytest.raises(FurtherActorDiedError, match="the judge has ended"):
            await service.replicas[0].call("lose_another")
        with pytest.raises(UsageError, match="prefix must be hashable"):
            service.get.using(prefix=["a"])
        with pytest.raises(UsageError, match="start_session"):
            service.get.using(session="mine")
    with pytest.raises(ServiceDownError):
        await service.get.route()


@pytest.mark.stack
async def test_conversations_of_two_services_do_not_meet() -> None:
    async with counters(1) as one, counters(2) as other, one.session():
        assert (await other.get_metrics()).total_sessions == 0
        await other.add.route(1)
        assert (await other.get_metrics()).total_sessions == 0
        async with other.session():
            values = [await other.add.route(1) for _ in range(3)]
            assert values == list(range(values[0], values[0] + 3)), "all on one replica"
            await one.add.route(1)
            assert (await one.get_metrics()).total_sessions == 1


@pytest.mark.stack
async def test_a_killed_replica_comes_back_with_what_the_others_were_told() -> None:
    async with counters(2) as service:
        await service.load.using(keep=True).fanout(3)
        victim = service.replicas[0]
        pid = pid_of(victim)
        repeated = asyncio.ensure_future(service.wait.route())
        lost = asyncio.ensure_future(service.wait_once.route())
        second = asyncio.ensure_future(service.wait_once.route())
        await until(lambda: _in_flight(service, 3))
        kill(pid)
        done, _ = await asyncio.wait([lost, second], return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(ActorDiedError, match="'wait_once', which is not repeated"):
            await done.pop()
        await until(lambda: _deaths(service, 1))
        await service.load.using(keep=True).fanout(4)
        with pytest.raises(ValueError, match="invalid literal"):
            await service.load.using(keep=True).fanout("five")  # is not told to the one that starts
        await healthy(service, 2)
        second.cancel()
        await service.go.fanout()
        assert await repeated != pid
        assert {version for _, version in await service.where.fanout()} == {4}
        assert len({own for own, _ in await service.where.fanout()} | {pid}) == 3


@pytest.mark.stack
async def test_a_kept_call_that_no_replica_is_up_for_waits_and_is_kept_only_if_it_is_a_good_one() -> None:
    async with counters(1) as service, asyncio.timeout(PATIENCE_S):
        for told, known in (("five", -1), (6, 6), ("seven", 6)):
            kill(pid_of(service.replicas[0]))
            await until(lambda: _down(service))
            telling = asyncio.ensure_future(service.load.using(keep=True).fanout(told))
            if isinstance(told, str):
                with pytest.raises(ValueError, match=f"invalid literal.*{told}"):
                    await telling
            else:
                assert await telling == [told]
            assert (await service.where.route())[1] == known
        kill(pid_of(service.replicas[0]))
        await until(lambda: _down(service))
        assert (await service.where.route())[1] == 6, "the bad ones are not told again"
        assert service.replicas[0].metrics.deaths == 4


@pytest.mark.stack
async def test_a_kept_call_with_nobody_left_is_refused() -> None:
    async with counters(1, options=ServiceOptions(max_deaths=1)) as service, asyncio.timeout(PATIENCE_S):
        kill(pid_of(service.replicas[0]))
        await until(lambda: _down(service))
        with pytest.raises(ServiceDownError, match="no replica left"):
            await service.load.using(keep=True).fanout(3)


async def _down(service: Service) -> bool:
    return not any(replica.healthy for replica in service.replicas)


async def _deaths(service: Service, count: int) -> bool:
    return (await service.get_metrics()).replicas[0].deaths == count


async def _in_flight(service: Service, count: int) -> bool:
    return sum(service.router.in_flight) == count


@pytest.mark.stack
async def test_one_that_can_not_be_set_up_stops_all(tmp_path: Path) -> None:
    before = _children()
    with pytest.raises(NotAllowedError, match="can't be set up"):
        await Counter.options(num_replicas=2).as_service(broken=str(tmp_path / "mended"))
    _, alive = await asyncio.to_thread(psutil.wait_procs, [psutil.Process(p) for p in _children() - before], 10)
    assert not alive


@pytest.mark.stack
async def test_one_that_dies_while_it_starts_is_named() -> None:
    class Dying(Service):
        async def set_up(self, replica: Replica) -> None:
            for pid in replica.actor._forge_pids:
                kill(pid)
            await super().set_up(replica)

    service = Dying(Counter.options(num_replicas=1, mesh_name="counter"))
    with pytest.raises(ActorDiedError, match="counter 0 died during its start: its process"):
        await service.start()


@pytest.mark.stack
async def test_one_that_dies_again_and_again_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mended = tmp_path / "mended"
    mended.touch()
    options = ServiceOptions(max_deaths=3, backoff_s=0.01)
    async with counters(1, broken=str(mended), options=options) as service:
        mended.unlink()
        waiting = asyncio.ensure_future(service.wait_once.route())
        await until(lambda: _in_flight(service, 1))
        kill(pid_of(service.replicas[0]))
        with pytest.raises((ActorDiedError, ServiceDownError)):
            await waiting
        with pytest.raises(ServiceDownError, match="not be restarted: this replica can't be set up") as given_up:
            await asyncio.wait_for(asyncio.shield(service.failure), PATIENCE_S)
        assert isinstance(given_up.value.__cause__, NotAllowedError)
        restarts = [bool(record.exc_info) for record in caplog.records if "is being restarted" in record.message]
        assert restarts == [False, True], "where its start failed is in the log; that a process was killed says it all"
        with pytest.raises(ServiceDownError, match="no replica left"):
            await service.get.route()
        assert service.replicas[0].metrics.state is ReplicaState.FAILED


@pytest.mark.stack
async def test_calls_wait_their_turn_and_too_many_are_refused() -> None:
    async with counters(1, options=ServiceOptions(max_in_flight=1, max_queue=2)) as service:
        calls = [asyncio.ensure_future(service.wait.route()) for _ in range(3)]
        await until(lambda: _in_flight(service, 1))
        with pytest.raises(ServiceOverloadedError, match="2 calls are already waiting"):
            await service.get.route()
        assert (await service.get_metrics()).queued == 2
        calls[1].cancel()
        await service.go.fanout()
        assert await calls[0] == await calls[2]
        assert (await service.get_metrics()).refused == 1
        await _a_bad_prefix_holds_up_no_other(service)


async def _a_bad_prefix_holds_up_no_other(service: Service) -> None:
    (replica,) = service.replicas
    service.router.in_flight[0] += 1  # busy
    bad = asyncio.ensure_future(ServiceEndpoint(service, "get", prefix=["a"]).route())
    good = asyncio.ensure_future(service.get.route())
    await asyncio.sleep(0)
    assert (await service.get_metrics()).queued == 2
    service.router.done(replica.number)
    with pytest.raises(TypeError, match="unhashable"):
        await bad
    assert await asyncio.wait_for(good, PATIENCE_S) == 0


@pytest.mark.stack
@pytest.mark.slow
async def test_a_stopped_process_is_replaced() -> None:
    async with counters(1) as service:
        pid = pid_of(service.replicas[0])
        stop(pid)
        new, _ = await service.where.route()
        assert new != pid

        async def gone() -> bool:
            return not psutil.pid_exists(pid)

        await until(gone)


async def test_one_death_is_no_more_than_one_failed_call() -> None:
    """Whoever calls again at once would be answered by the same death again, as often as it may repeat its call."""

    async def fail() -> None:
        raise ActorDiedError("killed")

    death = asyncio.get_running_loop().create_future()
    actor = SimpleNamespace(answer=SimpleNamespace(call=fail))
    replica = Replica(0, actor, death=death, metrics=ReplicaMetrics(ReplicaState.HEALTHY))
    calling = asyncio.ensure_future(replica.call("answer"))
    done, _ = await asyncio.wait([calling], timeout=0.05)
    assert not done
    assert replica.healthy, "the news of its death are still to come"
    death.set_exception(ActorDiedError("killed"))
    with pytest.raises(ActorDiedError):
        await calling
    assert not replica.healthy
    assert death.exception()
