"""Soak test: mixed executions with random kills must lose no result, return no wrong one and leave nothing behind.

    python -m benchmarks.sandbox_soak [--engine docker] [--count 10000] [--kill-every 200] [--kill-daemon-every 2000]

The correct answer of every program is known. Sandboxes are killed from outside at random, and `--kill-daemon-every` (as
root) also kills and restarts a private Docker daemon. A call that fails with `SandboxError` is repeated on another
sandbox, as in a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.sandbox_daemon import OwnDaemon, own_daemon
from forge_env.errors import SandboxError
from forge_env.sandbox import Limits, Sandbox, SandboxEngine, open_engine
from forge_env.sandbox.engines import load_engine

DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint({n})"
LEFT = "open('/tmp/left', 'w').write('x'); open('left', 'w').write('x'); print({n})"
CHEAT = "import os\ndef f(x): os._exit(0)"
KINDS = [
    *["print"] * 50, *["fail"] * 10, *["calls"] * 15, *["wrong"] * 5, *["tests"] * 5, *["wrong tests"] * 3,
    *["daemon"] * 4, *["left"] * 4, *["shell"] * 2, *["late"] * 2,
]  # fmt: skip
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
        code = "def f(x): return x * 3" if kind == "calls" else CHEAT
        outcomes = (await sandbox.run_calls(code, [f"f({number})", "f(2)"])).outcomes
        right = [outcome.value for outcome in outcomes] == [number * 3, 6]
        return right if kind == "calls" else not outcomes
    if kind in ("tests", "wrong tests"):
        code = "def f(x): return x * 3" if kind == "tests" else CHEAT
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


class Soak:
    """One soak run of an engine."""

    def __init__(self, engine: SandboxEngine, args: argparse.Namespace, daemon: OwnDaemon | None) -> None:
        self.engine = engine
        self.args = args
        self.daemon = daemon
        self.chance = random.Random(args.seed)
        self.work: Iterator[int] = iter(range(args.count))
        self.seen: collections.Counter[str] = collections.Counter()
        self.daemon_lock = asyncio.Lock()

    async def run(self) -> None:
        """Run every number once, with `concurrency` concurrent callers."""
        await asyncio.gather(*(self._caller() for _ in range(self.args.concurrency)))

    async def _caller(self) -> None:
        for number in self.work:
            kind = self.chance.choice(KINDS)
            if self.daemon and number and number % self.args.kill_daemon_every == 0:
                await self._kill_daemon(self.daemon)
            while True:
                try:
                    async with self.engine.session() as sandbox:
                        if self.args.kill_every and self.chance.randrange(self.args.kill_every) == 0:
                            self.seen["killed"] += await asyncio.to_thread(kill_one, self.engine.name, self.chance)
                        self.seen["right" if await one(sandbox, kind, number) else f"WRONG {kind}"] += 1
                    break
                except SandboxError:
                    self.seen["repeated"] += 1
                    await asyncio.sleep(WAIT_S)

    async def _kill_daemon(self, daemon: OwnDaemon) -> None:
        async with self.daemon_lock:
            await asyncio.to_thread(daemon.kill)
            self.seen["daemon killed"] += 1
            await asyncio.to_thread(daemon.start)


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
    mark = f".{os.getpid()}."
    left += [str(path) for path in Path(tempfile.gettempdir()).glob(f"forge-env-*{mark}*")]
    left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/forge-env-*{mark}*")]
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        left += [
            f"process {pid}" for pid in file.read().split() if "runner" in _command(pid) or "launch" in _command(pid)
        ]
    return left


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def run(args: argparse.Namespace, daemon: OwnDaemon | None) -> int:
    async with open_engine(args.engine, concurrency=args.concurrency) as engine:
        start = time.perf_counter()
        soak = Soak(engine, args, daemon)
        await soak.run()
        seconds = time.perf_counter() - start
        stats = engine.stats()
    left = left_behind(type(engine))
    print(
        f"{args.engine}: {args.count} executions in {seconds:.0f} s ({args.count / seconds:.0f}/s): {dict(soak.seen)}"
    )
    print(f"  pool: { {k: v for k, v in stats.items() if isinstance(v, (int, float))} }")
    print(f"  left behind: {left or 'nothing'}")
    return 0 if soak.seen["right"] == args.count and not left else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="docker")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--kill-every", type=int, default=200, metavar="N", help="kill a sandbox every N executions")
    parser.add_argument(
        "--kill-daemon-every", type=int, default=0, metavar="N", help="0: never, and use the daemon here"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with own_daemon() if args.kill_daemon_every else contextlib.nullcontext() as daemon:
        sys.exit(asyncio.run(run(args, daemon)))


if __name__ == "__main__":
    main()
