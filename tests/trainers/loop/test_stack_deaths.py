"""What a stack makes of the deaths of its actors, whose watches are plain futures here."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("safetensors")  # of the training stack; torch would cost every worker seconds

from forge_env.config import load_config
from trainers.actors.remote import ActorDiedError
from trainers.loop.stack import RoleDiedError, Stack


class Watched(Stack):
    def __init__(self, *roles: str) -> None:
        super().__init__(load_config("coding_rlvr"))
        self.watches = {role: asyncio.get_running_loop().create_future() for role in roles}
        for role, watch in self.watches.items():
            self._watch(role, watch)

    def die(self, role: str) -> None:
        self.watches[role].set_exception(ActorDiedError("killed"))


async def forever() -> None:
    await asyncio.Event().wait()


async def nothing() -> int:
    await asyncio.sleep(0)
    return 7


async def test_work_goes_on_as_it_would_and_its_failure_is_its_own() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    stack = Watched("trainer")
    assert await stack.unless_one_dies(nothing()) == 7
    with pytest.raises(ValueError, match="mine"):
        await stack.unless_one_dies(fail())


async def test_of_two_that_die_together_each_is_told_once() -> None:
    stack = Watched("trainer", "buffer")
    working = asyncio.ensure_future(stack.unless_one_dies(forever()))
    await asyncio.sleep(0)
    stack.die("trainer")
    stack.die("buffer")
    with pytest.raises(RoleDiedError) as first:
        await working
    with pytest.raises(RoleDiedError) as second:
        await stack.unless_one_dies(forever())
    assert {first.value.role, second.value.role} == {"trainer", "buffer"}
    assert await stack.unless_one_dies(nothing()) == 7


async def test_a_death_between_two_pieces_of_work_is_told_at_the_second() -> None:
    stack = Watched("buffer")
    await stack.unless_one_dies(nothing())
    stack.die("buffer")
    await asyncio.sleep(0)
    with pytest.raises(RoleDiedError, match="the replay buffer died: killed"):
        await stack.unless_one_dies(forever())
