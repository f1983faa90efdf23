"""Whoever waits for a folder is told by the kernel, and looks after a while anyway."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

from forge_env.watching import changes

NEVER_S = 3600.0


async def test_each_kind_of_change_is_told(tmp_path: Path) -> None:
    async with aclosing(changes([tmp_path, tmp_path / "missing"], NEVER_S)) as told:
        await anext(told)  # at first, in any case
        (tmp_path / "a").write_text("made")
        await anext(told)
        with (tmp_path / "a").open("a") as file:
            file.write("written")
        await anext(told)
        (tmp_path / "a").rename(tmp_path / "b")
        await anext(told)
        (tmp_path / "b").unlink()
        await anext(told)


async def test_nothing_is_told_twice(tmp_path: Path) -> None:
    async with aclosing(changes([tmp_path], NEVER_S)) as told:
        await anext(told)
        for number in range(50):
            (tmp_path / str(number)).touch()
        await anext(told)
        waiting = asyncio.ensure_future(anext(told))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        (tmp_path / "last").touch()
        await waiting


async def test_what_the_kernel_does_not_hear_of_is_looked_for(tmp_path: Path) -> None:
    async with aclosing(changes([tmp_path], anyway_s=0.001)) as told:
        for _ in range(3):
            await anext(told)
