"""Soak test: mixed executions with random kills must lose no result, return no wrong one and leave nothing behind.

The correct answer of every program is known. Sandboxes are killed from outside at random, and every `--restart-every`
executions the shell command `--restart` kills and restarts the Docker daemon. A call that fails with `SandboxError` is
repeated on another sandbox, as in a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.frame import main
from forge_env.errors import SandboxError
from forge_env.figures import duration
from forge_env.sandbox import Limits, Sandbox, SandboxEngine, open_engine
from forge_env.sandbox.engines import load_engine

DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint({n})"
LEFT = "open('/tmp/left', 'w').write('x'); open('left', 'w').write('x'); print({n})"
TRIPLE = "def f(x): return x * 3"
CHEAT = "import os\ndef f(x): os._exit(0)"
KINDS = {
    "print": 50, "fail": 10, "calls": 15, "wrong": 5, "tests": 5, "wrong tests": 3, "daemon": 4, "left": 4, "shell": 2,
    "late": 2,
}  # fmt: skip
"""Kinds of programs and their weights."""
CALLERS = 4
WAIT_S = 0.2
"""Seconds before a call is repeated, since its engine may be restarting."""


async def one(sandbox: Sandbox, kind: str, number: int) -> bool:
    """Run one program; return whether its outcome is correct."""
    if kind == "print":
        return (await sandbox.run_python(f"print({number} * 7)")).stdout == f"{number * 7}\n"
    if kind == "fail":
        result = await sandbox.run_python(f"raise SystemExit({number % 200 + 1})")
        return result.exit_code == number % 200 + 1
    if kind in ("calls", "wrong"):
        code = TRIPLE if kind == "calls" else CHEAT
        outcomes = (await sandbox.run_calls(code, [f"f({number})", "f(2)"])).outcomes
        right = [outcome.value for outcome in outcomes] == [number * 3, 6]
        return right if kind == "calls" else not outcomes
    if kind in ("tests", "wrong tests"):
        code = TRIPLE if kind == "tests" else CHEAT
        judged = await sandbox.run_tests(code, f"from solution import f\nassert f({number}) == {number * 3}")
        return judged.passed is (kind == "tests")
    if kind in ("daemon", "left"):
        source = (DAEMON if kind == "daemon" else LEFT).replace("{n}", str(number))
        return (await sandbox.run_python(source)).stdout == f"{number}\n"
    if kind == "shell":
        shell = await sandbox.shell()
        await shell.run(f"x={number}")
        return (await shell.run("echo $x")).stdout == f"{number}\n"
    return (await sandbox.run_python("while True: pass", limits=Limits(wall_s=0.2))).timed_out


async def soak(engine: SandboxEngine, args: argparse.Namespace) -> collections.Counter[str]:
    """Run every number once, with several callers; return the counts of outcomes."""
    chance, work, lock = random.Random(0), iter(range(args.count)), asyncio.Lock()
    seen: collections.Counter[str] = collections.Counter()

    async def caller() -> None:
        for number in work:
            (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
            if args.restart and number and number % args.restart_every == 0:
                async with lock:
                    await asyncio.to_thread(subprocess.run, args.restart, shell=True, check=True)
                    seen["daemon restarted"] += 1
            while True:
                try:
                    async with engine.session() as sandbox:
                        if args.kill_every and chance.randrange(args.kill_every) == 0:
                            seen["killed"] += await asyncio.to_thread(kill_one, engine.name, chance)
                        seen["right" if await one(sandbox, kind, number) else f"WRONG {kind}"] += 1
                    break
                except SandboxError:
                    seen["repeated"] += 1
                    await asyncio.sleep(WAIT_S)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return seen


def kill_one(engine: str, chance: random.Random) -> int:
    """Kill one of this process's sandboxes from outside; return the number killed, 0 or 1."""
    candidates = [box for box in load_engine(engine).running() if box.owner_pid == os.getpid()]
    if not candidates:
        return 0
    victim = chance.choice(candidates).id
    command = ["kill", "-9", victim] if engine == "local" else ["docker", "kill", victim]
    return int(subprocess.run(command, capture_output=True, check=False).returncode == 0)


def left_behind(engine: type[SandboxEngine]) -> list[str]:
    """Return sandboxes, socket folders, control groups and runners of this process that still exist."""
    left = [box.id for box in engine.running() if box.owner_pid == os.getpid()]
    for folder, pattern in ((Path(tempfile.gettempdir()), ""), (Path("/sys/fs/cgroup"), "**/")):
        left += [str(path) for path in folder.glob(f"{pattern}forge-env-*.{os.getpid()}.*")]
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            left += [f"process {pid}"] * ("runner" in command or "launch" in command)
    return left


async def measure(args: argparse.Namespace) -> list[str]:
    async with open_engine(args.engine, concurrency=CALLERS) as engine:
        start = time.perf_counter()
        seen = await soak(engine, args)
        seconds = time.perf_counter() - start
    left = left_behind(type(engine))
    lines = [
        f"{args.engine}: {args.count} executions in {duration(seconds)} ({args.count / seconds:.0f}/s): {dict(seen)}",
        f"left behind: {left or 'nothing'}",
    ]
    if seen["right"] != args.count or left:
        raise SystemExit("\n".join(lines))
    return lines


if __name__ == "__main__":
    defaults = {"engine": "docker", "count": 10_000, "kill_every": 200, "restart": "", "restart_every": 2000}
    main("Sandboxes under fire", measure, **defaults)
