"""A disk that is really full: nothing that finished is lost, and the message names the way out."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.forge_env.endpoint.server import Server, completion
from tests.forge_env.evaluation.test_kill import COMMAND, ROOT, TOY, results
from tests.forge_env.evaluation.toys import model_answer

pytestmark = pytest.mark.slow
PADDING = " " * 100_000
SAMPLES = 60
FIRST = 12
"""Samples that certainly fit."""


def behave(request: dict[str, Any], n: int) -> Any:
    return completion(model_answer(request["messages"][-1]["content"], request["seed"]) + PADDING)


def command(out: Path, url: str, *more: str) -> list[str]:
    flags = ["--model", "m", "--base-url", url, "--epochs", "5", "--send-seed", "true", "--out", str(out)]
    return [*COMMAND, TOY, *flags, "--concurrency", "4", "--start-concurrency", "4", *more]


class SmallDisk:
    """A file system of a few megabytes, in a mount namespace of its own: nothing of it outlives the holder."""

    def __init__(self, holder: asyncio.subprocess.Process, mounted: Path) -> None:
        self.holder = holder
        self.mounted = mounted
        """Where its processes see it."""
        self.seen = Path(f"/proc/{holder.pid}/root{mounted}")
        """Where we do."""

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        inside = [
            "nsenter",
            f"--target={self.holder.pid}",
            "--user",
            "--mount",
            "--preserve-credentials",
            f"--wd={ROOT}",
        ]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*inside, *words, stdout=pipe, stderr=pipe)

    async def resize(self, size: str) -> None:
        done = await self.start("mount", "-o", f"remount,size={size}", str(self.mounted))
        _, errors = await done.communicate()
        assert done.returncode == 0, errors.decode()


@asynccontextmanager
async def small_disk(folder: Path, size: str) -> AsyncIterator[SmallDisk]:
    script = f'mount -t tmpfs -o size={size} tmpfs "$0" && echo mounted && read line'
    pipe = asyncio.subprocess.PIPE
    holder = await asyncio.create_subprocess_exec(
        *["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(folder)],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    try:
        if await holder.stdout.readline() != b"mounted\n":
            pytest.skip(f"no file system of one's own here: {(await holder.stderr.read()).decode().strip()}")
        yield SmallDisk(holder, folder)
    finally:
        holder.stdin.close()
        await holder.wait()


async def until(process: asyncio.subprocess.Process, words: bytes) -> bytes:
    """What `process` writes to stderr, up to the line with `words`."""
    said = b""
    while words not in said:
        line = await process.stderr.readline()
        assert line, said.decode()
        said += line
    return said


async def undisturbed(out: Path) -> dict[str, tuple[bool, float, str]]:
    async with Server(behave) as server:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command(out, server.url), cwd=ROOT, stdout=pipe, stderr=pipe)
        _, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    return results(out)


async def test_a_run_on_a_full_disk_writes_what_is_under_way_and_ends(tmp_path: Path) -> None:
    """Six megabytes: four are the reserve that samples under way are written to."""
    async with Server(behave) as server, small_disk(tmp_path, "6m") as disk:
        first = await disk.start(*command(disk.mounted / "out", server.url))
        _, errors = await first.communicate()
        assert first.returncode == 1
        assert b"the disk is full; all finished samples are saved" in errors
        assert b"-> free some space, then --resume plays the rest" in errors
        assert b"Traceback" not in errors
        done = results(disk.seen / "out")
        assert FIRST <= len(done) < SAMPLES
        assert len(server.requests) == len(done)  # every answer is there

        with pytest.raises(OSError, match="No space left"):
            (disk.seen / "filler").write_bytes(b"x" * 8_000_000)
        stuck = await disk.start(*command(disk.mounted / "out", server.url, "--resume"))
        _, errors = await stuck.communicate()
        assert stuck.returncode == 1
        assert b"-> free some space, or choose another --out" in errors
        assert results(disk.seen / "out") == done  # neither samples nor settings are harmed
        assert len(server.requests) == len(done)

        await disk.resize("64m")
        again = await disk.start(*command(disk.mounted / "out", server.url, "--resume"))
        _, errors = await again.communicate()
        assert again.returncode == 0, errors.decode()
        assert len(server.requests) == SAMPLES
        assert (disk.seen / "out" / "summary.json").exists()
        ended = results(disk.seen / "out")
    assert ended == await undisturbed(tmp_path / "whole")


async def test_a_run_without_any_room_left_waits_for_some(tmp_path: Path) -> None:
    async with Server(behave) as server, small_disk(tmp_path, "20m") as disk:
        filler = disk.seen / "filler"
        filler.write_bytes(b"x" * 18_000_000)  # leaves two megabytes: no room for the reserve
        child = await disk.start(*command(disk.mounted / "out", server.url))
        said = await until(child, b"finished samples are waiting to be written; free some space")
        assert b"the disk is full" in said
        filler.unlink()
        _, errors = await child.communicate()
        assert child.returncode == 0, errors.decode()
        ended = results(disk.seen / "out")
    assert len(server.requests) == SAMPLES
    assert ended == await undisturbed(tmp_path / "whole")


async def limited(out: Path, url: str, *more: str) -> asyncio.subprocess.Process:
    """An evaluation that may write files of three megabytes at most."""

    def limit() -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, hard))

    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command(out, url, *more), cwd=ROOT, stdout=pipe, stderr=pipe, preexec_fn=limit
    )


async def test_who_stops_waiting_is_told_what_is_lost_and_can_resume(tmp_path: Path) -> None:
    async with Server(behave) as server:
        child = await limited(tmp_path / "out", server.url)
        await until(child, b"finished samples are waiting to be written")
        os.kill(child.pid, signal.SIGINT)
        _, errors = await child.communicate()
        assert child.returncode == 1, errors.decode()
        assert b"finished samples could not be written" in errors
        assert b"--resume plays them again" in errors
        done = results(tmp_path / "out")
        assert len(done) >= FIRST
        pipe = asyncio.subprocess.PIPE
        again = await asyncio.create_subprocess_exec(
            *command(tmp_path / "out", server.url, "--resume"), cwd=ROOT, stdout=pipe, stderr=pipe
        )
        _, errors = await again.communicate()
        assert again.returncode == 0, errors.decode()
    assert results(tmp_path / "out").items() >= done.items()
    assert len(results(tmp_path / "out")) == SAMPLES
