"""Run many episodes of a small program at once; measure their cost and what they leave behind.

python -m benchmarks programs [--episodes 500] [--record]

Each program runs in its own sandbox (the local engine) and calls the model three times. The model withholds its first
answers until every program has asked, so all episodes are open at once, however long that takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

import forge_env as fe
from benchmarks.frame import main, table
from forge_env.gateway.server import shared_gateway
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.rollout.episode import run_episode
from forge_env.types import Message, Observation, ToolSpec

REQUESTS = 3
ROOM_MB = 30
"""Memory of a sandbox with its program, MiB."""
AGENT = f"""
import json, os, socket, sys

host, port = os.environ["OPENAI_BASE_URL"].removeprefix("http://").removesuffix("/v1").split(":")
head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: model\\r\\nConnection: close\\r\\nContent-Type: application/json"
head += "\\r\\nAuthorization: Bearer " + os.environ["OPENAI_API_KEY"] + "\\r\\nContent-Length: "
messages = [{{"role": "user", "content": sys.argv[1]}}]
for _ in range({REQUESTS}):
    body = json.dumps({{"model": "any", "messages": messages}})
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{{head}}{{len(body)}}\\r\\n\\r\\n{{body}}".encode())
        answer = connection.makefile("rb").read()
    said = json.loads(answer.partition(b"\\r\\n\\r\\n")[2])["choices"][0]["message"]
    messages += [said, {{"role": "user", "content": "Go on."}}]
open("answer.txt", "w").write(said["content"])
"""
ABOUT = (
    "A program of about ten lines in a sandbox each, with three requests over a plain socket. No request is answered "
    "before all programs have asked. Memory of the process, gateway included, is its growth; memory of sandboxes "
    "includes their share of common pages (PSS). CPU of a request includes gateway, episode, connection and scoring. "
    "Programs that import more need more memory."
)


async def right(task: fe.Task, env: Small) -> float:
    return float(await env.read_text("answer.txt") == f"answer {REQUESTS} to {task.id}")


class Small(fe.ProgramEnvironment):
    """Environment with a small program as the agent."""

    command = ("python", "agent.py", "{instruction}")
    rubric = fe.Rubric(right)
    sandbox_spec = fe.SandboxSpec(preload=("json", "socket"))

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt=f"task {index}", split=split)

    def files(self, task: fe.Task) -> dict[str, str | bytes]:
        return {"agent.py": AGENT}


class Together(Policy):
    """Policy that answers once `count` conversations have begun."""

    def __init__(self, count: int) -> None:
        self.all = asyncio.Barrier(count + 1)

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        return Waits(self.all)


class Waits(PolicySession):
    def __init__(self, everybody: asyncio.Barrier) -> None:
        self.everybody = everybody
        self.asked = 0
        self.task = ""

    async def reply(self, observation: Observation) -> Reply:
        self.asked += 1
        if self.asked == 1:
            self.task = observation[0].content.removeprefix("task ")
            await self.everybody.wait()
        return Reply(Message(role="assistant", content=f"answer {self.asked} to {self.task}"))


def below(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


def shared_out(processes: Iterable[psutil.Process]) -> float:
    """Return the proportional set size (PSS) of processes in MiB."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total / 2**20


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """Put all temporary files of this process in one folder, to make leftovers visible."""
    with tempfile.TemporaryDirectory() as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


async def played(count: int) -> dict[str, Any]:
    """Play the episodes and return the table's figures by name."""
    process, figures = psutil.Process(), dict[str, Any]()
    gateway, policy, before = await shared_gateway(), Together(count), process.memory_full_info().pss
    process_before, children_before, began = below(process), children_cpu(), time.perf_counter()
    async with fe.open_engine("local", concurrency=1, warm=0):
        pass  # opens resources that all engines of a process share, before open files are counted
    files_before = len(os.listdir("/proc/self/fd"))
    with own_temporary_folder() as folder:
        async with fe.open_engine("local", concurrency=count) as engine:
            config = fe.ProgramEnvironmentConfig(wall_s=3600.0)
            episodes = [
                asyncio.create_task(run_episode(lambda: Small(config, sandboxes=engine), policy, task=task, seed=1))
                for task in (Small(config).task("train", number) for number in range(count))
            ]
            asking = asyncio.create_task(policy.all.wait())
            finished, _ = await asyncio.wait([asking, *episodes], return_when=asyncio.FIRST_COMPLETED)
            if asking not in finished:  # an episode ended before it asked: the others would wait forever
                raise SystemExit(f"an episode ended early: {finished.pop().result().error}")
            figures["seconds until all have asked"] = time.perf_counter() - began
            figures["MiB of the process, an episode"] = (process.memory_full_info().pss - before) / 2**20 / count
            figures["MiB of its sandbox, program included"] = shared_out(below(process)) / count
            began, used = time.perf_counter(), time.process_time()
            trajectories = await asyncio.gather(*episodes)
            figures["seconds from there to the last score"] = time.perf_counter() - began
            figures["CPU of the process, ms a request"] = 1e3 * (time.process_time() - used) / (REQUESTS * count)
        figures["CPU of programs and sandboxes, ms an episode"] = 1e3 * (children_cpu() - children_before) / count
        scored = sum(each.valid and each.reward == 1.0 and len(each.turns) == REQUESTS for each in trajectories)
        left_files = len(list(folder.iterdir()))
    left = {
        "processes": len(set(below(process)) - set(process_before)),
        "open files": len(os.listdir("/proc/self/fd")) - files_before,
        "temporary files": left_files,
        "keys of the gateway": gateway.open_episodes,
    }
    return {
        "episodes open at once": f"{count} of {count}",
        "scored as they should be": f"{scored} of {count}",
        **figures,
        "left behind": ", ".join(f"{number} {what}" for what, number in left.items()),
    }


async def measure(args: argparse.Namespace) -> list[str]:
    free_mb = psutil.virtual_memory().available / 2**20
    if free_mb < args.episodes * ROOM_MB:
        raise SystemExit(f"{args.episodes} sandboxes need {args.episodes * ROOM_MB} MiB; {free_mb:.0f} are free")
    return [*table(["what", "figure"], list((await played(args.episodes)).items())), "", ABOUT]


if __name__ == "__main__":
    main("Programs side by side", measure, episodes=500)
