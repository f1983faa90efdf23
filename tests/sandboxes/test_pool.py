"""The pool with boxes that are only names: bounds, fairness, healing, cancellation."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_env.errors import EnvironmentBugError, SandboxError
from forge_env.sandbox import HOLDER, TENANT, SandboxSpec, on_behalf_of
from sandboxes.box import Box
from sandboxes.connection import Connection
from sandboxes.pool import Pool

SPEC = SandboxSpec()
OTHER = SandboxSpec(disk_mb=1)


class FakeConnection(Connection):
    @property
    def alive(self) -> bool:
        return not self.lost.done()

    def close(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


class FakeBox(Box):
    def __init__(self, name: str, spec: SandboxSpec) -> None:
        super().__init__(name, spec, self.destroy)
        self.connection = FakeConnection()
        self.dirt: list[str] = []
        self.destroyed = 0

    async def reset(self) -> list[str]:
        await asyncio.sleep(0)
        if not self.connection.alive:
            raise SandboxError("gone")
        return self.dirt

    async def destroy(self) -> None:
        self.destroyed += 1
        self.connection.close()


class Factory:
    """Makes fake boxes; `failures` of the next starts fail."""

    def __init__(self) -> None:
        self.made: list[FakeBox] = []
        self.failures = 0
        self.error: Exception = SandboxError("no box today")

    async def __call__(self, spec: SandboxSpec) -> Box:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise self.error
        self.made.append(FakeBox(f"box {len(self.made)}", spec))
        return self.made[-1]

    def alive(self) -> int:
        return sum(box.connection.alive for box in self.made)


def fake(box: Box) -> FakeBox:
    assert isinstance(box, FakeBox)
    return box


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@given(
    size=st.integers(1, 4),
    moves=st.lists(st.sampled_from(["acquire", "other", "release", "die", "dirty", "cancel", "fail"]), max_size=60),
)
@settings(max_examples=120, deadline=None)
def test_never_too_many_nothing_lost(size: int, moves: list[str]) -> None:
    async def play() -> None:
        factory = Factory()
        pool = Pool(factory, size=size, max_uses=7)
        tasks: list[asyncio.Task[Box]] = []
        for move in moves:
            held = [t for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
            waiting = [t for t in tasks if not t.done()]
            if move in ("acquire", "other"):
                tasks.append(asyncio.create_task(pool.acquire(OTHER if move == "other" else SPEC)))
            elif move == "cancel" and waiting:
                waiting[0].cancel()
            elif move == "fail":
                factory.failures += 1
            elif held:
                box = fake(held[0].result())
                tasks.remove(held[0])
                if move == "die":
                    box.connection.close()
                box.dirt = ["files"] if move == "dirty" else []
                pool.release(box)
            await asyncio.sleep(0)
            assert pool.total <= size
            assert factory.alive() <= size
        if moves and moves[-1] != "cancel":  # now and then close at once
            await settle()
        leased = [t.result() for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
        assert len(leased) == len(set(leased))
        await pool.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert factory.alive() == 0
        assert all(box.destroyed for box in factory.made)

    asyncio.run(play())


async def test_first_come_first_served() -> None:
    pool = Pool(Factory(), size=1)
    order: list[int] = []

    async def user(number: int) -> None:
        box = await pool.acquire(SPEC)
        order.append(number)
        pool.release(box)

    await asyncio.gather(*map(user, range(20)))
    assert order == list(range(20))
    await pool.close()


async def test_an_episode_that_has_begun_goes_before_those_that_have_not() -> None:
    """Its judge's box would else come after the whole of all others, long after its time is over."""
    pool = Pool(Factory(), size=2)
    order: list[str] = []

    async def episode(number: int) -> None:
        with on_behalf_of("writer"):
            for part in ("plays", "is judged"):
                box = await pool.acquire(SPEC, TENANT.get(), HOLDER.get())
                order.append(f"{number} {part}")
                await settle()
                pool.release(box)

    await asyncio.gather(*map(episode, range(6)))
    assert order == [
        f"{number + side} {part}" for number in (0, 2, 4) for part in ("plays", "is judged") for side in (0, 1)
    ]
    await pool.close()


async def test_a_greedy_tenant_does_not_starve_another() -> None:
    pool = Pool(Factory(), size=4)
    served: Counter[str] = Counter()

    async def user(tenant: str) -> None:
        box = await pool.acquire(SPEC, tenant)
        served[tenant] += 1
        for _ in range(5):
            await asyncio.sleep(0)
        pool.release(box)

    greedy = [asyncio.create_task(user("greedy")) for _ in range(100)]
    await asyncio.sleep(0)
    modest = [asyncio.create_task(user("modest")) for _ in range(10)]
    await asyncio.gather(*modest)
    assert served["greedy"] < 50
    await asyncio.gather(*greedy)
    await pool.close()


async def test_dirty_and_worn_out_boxes_are_replaced() -> None:
    factory = Factory()
    pool = Pool(factory, size=1, max_uses=2)
    first = fake(await pool.acquire(SPEC))
    first.dirt = ["processes"]
    pool.release(first)
    second = await pool.acquire(SPEC)
    assert second is not first
    assert first.destroyed
    pool.release(second)
    assert await pool.acquire(SPEC) is second
    pool.release(second)
    assert await pool.acquire(SPEC) is not second
    assert pool.stats()["poisoned"] == pool.stats()["recycled"] == 1
    assert pool.stats()["dirt"] == ["processes"]
    await pool.close()


async def test_closing_right_after_a_release_destroys_the_box() -> None:
    factory = Factory()
    pool = Pool(factory, size=1)
    pool.release(await pool.acquire(SPEC))
    await pool.close()
    assert factory.made[0].destroyed


async def test_a_dead_idle_box_is_replaced_ahead() -> None:
    factory = Factory()
    pool = Pool(factory, size=2, warm=2)
    await pool.start(SPEC)
    factory.made[0].connection.close()
    await settle()
    assert factory.alive() == 2
    await pool.close()


@pytest.mark.parametrize(("failures", "error"), [(2, SandboxError("no box today")), (1, TypeError("an engine's bug"))])
async def test_failing_starts_reach_the_caller_and_the_pool_recovers(failures: int, error: Exception) -> None:
    factory = Factory()
    pool = Pool(factory, size=2)
    factory.failures, factory.error = failures, error
    with pytest.raises(type(error), match=str(error)):
        await pool.acquire(SPEC)
    pool.release(await pool.acquire(SPEC))
    await pool.close()
    with pytest.raises(SandboxError, match="closed"):
        await pool.acquire(SPEC)


async def test_grows_only_while_the_machine_has_room() -> None:
    room = False
    factory = Factory()
    pool = Pool(factory, size=4, room=lambda spec: room)
    first = await pool.acquire(SPEC)
    second = asyncio.create_task(pool.acquire(SPEC))
    await settle()
    assert not second.done()
    pool.release(first)
    assert await second is first
    await pool.close()


async def test_shrinks_to_the_warm_ones(monkeypatch: Any) -> None:
    monkeypatch.setattr("sandboxes.pool.IDLE_S", 0.0)
    factory = Factory()
    pool = Pool(factory, size=4, warm=1)
    boxes = [await pool.acquire(SPEC) for _ in range(4)]
    for box in boxes:
        pool.release(box)
    gone = [box.connection.lost for box in boxes]
    while sum(future.done() for future in gone) < 3:
        await asyncio.wait([future for future in gone if not future.done()], return_when=asyncio.FIRST_COMPLETED)
    await settle()
    assert factory.alive() == 1
    await pool.close()


async def test_who_holds_a_box_and_waits_for_another_is_named() -> None:
    """Both boxes are held by episodes that want a second one: one of them fails, the other gets what it held."""
    pool = Pool(Factory(), size=2, stuck_s=0.0)
    both_hold = asyncio.Barrier(2)

    async def episode() -> str:
        with on_behalf_of("Judge") as holder:
            first = await pool.acquire(SPEC, "Judge", holder)
            await both_hold.wait()
            try:
                pool.release(await pool.acquire(SPEC, "Judge", holder))
            except EnvironmentBugError as error:
                return str(error)
            finally:
                pool.release(first)
        return ""

    said = sorted(await asyncio.gather(episode(), episode()))
    assert said[0] == ""
    assert said[1].startswith("all 2 sandboxes are held by episodes that wait for a second one: Judge (2)")
    assert "release the first" in said[1]
    await pool.close()


async def test_one_who_works_on_is_waited_for() -> None:
    """Nobody is stuck while somebody who holds a box waits for none."""
    pool = Pool(Factory(), size=2, stuck_s=0.0)
    works, wants_two = on_behalf_of(""), on_behalf_of("")
    working, first = await pool.acquire(SPEC, "", works), await pool.acquire(SPEC, "", wants_two)
    second = asyncio.ensure_future(pool.acquire(SPEC, "", wants_two))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    pool.release(working)
    pool.release(await second)
    pool.release(first)
    await pool.close()
